"""Finds the images of the ledger that a file of labels speaks of, and turns its boxes into their pixels."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from daemon.core.labels import Box, Kind, ObjectLabel, Said, Value
from daemon.core.urls import is_url
from daemon.labels.saying import has_image_suffix
from daemon.ledger.records import Reader
from daemon.ledger.rows import read_contents
from stages.contract.files import open_file

SHAPE = 0.02  # by how much width / height of an image may differ from that of a resized copy


class KnownImage(NamedTuple):
    """Width and height in pixels, upright."""

    digest: bytes
    width: int
    height: int


@dataclass
class Matches:
    """images: by name, as the file of labels has it. unknown: names of which the ledger has no result; unfinished: how many of
    these say which bytes they mean, by a digest or a file that is there. ambiguous: names that several
    different images have, with the location of one. by_file_name: how many were found by nothing else."""

    images: dict[str, KnownImage] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unfinished: int = 0
    ambiguous: dict[str, str] = field(default_factory=dict)
    by_file_name: int = 0


def find_images(
    reader: Reader, names: Iterable[str], folder: Path, *, by_file_name: bool, step: Callable[[int], None]
) -> Matches:
    """names: digests, paths and addresses. A relative one is looked for below `folder` first, where the bytes of the file say
    which image it is; then an image whose path ends with it. by_file_name: of a name that is not found, its last part is
    enough. step: called with the number of images of the ledger that were looked at."""
    found = Matches()
    digests = {name: digest_of(name, folder) for name in dict.fromkeys(names)}
    sizes = _sizes(reader, {*digests.values()} - {b""})
    if left := [name for name, digest in digests.items() if digest not in sizes]:
        known = {name for name in left if digests[name]}  # which bytes they mean
        digests |= _find_by_path(reader, left, found, step, by_file_name=by_file_name)
        sizes |= _sizes(reader, {digests[name] for name in left} - {b""})
        found.unfinished = len(known.intersection(found.unknown))
    found.images = {name: sizes[digest] for name, digest in digests.items() if digest in sizes}
    return found


def digest_of(name: str, folder: Path) -> bytes:
    """Empty if it is neither a digest nor a file there."""
    bare = name.removeprefix("sha256:").lower()
    if len(bare) == 64 and all(letter in "0123456789abcdef" for letter in bare):
        return bytes.fromhex(bare)
    if is_url(name) or os.path.isabs(name) or "\0" in name:
        return b""
    try:
        with open_file(folder / name) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""


def _sizes(reader: Reader, digests: set[bytes]) -> dict[bytes, KnownImage]:
    with reader.lend() as connection:
        contents, _ = read_contents(connection, [(digest,) for digest in digests])
    return {digest: KnownImage(digest, width, height) for digest, (_, width, height, _) in contents.items()}


def _find_by_path(
    reader: Reader, names: Sequence[str], found: Matches, step: Callable[[int], None], *, by_file_name: bool
) -> dict[str, bytes]:
    """The digest of each, or nothing. One pass through the ledger."""
    wanted = defaultdict(list)
    for name in names:
        last = (own := _parts(name))[-1]
        wanted[last, has_image_suffix(last)].append((name, own))
    # Of each name: by digest, how many parts of a path are as in the name, and a place of such a file.
    candidates: dict[str, dict[bytes, tuple[int, str]]] = defaultdict(dict)
    for looked, record in enumerate(reader.newest_done(with_results=False), 1):
        if looked % 4096 == 0:
            step(looked)
        here = [os.fsdecode(record.location), os.fsdecode(os.path.join(record.inbox_path, record.path))]
        for parts, has_suffix in chain.from_iterable(map(_spellings, here)):
            for name, own in wanted.get((parts[-1], has_suffix), ()):
                agreed = _count_agreeing(own, parts)
                if agreed > candidates[name].get(record.digest, (0,))[0]:
                    candidates[name][record.digest] = (agreed, here[0])
    chosen = {name: _choose(name, candidates[name], found, by_file_name=by_file_name) for name in names}
    return {name: digest if alone else b"" for name, digest, alone in _keep_alone(chosen, candidates, found)}


def _keep_alone(
    chosen: Mapping[str, bytes], candidates: Mapping[str, Mapping[bytes, tuple[int, str]]], found: Matches
) -> Iterator[tuple[str, bytes, bool]]:
    """Each name, its digest, and whether it may be that image: not if several names are it by their last parts alone."""
    loose = Counter(
        digest for name, digest in chosen.items() if digest and not _is_whole(name, candidates[name][digest])
    )
    for name, digest in chosen.items():
        is_loose = bool(digest) and not _is_whole(name, candidates[name][digest])
        if is_loose and loose[digest] > 1:
            found.ambiguous[name] = candidates[name][digest][1]
        else:
            found.by_file_name += is_loose
        yield name, digest, not is_loose or loose[digest] == 1


def _is_whole(name: str, candidate: tuple[int, str]) -> bool:
    return candidate[0] == len(_parts(name))


def _choose(
    name: str, candidates: Mapping[bytes, tuple[int, str]], found: Matches, *, by_file_name: bool
) -> bytes:
    """The digest of the one whose path is most like the name; nothing, and a note of why, if there is none."""
    best = max((agreed for agreed, _ in candidates.values()), default=0)
    alike = {digest: place for digest, (agreed, place) in candidates.items() if agreed == best}
    if not alike or not (best == len(_parts(name)) or by_file_name):
        found.unknown.append(name)
        return b""
    if len(alike) > 1:
        found.ambiguous[name] = next(iter(alike.values()))
        return b""
    return next(iter(alike))


def _parts(path: str) -> list[str]:
    """Without . and .. ; Windows writes \\ between them, and macOS an accent as a character of its own."""
    parts = unicodedata.normalize("NFC", path.replace("\\", "/")).split("/")
    return [part for part in parts if part not in ("", ".", "..")] or [""]


def _spellings(path: str) -> Iterator[tuple[list[str], bool]]:
    """The parts of a file's path, and without its suffix, which names in YOLO do not have if the images are not there. Each
    with whether it ends with a suffix of images."""
    parts = _parts(path)
    yield parts, has_image_suffix(parts[-1])
    if has_image_suffix(parts[-1]):
        stem = os.path.splitext(parts[-1])[0]
        yield [*parts[:-1], stem], has_image_suffix(stem)


def _count_agreeing(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts of two paths are equal, from the end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def in_pixels(said: Said, image: KnownImage, left_out: Counter[str]) -> Value | None:
    """The value with boxes in pixels of the upright image, cut at its borders. None if they are of an image of another
    shape, or all outside. left_out: counts what is not taken, by why."""
    if said.kind is not Kind.OBJECTS:
        return said.value
    if said.size and abs(said.size[0] / said.size[1] / (image.width / image.height) - 1) > SHAPE:
        left_out["images that were labelled in another shape (turned, or cut)"] += 1
        return None
    scale = said.scale or (image.width, image.height)
    factors = (image.width / scale[0], image.height / scale[1])
    boxes = [
        replace(each, box=_cut(each.box, factors, image))
        for each in said.value
        if isinstance(each, ObjectLabel)
    ]
    if all(each.box[0] < each.box[2] and each.box[1] < each.box[3] for each in boxes):
        return boxes
    left_out["images with boxes that are empty or outside them"] += 1
    return None


def _cut(box: Box, factors: tuple[float, float], image: KnownImage) -> Box:
    limits = (image.width, image.height, image.width, image.height)
    x0, y0, x1, y1 = (
        round(min(max(value * factors[n % 2], 0.0), limits[n]), 3) for n, value in enumerate(box)
    )
    return x0, y0, x1, y1


def keep_known(
    said: Iterable[Said], images: Mapping[str, KnownImage], left_out: Counter[str]
) -> dict[tuple[bytes, Kind], Said]:
    """By digest and kind, in pixels. What a file says again under the same name is added. Equal files have one label: that of
    the first name."""
    kept: dict[tuple[bytes, Kind], Said] = {}
    names: dict[tuple[bytes, Kind], str] = {}
    for each in said:
        if not (image := images.get(each.image)):
            continue
        key = (image.digest, each.kind)
        if names.setdefault(key, each.name) != each.name or (each.origin and key in kept):
            left_out["labels of an image that has labels under another name too"] += 1
        elif (value := in_pixels(each, image, left_out)) is not None:
            kept[key] = each._replace(value=_add(kept[key].value, value) if key in kept else value)
    return kept


def find_split(
    said: Iterable[Said], images: Mapping[str, KnownImage], kept: Container[tuple[bytes, Kind]]
) -> dict[bytes, bool]:
    """By digest, what is said of `held_out`. Of equal files, all are if one is. kept: as `keep_known` returns it."""
    found: dict[bytes, bool] = {}
    for each in said:
        image = images.get(each.image)
        if image and each.held_out is not None and (image.digest, each.kind) in kept:
            found[image.digest] = found.get(image.digest, False) or each.held_out
    return found


def _add(before: Value, value: Value) -> Value:
    if isinstance(before, str) or isinstance(value, str):
        return f"{before}\n{value}"
    if isinstance(before, dict) and isinstance(value, dict):
        return before | value
    return [*before, *value]
