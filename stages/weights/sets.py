"""Sets of one model for each stage, for `visiond setup`. docs/models.md shows them. Imports no torch."""

from __future__ import annotations

from stages.registry import registry
from stages.weights.catalog import CATALOG, INCLUDED_LICENSE

INCLUDED = ""  # PP-OCRv6 small, which comes with the program
PERMISSIVE = ("Apache-", "MIT", "BSD-")  # how the names of these licenses begin
# By stage the models of a set, the preferred one first; the last one has a permissive license. "fast" has the models of the
# standard job, whose rate is measured.
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "fast": {
        "ocr": (INCLUDED,),
        "yolo": ("yolov8n", "d-fine-nano"),
        "clip": ("clip-b32",),
        "blip": ("blip-base",),
    },
    "balanced": {
        "ocr": (INCLUDED,),
        "yolo": ("rf-detr-small",),
        "clip": ("siglip2-b16-224",),
        "blip": ("blip-large",),
    },
    "best": {
        "ocr": ("pp-ocrv6-medium",),
        "yolo": ("d-fine-xlarge-o365",),
        "clip": ("siglip2-so400m-384",),
        "blip": ("blip-large",),
    },
}


def choose_models(name: str, *, permissive: bool) -> dict[str, str]:
    """The model of each stage. permissive: only under the licenses Apache, MIT and BSD. Raises UnknownName."""
    if name not in SETS:
        raise registry.UnknownName("set", name, SETS)
    return {
        stage: next(model for model in models if is_permissive(model) or not permissive)
        for stage, models in SETS[name].items()
    }


def license_of(model: str) -> str:
    return CATALOG[model].license if model else INCLUDED_LICENSE


def is_permissive(model: str) -> bool:
    return license_of(model).startswith(PERMISSIVE)


def sets_of(model: str) -> list[str]:
    """The names of the sets that have it."""
    return [name for name, chosen in SETS.items() if any(model in models for models in chosen.values())]
