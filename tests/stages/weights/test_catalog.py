from __future__ import annotations

import dataclasses

import pytest

from stages.contract.descriptor import KnownModel
from stages.contract.recognition import make_backend
from stages.registry import registry
from stages.weights import catalog
from stages.weights.catalog import CATALOG, ULTRALYTICS, find_backend, find_published, offered
from stages.weights.measured import RATES
from stages.weights.names import parse


def test_each_model_has_one_name_and_each_place_one_model() -> None:
    rows = [entry for family in FAMILIES for entry in family.entries()]
    assert len(rows) == len(CATALOG) == len({(entry.repository, entry.file) for entry in rows})
    for entry in rows:
        reference = parse(entry.name)
        assert reference
        assert (reference.repository, reference.file, reference.entry) == (
            entry.repository,
            entry.file,
            entry,
        )


FAMILIES = (
    *catalog.DETECTORS,
    *catalog.TOWERS,
    *catalog.MULTILINGUAL,
    *catalog.CAPTIONERS,
    *catalog.READERS,
    *catalog.RECOGNIZERS,
)


def test_every_fact_has_a_source() -> None:
    assert all(entry.source.startswith("https://") for entry in CATALOG.values())


def test_models_of_ultralytics_are_under_its_license() -> None:
    licenses = {entry.license for entry in CATALOG.values() if entry.type == ULTRALYTICS}
    assert licenses == {"AGPL-3.0"} == {registry.find_backend("yolo", ULTRALYTICS).find_license({})}


@pytest.mark.parametrize(
    ("name", "stage", "backend"),
    [
        ("yolo26x", "yolo", "ultralytics"),
        ("rf-detr-small", "yolo", "transformers"),
        ("clip-b32", "clip", "transformers"),
        ("siglip2-b16-224", "clip", "transformers"),
        ("siglip2-b16-naflex", "clip", "naflex"),
        ("blip-large", "blip", "transformers"),
        ("lighton-ocr-2-1b", "ocr", "reader"),
        ("deepseek-ocr2", "ocr", "reader"),
        ("pp-ocrv6-medium", "ocr", "ppocr"),
        ("pp-ocrv5-arabic", "ocr", "ppocr"),
    ],
)
def test_the_backend_follows_from_the_model(name: str, stage: str, backend: str) -> None:
    assert (CATALOG[name].stage, find_backend(CATALOG[name])) == (stage, backend)


def test_only_models_that_a_backend_takes_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    blip = registry.STAGES["blip"]
    only = {"transformers": blip.backends["transformers"]}
    monkeypatch.setitem(registry.STAGES, "blip", dataclasses.replace(blip, backends=only))
    assert {entry.family for entry in offered().values() if entry.stage == "blip"} == {"BLIP"}
    backend = make_backend(
        "x:Y", blip.backends["transformers"].options, (KnownModel("florence2", "Florence2", ""),)
    )
    monkeypatch.setitem(
        registry.STAGES, "blip", dataclasses.replace(blip, backends=only | {"other": backend})
    )
    assert find_backend(CATALOG["florence2-base"]) == "other"
    # Taken out of the table itself, it would come back as the last one, for the tests that follow.
    monkeypatch.setattr(
        registry, "STAGES", {name: each for name, each in registry.STAGES.items() if name != "blip"}
    )
    assert not any(entry.stage == "blip" for entry in offered().values())


def test_a_repository_is_found_whatever_the_case_of_its_letters() -> None:
    assert find_published("GOOGLE/siglip2-base-patch16-224") == CATALOG["siglip2-b16-224"]
    assert find_published("Ultralytics/YOLOv8", "yolov8s.pt") == CATALOG["yolov8s"]
    assert find_published("Ultralytics/YOLOv8") is None


def test_measured_models_are_in_the_catalog() -> None:
    assert CATALOG.keys() >= RATES.keys()
