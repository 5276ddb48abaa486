"""A small pack of random weights, and pictures to run through it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from stages.contract.base import Image
from stages.weights.packs import Pack, open_pack
from tests.minipack.blank import make_blank_pack
from tests.stages.pictures import draw_image

SIZES = [
    (480, 640),
    (640, 480),
    (96, 128),
    (37, 41),
    (1, 1),
    (700, 20),
    (8, 300),
    (128, 128),
    (480, 640),
    (333, 222),
]


# Half the cores, as threads of several that wait for each other at every small operation
# take minutes on a busy machine; but with a single one torch takes slow convolutions.
THREADS = max(2, len(os.sched_getaffinity(0)) // 2)
CONVOLVING = ("ocr", "yolo")  # folders whose models are mostly convolutions

torch.set_num_threads(THREADS)


@pytest.fixture(scope="module", autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small models without convolutions take a fifth less CPU time with one thread."""
    torch.set_num_threads(THREADS if request.path.parent.name in CONVOLVING else 1)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def blank_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    models = tmp_path_factory.mktemp("models")
    make_blank_pack(models / "blank", seed=1)
    return open_pack("blank", models)


@pytest.fixture
def mixed_images() -> list[Image]:
    """Ten images of nine sizes: portrait and landscape, tiny and thin."""
    return [draw_image(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
