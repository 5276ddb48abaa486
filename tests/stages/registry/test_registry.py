from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import msgspec
import pytest

from daemon.core.sidecar import json_schema
from stages.blip.descriptor import Caption
from stages.classifier.descriptor import CLASSIFIER, Classes
from stages.contract.base import Stage, StageSpec
from stages.registry import registry


def test_every_backend_named_is_there() -> None:
    for stage in registry.STAGES.values():
        for backend in stage.backends.values():
            module, _, name = backend.place.partition(":")
            assert issubclass(getattr(import_module(module), name), Stage)


def test_stages_run_in_the_order_of_the_pipeline() -> None:
    assert registry.ORDER == ("ocr", "yolo", "clip", "blip")
    assert [stage.key for stage in registry.STAGES.values()] == [
        "ocr",
        "objects",
        "clip",
        "caption",
        "classifier",
        "hash",
    ]
    assert registry.sort_stages(["gone", "blip", "also gone", "ocr"]) == ["ocr", "blip", "also gone", "gone"]
    assert registry.sort_stages(
        ["hash", "classifier_b", "blip_b", "blip", "classifier_a", "classifier", "blip_a"]
    ) == [*("blip", "blip_a", "blip_b", "classifier", "classifier_a", "classifier_b", "hash")]


def test_a_variant_has_the_backends_and_the_results_of_its_stage_under_its_own_name() -> None:
    safety = registry.find_stage("classifier_safety")
    assert (safety.name, safety.key, safety.backends) == (
        "classifier_safety",
        "classifier_safety",
        CLASSIFIER.backends,
    )
    answer = Classes("nsfw", 0.75, {"nsfw": 0.75})
    assert registry.decode("classifier_safety", msgspec.json.encode(answer)) == answer
    assert (
        registry.build(StageSpec(name="classifier_safety", backend="fake"), "cpu").name == "classifier_safety"
    )


def test_a_plug_in_may_have_variants_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STAGES, "quality", replace(CLASSIFIER, name="quality", key="quality"))
    assert registry.find_stage("quality_a").name == "quality_a"
    patterns = json.loads(json_schema())["$defs"]["Sidecar"]["patternProperties"]
    assert [pattern.partition("_")[0] for pattern in patterns] == ["^blip", "^classifier", "^quality"]


@pytest.mark.parametrize(
    "name",
    ["classifier_", "classifier_Safety", "classifier_a_b", "classifier_1", "ocr_2", "hash_two", "gone_a"],
)
def test_other_names_are_no_variants(name: str) -> None:
    assert not registry.has_stage(name)
    with pytest.raises(registry.UnknownName):
        registry.find_stage(name)


def test_a_stage_runs_after_those_that_it_uses() -> None:
    for place, stage in enumerate(registry.STAGES.values()):
        assert {*stage.uses} <= {*registry.ORDER[:place]}


def test_a_stage_is_built_from_its_spec() -> None:
    spec = StageSpec(name="yolo", backend="fake")
    stage = registry.build(spec, "cpu")
    assert stage.spec is spec
    assert stage.name == "yolo"


@pytest.mark.parametrize(
    ("stage", "backend", "message"),
    [
        (
            "yolo",
            "ultralytic",
            'there is no backend for yolo called "ultralytic"; did you mean "ultralytics"?',
        ),
        ("ocr", "zzz", 'there is no backend for ocr called "zzz"; choose one of fake, ppocr, reader.'),
        ("clipp", "fake", 'there is no stage "clipp"; did you mean "clip"?'),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    stage: str, backend: str, message: str
) -> None:
    with pytest.raises(registry.UnknownName) as caught:
        registry.build(StageSpec(name=stage, backend=backend), "cpu")
    assert str(caught.value) == message


def test_a_result_survives_its_way_through_json() -> None:
    caption = Caption("a red circle", 0.5)
    assert registry.decode("blip", msgspec.json.encode(caption)) == caption
    with pytest.raises(registry.UnknownName):
        registry.decode("blop", b"{}")


def test_neither_the_registry_nor_packs_nor_fakes_load_torch() -> None:
    program = (
        "import sys, stages.registry.registry as r, stages.weights.packs, stages.registry.fake\n"
        "from stages.contract.base import StageSpec\n"
        "[r.build(StageSpec(name=name, backend='fake'), 'cpu').load() for name in r.ORDER]\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ultralytics', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
