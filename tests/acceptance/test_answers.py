"""The mini pack's answers on unseen scenes, alone and in a batch, and beside the libraries' own; on a GPU for its dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.answers import Agreement, Reference, answer, compare, count_different, load, make_scenes, refer

BATCH = 16
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),  # in float32 cuDNN plans each convolution anew for every size of page
]
pytestmark = pytest.mark.parametrize(
    ("known", "told"),
    [
        ("cpu", "float32"),
        *(pytest.param("cuda:0", dtype, marks=ON_GPU) for dtype in ("float32", "bfloat16", "float16")),
    ],
    indirect=True,
    scope="module",
)


@dataclass(frozen=True)
class Known:
    device: str
    files: list[Path]
    references: list[Reference]


@dataclass(frozen=True)
class Told:
    exact: bool  # float32 on the CPU, where nothing is rounded in another order
    float32: bool
    different: dict[str, int]  # alone and in a batch
    beside: Agreement


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    device = request.param
    files = make_scenes(tmp_path_factory.mktemp("answers"), 6 if device == "cpu" else 200)
    return Known(device, files, list(refer(load("mini", "float32", 1, device), files, device)))


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, known: Known) -> Told:
    dtype, device = request.param, known.device
    stages = load("mini", dtype, BATCH, device)
    together, alone = (list(answer(stages, known.files, size, device)) for size in (BATCH, 1))
    beside = compare(together, known.references)
    return Told(device == "cpu", dtype == "float32", count_different(together, alone), beside)


def test_batch_mates_change_no_answer(told: Told) -> None:
    most = 0 if told.float32 else told.beside.images // 50
    for aspect in ("texts", "objects", "tags", "captions", "bins"):  # boxes may differ by hundredths of a pixel
        assert told.different[aspect] <= most, aspect


def test_captions_are_generates(told: Told) -> None:
    assert told.beside.captions >= (1.0 if told.exact else 0.98) * told.beside.images


def test_embeddings_are_those_of_transformers(told: Told) -> None:
    assert told.beside.cosine > (0.9999 if told.float32 else 0.999)


def test_boxes_are_those_that_ultralytics_predicts(told: Told) -> None:
    assert told.beside.predicted > told.beside.images
    if told.float32:
        assert told.beside.boxes == told.beside.predicted
        assert told.beside.overlap >= 0.99
    assert abs(told.beside.boxes - told.beside.predicted) <= told.beside.predicted // 100
