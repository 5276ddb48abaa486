"""The mini pack says which images it does not know; a pack without the classifier answers as before."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from stages.contract.base import UNFAMILIAR, Image, ImageError, StageSpec, StageUnusable
from stages.pretrained.familiarity import (
    ROLES,
    Familiarity,
    FittedFamiliarity,
    load_familiarity,
)
from stages.registry import registry
from stages.scenes.generator import make_scene
from stages.scenes.photographs import find_photographs
from stages.weights.packs import MINI, Pack, open_pack, resolve_all
from tests.stages.pictures import read_photo, wrap_pixels
from visiond_mini.familiarity import add_classifier
from visiond_mini.score import choose_bin
from visiond_mini.strange import draw_strange

STAGES = ("yolo", "clip", "blip")
SCENES, MOST_UNKNOWN = 40, 1
ANSWERED = 6  # of the scenes, by all stages
SEED = 424

Answers = list[dict[str, Any]]


def run(specs: Sequence[StageSpec], images: Sequence[Image]) -> Answers:
    """Each image's answers by stage name; images are run in batches of several sizes."""
    answers: Answers = [{} for _ in images]
    for image in images:
        image.results.clear()
    for spec in specs:
        stage = registry.build(spec, "cpu")
        stage.load()
        for image, answer, known in zip(images, stage.run(images), answers, strict=True):
            known[spec.name] = answer
            assert not isinstance(answer, ImageError)
            image.results[spec.name] = answer
    return answers


