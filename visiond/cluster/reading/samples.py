"""Reads a tar as WebDataset does: neighbors with one key, the name up to the first dot of its last part, are a sample, and
what follows that dot is the ending of a file in it.

Its rules are those of base_plus_ext, tar_file_iterator and group_by_keys in webdataset 1.0 (tariterators.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Container, Iterator, Mapping
from typing import IO, NamedTuple

from visiond.cluster.reading.objects import open_stream

KEY = re.compile(rb"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
NO_SAMPLE = re.compile(rb"__[^/]*__($|/)")  # data about the tar itself
LOOKED_AT = 100  # samples, for the endings that a tar has


class SampleImage(NamedTuple):
    """name: in the tar. row: the number of its sample in the tar, from 0; -1 without one. texts: of its sample, by their
    endings."""

    name: bytes
    data: bytes
    row: int
    texts: Mapping[str, str]


class _Damaged(OSError):
    """A tar that cannot be read to its end."""


class _Member(NamedTuple):
    """A file in a tar. ending: in small letters."""

    name: bytes
    row: int
    ending: str
    file: IO[bytes]

    def read(self) -> bytes:
        """Raises OSError."""
        with _damage_named():
            return self.file.read()

    @property
    def is_image(self) -> bool:
        from daemon.core.jobs import IMAGE_SUFFIXES

        return os.path.splitext(self.name)[1].lower() in IMAGE_SUFFIXES


def read_samples(url: str, endings: Container[str]) -> Iterator[SampleImage]:
    """Each image in a tar, from its start to its end. As in a WebDataset, the name says what is an image. endings: of the
    files that are read as texts. Raises OSError, after the images before the damage."""
    row, texts = -1, dict[str, str]()
    waiting: list[SampleImage] = []  # for the texts of their sample, which may stand behind them
    try:
        for member in _members(url):
            if member.row > row:
                yield from waiting
                waiting.clear()
                row, texts = member.row, {}
            if member.is_image:
                found = member.row >= 0
                waiting.append(SampleImage(member.name, member.read(), member.row, texts if found else {}))
            elif member.ending in endings:
                texts[member.ending] = member.read().decode(errors="replace")
            if not endings:
                yield from waiting
                waiting.clear()
    except OSError:
        yield from waiting
        raise
    yield from waiting


def find_endings(url: str) -> dict[str, bool]:
    """The endings of files that are no images, in the first samples of a tar or before its damage, and whether each is a
    text: UTF-8 without a null character. Raises OSError."""
    found = dict[str, bool]()
    with contextlib.suppress(_Damaged):
        for member in _members(url):
            if member.row >= LOOKED_AT:
                break
            if member.row >= 0 and not member.is_image and found.get(member.ending, True):
                found[member.ending] = _is_text(member.read())
    return found


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _members(url: str) -> Iterator[_Member]:
    """Raises OSError."""
    row, key = -1, b""
    with _damage_named(), open_stream(url) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
        for each in archive:
            if not each.isfile():
                continue
            part, name = archive.extractfile(each), os.fsencode(each.name)
            assert part
            parts = None if NO_SAMPLE.match(name) else KEY.fullmatch(name)
            if parts is None:
                yield _Member(name, -1, "", part)
                continue
            if parts[1] != key:
                row, key = row + 1, parts[1]
            yield _Member(name, row, parts[2].decode(errors="replace").lower(), part)


@contextlib.contextmanager
def _damage_named() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise _Damaged(f"the tar cannot be read to its end: {error}") from error
