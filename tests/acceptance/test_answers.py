"""The mini pack's answers on unseen scenes, alone and in a batch, compared with the libraries' own;
on a GPU for its dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import PIL.Image
import pytest
import torch

from benchmarks.answers import (
    Agreement,
    Reference,
    answer,
    compare,
    count_different,
    load,
    make_scenes,
    refer,
)
from stages.contract.base import Stage
from stages.ocr.stage import OcrStage

BATCH = 16
LONGEST = 640  # pixels of a scene on a CPU, which takes seconds for OCR's map of a large one
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),  # in float32 cuDNN plans each convolution again for every size of page
]
pytestmark = pytest.mark.parametrize(
    ("references", "answers"),
    [
        ("cpu", "float32"),
        *(pytest.param("cuda:0", dtype, marks=ON_GPU) for dtype in ("float32", "half", "float16")),
    ],
    indirect=True,
    scope="module",
)


@dataclass(frozen=True)
class References:
    device: str
    files: list[Path]
    of_libraries: list[Reference]


@dataclass(frozen=True)
class Answers:
    on_cpu: bool  # where nothing is rounded in another order
    is_float32: bool
    different: dict[str, int]  # alone and in a batch
    agreement: Agreement  # with the libraries


@functools.cache
def load_mini(dtype: str, device: str) -> list[Stage]:
    stages = load("mini", dtype, BATCH, device)
    for stage in stages:
        if device == "cpu" and isinstance(stage, OcrStage):
            stage.options = msgspec.structs.replace(stage.options, map_side=LONGEST // 2)
    return stages


def shrink(path: Path) -> None:
    with PIL.Image.open(path) as scene:
        scene.thumbnail((LONGEST, LONGEST))
        scene.save(path, scene.format, exif=scene.getexif(), quality=95)


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> References:
    device = request.param
    files = make_scenes(tmp_path_factory.mktemp("answers"), 4 if device == "cpu" else 200)
    if device == "cpu":
        for path in files:
            shrink(path)
    return References(device, files, list(refer(load_mini("float32", device), files, device)))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, references: References) -> Answers:
    dtype, device = request.param, references.device
    stages = load_mini(dtype, device)
    together, alone = (list(answer(stages, references.files, size, device)) for size in (BATCH, 1))
    agreement = compare(together, references.of_libraries)
    return Answers(device == "cpu", dtype == "float32", count_different(together, alone), agreement)


def test_batch_mates_change_no_answer(answers: Answers) -> None:
    most = 0 if answers.is_float32 else answers.agreement.images // 50
    for aspect in ("texts", "objects", "tags", "captions", "bins"):
        # Boxes may differ by hundredths of a pixel.
        assert answers.different[aspect] <= most, aspect


def test_captions_are_generates(answers: Answers) -> None:
    assert answers.agreement.captions >= (1.0 if answers.on_cpu else 0.98) * answers.agreement.images


def test_embeddings_are_those_of_transformers(answers: Answers) -> None:
    assert answers.agreement.cosine > (0.9999 if answers.is_float32 else 0.999)


def test_boxes_are_those_that_ultralytics_predicts(answers: Answers) -> None:
    seen = answers.agreement
    assert seen.predicted > seen.images
    assert seen.found >= (1.0 if answers.is_float32 else 0.98) * seen.predicted
    assert abs(seen.boxes - seen.predicted) <= (0 if answers.is_float32 else seen.predicted // 100)
    if answers.is_float32:
        assert seen.overlap >= 0.99
