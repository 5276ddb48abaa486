"""Do two runs give the same answers? Compares their sidecars, file by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

Sidecar = Mapping[str, Any]

# What is compared. Figures such as scores are left out: in half precision they depend a little on the batch.
ASPECTS: dict[str, Callable[[Sidecar], object]] = {
    "texts": lambda found: [line["text"] for line in found["ocr"]["lines"]],
    "text boxes": lambda found: [line["box"] for line in found["ocr"]["lines"]],
    "objects": lambda found: sorted(detection["label"] for detection in found["objects"]["detections"]),
    "tags": lambda found: [tag["label"] for tag in found["clip"]["tags"]],
    "captions": lambda found: found["caption"]["text"],
    "bins": lambda found: found["bin"]["name"],
}


class Agreement(msgspec.Struct, frozen=True):
    """How many of the compared images have other answers, by aspect."""

    images: int
    different: dict[str, int]


def read_answers(results: Path) -> dict[str, tuple[object, ...]]:
    """The answers of all images whose sidecars are in a folder, by name."""
    answers = {}
    for file in results.glob("*.json"):
        sidecar = msgspec.json.decode(file.read_bytes())
        answers[file.name] = tuple(aspect(sidecar) for aspect in ASPECTS.values())
    return answers


def compare_answers(
    some: Mapping[str, tuple[object, ...]], others: Mapping[str, tuple[object, ...]]
) -> Agreement:
    """Compare the answers of the images that both have."""
    names = some.keys() & others.keys()
    different = {
        aspect: sum(some[name][index] != others[name][index] for name in names)
        for index, aspect in enumerate(ASPECTS)
    }
    return Agreement(len(names), different)