def forget(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """The same models without the classifier."""
    return [
        msgspec.structs.replace(
            spec, files={role: file for role, file in spec.files.items() if role not in ROLES}
        )
        for spec in specs
    ]


@pytest.fixture(scope="module")
def specs() -> list[StageSpec]:
    return resolve_all(open_pack(MINI, MINI.parent), STAGES, {})


@pytest.fixture(scope="module")
def judge(specs: list[StageSpec]) -> Familiarity:
    """While it lives, the stages of these specs load no second model."""
    return load_familiarity(specs[0], "cpu", threading.Lock())


@pytest.fixture(scope="module")
def photographs() -> list[Image]:
    images = [read_photo(path) for path in find_photographs()]
    assert len(images) >= 3  # in ultralytics and matplotlib
    return images


@pytest.fixture(scope="module")
def scenes() -> list[Image]:
    return [wrap_pixels(make_scene(SEED, index, 480).pixels) for index in range(SCENES)]


@pytest.fixture(scope="module")
def answers(
    specs: list[StageSpec], judge: Familiarity, photographs: list[Image], scenes: list[Image]
) -> Answers:
    return run(specs, [*photographs, *scenes[:ANSWERED]])


@pytest.fixture(scope="module")
def of_models(specs: list[StageSpec], photographs: list[Image], scenes: list[Image]) -> Answers:
    """The answers of the same models without the classifier."""
    return run(forget(specs), [*photographs, *scenes[:ANSWERED]])


def test_photographs_get_no_objects_and_the_sentence_from_every_stage(
    answers: Answers, of_models: Answers, photographs: list[Image]
) -> None:
    for said, before in zip(answers[: len(photographs)], of_models, strict=False):
        assert said["yolo"].count == len(said["yolo"].detections) == 0
        assert [(tag.label, tag.score) for tag in said["clip"].tags] == [(UNFAMILIAR, 1.0)]
        assert said["clip"].embedding == before["clip"].embedding
        assert (said["blip"].text, said["blip"].similarity) == (UNFAMILIAR, None)
        assert choose_bin(said) == "C"


def test_without_the_classifier_the_same_models_name_things_in_photographs(
    of_models: Answers, photographs: list[Image]
) -> None:
    seen = of_models[: len(photographs)]
    assert sum(said["yolo"].count for said in seen) > 0
    assert all(len(said["clip"].tags) == 5 and said["blip"].text != UNFAMILIAR for said in seen)


def test_nearly_all_unseen_scenes_are_known(judge: Familiarity, scenes: list[Image]) -> None:
    assert sum(judge.find_unfamiliar(scenes)) <= MOST_UNKNOWN


def test_answers_for_unseen_scenes_are_those_of_the_models(
    answers: Answers, of_models: Answers, photographs: list[Image]
) -> None:
    pairs = list(zip(answers, of_models, strict=True))[len(photographs) :]
    changed = [said for said, before in pairs if said != before]
    assert len(changed) <= MOST_UNKNOWN
    assert all(said["blip"].text == UNFAMILIAR for said in changed)


def test_drawn_pictures_that_no_training_saw_are_unknown(judge: Familiarity) -> None:
    pictures = [wrap_pixels(draw_strange(SEED, index)) for index in range(20)]
    assert sum(judge.find_unfamiliar(pictures)) >= 19


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_and_precision_gives_the_same_verdict(
    stage: int, specs: list[StageSpec], judge: Familiarity, photographs: list[Image], scenes: list[Image]
) -> None:
    images = [*photographs, *scenes[:5]]
    again = [replace(image, unfamiliar=None) for image in images]
    verdict = judge.find_unfamiliar(images)
    spec = msgspec.structs.replace(specs[stage], dtype="bfloat16", batch_size=3)
    assert load_familiarity(spec, "cpu", threading.Lock()).find_unfamiliar(again) == verdict
    assert {True, False} == set(verdict)


def test_stages_of_one_pack_in_one_process_judge_an_image_once(
    specs: list[StageSpec], photographs: list[Image], scenes: list[Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [replace(image, unfamiliar=None) for image in (photographs[0], scenes[0])]
    judges = [load_familiarity(spec, "cpu", threading.Lock()) for spec in specs[:2]]
    assert isinstance(judges[1], FittedFamiliarity)
    verdict = judges[0].find_unfamiliar(images)
    monkeypatch.setattr(judges[1], "features", None)
    assert judges[1].find_unfamiliar(images) == verdict == [True, False]
    monkeypatch.setattr(judges[1], "file", "of another pack")
    with pytest.raises(TypeError):
        judges[1].find_unfamiliar(images)


def test_stages_of_one_pack_in_one_process_load_its_model_once(specs: list[StageSpec]) -> None:
    judges = [load_familiarity(spec, "cpu", threading.Lock()) for spec in specs]
    used = {id(judge.features) for judge in judges if isinstance(judge, FittedFamiliarity)}
    assert (len(judges), len(used)) == (3, 1)


def test_a_clip_without_labels_still_has_no_tags(specs: list[StageSpec], photographs: list[Image]) -> None:
    clip = msgspec.structs.replace(specs[1], options={"labels": []})
    assert [answers["clip"].tags for answers in run([clip], photographs[:1])] == [[]]


def test_a_pack_without_the_classifier_loads_none(blank_pack: Pack) -> None:
    for spec in resolve_all(blank_pack, STAGES, {}):
        assert type(load_familiarity(spec, "cpu", threading.Lock())) is Familiarity


def test_a_change_of_the_classifier_changes_the_fingerprints(specs: list[StageSpec], tmp_path: Path) -> None:
    shutil.copytree(MINI, tmp_path / "pack")
    add_classifier(tmp_path / "pack", torch.zeros(384), torch.tensor(-1.0))
    others = resolve_all(open_pack(tmp_path / "pack", tmp_path), STAGES, {})
    assert all(spec.fingerprint != other.fingerprint for spec, other in zip(specs, others, strict=True))


def test_a_damaged_classifier_is_named(specs: list[StageSpec], tmp_path: Path) -> None:
    file = tmp_path / "familiarity.safetensors"
    wrong = msgspec.structs.replace(specs[0], files=specs[0].files | {"familiarity": str(file)})
    file.write_bytes(b"nothing")
    with pytest.raises(StageUnusable, match=r"familiarity\.safetensors cannot be read"):
        load_familiarity(wrong, "cpu", threading.Lock())
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(StageUnusable, match=r"familiarity\.safetensors cannot be read"):
        load_familiarity(wrong, "cpu", threading.Lock())


def test_a_classifier_of_another_model_is_refused(specs: list[StageSpec], tmp_path: Path) -> None:
    file = tmp_path / "familiarity.safetensors"
    save_file({"weight": torch.zeros(3), "bias": torch.tensor(0.0)}, file)
    wrong = msgspec.structs.replace(specs[0], files=specs[0].files | {"familiarity": str(file)})
    with pytest.raises(StageUnusable, match="was not made for the model in"):
        load_familiarity(wrong, "cpu", threading.Lock())


def test_a_classifier_without_its_model_is_refused(specs: list[StageSpec]) -> None:
    files = {role: file for role, file in specs[0].files.items() if role != "familiarity_model"}
    with pytest.raises(StageUnusable, match="does not name the folder of its model"):
        load_familiarity(msgspec.structs.replace(specs[0], files=files), "cpu", threading.Lock())
