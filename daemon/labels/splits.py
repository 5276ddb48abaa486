"""Which images of a data set no training may learn from, as the data set itself says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from daemon.labels.saying import has_image_suffix

TRAIN = "train"
OTHERS = ("val", "validation", "test")  # of data.yaml
FOLDERS = (TRAIN, "valid", "val", "test")  # each with a file of COCO, as Roboflow exports them


def find_held_out(about: Mapping[str, Any], root: Path, names: Iterable[str]) -> dict[str, bool | None]:
    """Of images by their names below root: True for those that data.yaml has only for validation or tests, or that it names
    nowhere although it has both; False for those only to learn from. Of others, it does not say it. about: data.yaml."""
    places = {name: {*_places_of(name)} for name in names}
    known = set[str]().union(*places.values())
    learnt = {*_find_places(about, (TRAIN,), root, known)}
    others = {*_find_places(about, OTHERS, root, known)}
    found = {name: _is_held_out(each, learnt, others) for name, each in places.items()}
    return found if any(found.values()) else {}


def _is_held_out(places: set[str], learnt: set[str], others: set[str]) -> bool | None:
    is_learnt, is_other = bool(places & learnt), bool(places & others)
    if is_learnt != is_other:
        return is_other
    return True if learnt and others and not is_learnt else None


def _places_of(name: str) -> Iterator[str]:
    """The image without its suffix, and the folders that it is in."""
    path = PurePosixPath(os.path.splitext(name)[0] if has_image_suffix(name) else name)
    yield from map(str, (path, *path.parents))


def _find_places(about: Mapping[str, Any], keys: Iterable[str], root: Path, known: set[str]) -> Iterator[str]:
    """The folders and images that data.yaml names under these keys, those of `known`."""
    for said in filter(None, (about.get(key) for key in keys)):
        for path in filter(None, [said] if isinstance(said, str) else map(str, said)):
            for place in _read_places(os.path.join(str(about.get("path", "")), path), root):
                yield from [end for end in _ends(place) if end in known][:1]


def _read_places(path: str, root: Path) -> list[str]:
    """The path; or if it is a list of images that is here, these without their suffixes."""
    lists = (file for end in _ends(path) if (file := root / end).is_file() and file.suffix == ".txt")
    if not (listed := next(lists, None)):
        return [path]
    return [os.path.splitext(line)[0] for line in listed.read_text("utf-8-sig").splitlines()]


def _ends(path: str) -> Iterator[str]:
    """The path, then without its first folder, and so on: it may be one of another machine, or begin too far up."""
    parts = [part for part in path.strip().replace("\\", "/").split("/") if part not in ("", ".", "..")]
    yield from ("/".join(parts[first:]) or "." for first in range(len(parts) or 1))
