"""Which files are unpacked: by their names, and a TIFF only if it has more than one page."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from importlib.util import find_spec

from stages.images.tiff import COPY_OR_MASK, NEW_SUBFILE_TYPE

FOLDER = b".unpacked"  # ends the name of the folder with what was in a file
SUFFIXES: dict[str, tuple[bytes, ...]] = {
    "zip": (b".zip", b".cbz"),
    "tar": (b".tar", b".tar.gz", b".tgz", b".tar.bz2", b".tbz2", b".tar.xz", b".txz"),
    "tiff": (b".tif", b".tiff"),
    "pdf": (b".pdf",),
    "video": (b".mp4", b".m4v", b".mov", b".mkv", b".webm", b".avi", b".mpg", b".mpeg", b".wmv"),
}
TIFF = "tiff"
ARCHIVES = ("zip", "tar")
DIRECTORIES = 64  # of a TIFF that are looked at
LIBRARIES = {"pdf": "pypdfium2", "video": "av"}  # of the extra `documents`


def kind_of(path: bytes, wanted: Collection[str]) -> str:
    """The kind of a file, if it is one of those that are wanted; else "". An archive that was in an archive stays as it
    is: otherwise a file of some kilobytes could become any number of files."""
    name = path.lower()
    is_inside = any(part.endswith(FOLDER) for part in path.split(b"/")[:-1])
    return next(
        (
            kind
            for kind, suffixes in SUFFIXES.items()
            if kind in wanted and name.endswith(suffixes) and not (is_inside and kind in ARCHIVES)
        ),
        "",
    )


def find_missing(wanted: Collection[str]) -> str:
    """Which library is not installed, and what to type; empty if none is missing."""
    for kind, library in LIBRARIES.items():
        if kind in wanted and find_spec(library) is None:
            return (
                f'[[inbox]] unpack = ["{kind}"] needs {library}. Install the extra documents: '
                "pip install 'visiond[documents]'"
            )
    return ""


def has_further_pages(fd: int) -> bool:
    """Whether a TIFF has more than one page, without masks and smaller copies. The file is not mapped: one that becomes
    shorter meanwhile would kill this process."""
    head = os.pread(fd, 16, 0)
    order = "<" if head[:2] == b"II" else ">"
    found = 0
    try:
        is_big = struct.unpack_from(order + "H", head, 2) == (43,)
        number, count, entry_bytes = (
            (order + "Q", order + "Q", 20) if is_big else (order + "I", order + "H", 12)
        )
        (at,) = struct.unpack_from(number, head, 8 if is_big else 4)
        for _ in range(DIRECTORIES):
            (entries,) = _read(fd, count, at)
            at += struct.calcsize(count)
            tag, *_, kind = _read(fd, f"{order}HH{number[1]}I", at)  # of the first entry, as tags are sorted
            found += tag != NEW_SUBFILE_TYPE or not kind & COPY_OR_MASK
            (at,) = _read(fd, number, at + entries * entry_bytes)
            if found > 1 or not at:
                break
    except (struct.error, OSError, OverflowError):  # it is damaged, or no TIFF
        pass
    return found > 1


def _read(fd: int, form: str, at: int) -> tuple[int, ...]:
    """Raises struct.error, OSError."""
    return struct.unpack(form, os.pread(fd, struct.calcsize(form), at))
