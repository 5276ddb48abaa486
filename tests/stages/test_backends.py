"""Each type of model that a backend takes has a small checkpoint, and a test that compares our answers with those of
transformers' own model and processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stages.contract.descriptor import Backend
from stages.registry import registry
from tests.stages import captioners, checkpoints, classifiers, readers
from tests.stages.blip import test_captions
from tests.stages.classifier import test_stage as test_classifier
from tests.stages.clip import test_chat, test_families
from tests.stages.hash import test_stage as test_hash
from tests.stages.ocr import test_sizes, textnets
from tests.stages.reading import test_reading
from tests.stages.yolo import test_detr, test_owlv2, test_stage

SMALL = {
    "yolo": {**checkpoints.DETECTORS, "owlv2": checkpoints.save_owlv2},
    "clip": {**checkpoints.TOWERS, "qwen3_vl": captioners.save_qwen_embedding},
    "blip": captioners.CAPTIONERS,
    "ocr": readers.READERS | textnets.TEXTNETS,
    "classifier": classifiers.CLASSIFIERS,
}
# By stage and backend, where a backend has a test of its own.
EQUAL: dict[str, Callable[..., None]] = {
    "yolo": test_detr.test_answers_are_those_of_transformers,
    "yolo-owlv2": test_owlv2.test_answers_are_those_of_transformers,
    "clip": test_families.test_embeddings_and_tags_are_those_of_transformers,
    "clip-chat": test_chat.test_embeddings_are_those_of_the_authors_script,
    "blip": test_captions.test_tokens_are_those_of_transformers,
    "classifier": test_classifier.test_labels_and_scores_are_those_of_transformers,
    "ocr": test_reading.test_tokens_are_those_of_transformers,
    "ocr-ppocr": test_sizes.test_answers_are_those_of_transformers,
}
# Backends with a file format of their own instead of transformers' model types, or without weights.
OF_OTHERS: dict[str, Callable[..., None]] = {
    "yolo-ultralytics": test_stage.test_answers_are_those_of_ultralytics,
    "hash-phash": test_hash.test_hashes_are_those_of_imagehash,
}


OURS = [stage for stage in registry.STAGES.values() if stage.name not in registry.SOURCES]
BACKENDS = [
    pytest.param(stage.name, name, backend, id=f"{stage.name}-{name}")
    for stage in OURS
    for name, backend in stage.backends.items()
    if backend.models
]


def types_tested(test: Callable[..., None]) -> set[str]:
    """The values that a test is parametrized with."""
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    return {
        value
        for mark in marks
        if mark.name == "parametrize"
        for value in mark.args[1]
        if isinstance(value, str)
    }


@pytest.mark.parametrize(("stage", "name", "backend"), BACKENDS)
def test_answers_for_each_model_type_are_compared_with_those_of_transformers(
    stage: str, name: str, backend: Backend
) -> None:
    taken = {model.type for model in backend.models}
    assert taken - {*SMALL[stage]} == set(), "no small checkpoint"
    test = EQUAL.get(f"{stage}-{name}", EQUAL[stage])
    assert taken - types_tested(test) == set(), "no test of equal answers"


def test_each_backend_without_model_types_has_a_test_of_equal_answers_too() -> None:
    others = {
        f"{stage.name}-{name}"
        for stage in OURS
        for name, backend in stage.backends.items()
        if not backend.models
    }
    assert others == OF_OTHERS.keys()
