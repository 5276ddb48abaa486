"""Do two runs give the same answers? Compares their sidecars, file by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

Section = Mapping[str, Any]

# What is compared: a section of the sidecar, and how its answer is read. A stage that is not in use has no section. Scores
# and other figures are left out: in half precision they depend a little on the batch.
ASPECTS: dict[str, tuple[str, Callable[[Section], object]]] = {
    "texts": ("ocr", lambda ocr: [line["text"] for line in ocr["lines"]]),
    "text boxes": ("ocr", lambda ocr: [line["box"] for line in ocr["lines"]]),
    "objects": ("objects", lambda objects: sorted(found["label"] for found in objects["detections"])),
    "tags": ("clip", lambda clip: [tag["label"] for tag in clip["tags"]]),
    "captions": ("caption", lambda caption: caption["text"]),
    "bins": ("bin", lambda bin: bin["name"]),
}


class Agreement(msgspec.Struct, frozen=True):
    """How many images were compared, and for how many of them each aspect of the answers is different."""

    images: int
    different: dict[str, int]


def read_answers(results: Path) -> dict[str, tuple[object, ...]]:
    """The answers of all images whose sidecars are in a folder, by name."""
    answers = {}
    for file in results.glob("*.json"):
        sidecar = msgspec.json.decode(file.read_bytes())
        answers[file.name] = tuple(
            aspect(sidecar[section]) if sidecar.get(section) else None for section, aspect in ASPECTS.values()
        )
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
