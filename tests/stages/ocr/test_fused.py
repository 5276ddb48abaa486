"""Compares the fused networks with the plain ones, with their weights: compiled on a GPU,
otherwise in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.kernels import launch
from stages.ocr.fused import FusedDetector, FusedRecognizer
from stages.ocr.ppocr import count_steps
from tests.stages.ocr.runtime import open_small_detector, open_small_recognizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


# Of programs that are larger than on a GPU. Runs stay longer than one pixel, and the largest maps have two tiles.
SIZES = {
    "DEPTHWISE_BLOCK_C": 512,
    "DEPTHWISE_BLOCK_H": 8,
    "DEPTHWISE_RUNS": 32,
    "RUN_LENGTH": 4,
    "LINEAR_BLOCK_M": 16,
    "LINEAR_BLOCK_K": 128,
    "SQUEEZE_BLOCK_S": 64,
    "MLP_BLOCK_M": 128,
    "TILE": {"BLOCK_H": 16, "BLOCK_W": 16},
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small program as for a large one, and long to multiply rows that
    there are not."""
    if DEVICE == "cpu":
        for name, size in SIZES.items():
            monkeypatch.setattr(launch, name, size)


def draw(count: int, height: int, width: int) -> Tensor:
    """Noise with a dark bar and a light one on it."""
    levels = torch.randint(
        0, 256, (count, height, width, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    levels[:, height // 4 : -height // 4, 8:-12] = 20
    levels[:, height // 3 : -height // 3, 12:20] = 240
    return levels.to(DEVICE)


@torch.inference_mode()
def test_the_fused_detector_finds_the_same_text() -> None:
    plain, pages = open_small_detector().to(DEVICE), draw(2, 32, 64)
    if DEVICE == "cpu":
        # The interpreter runs all programs again for each page. The test below has two lines.
        pages = pages[1:]
    theirs = plain.infer(pages)
    assert theirs.max() > 0.3
    torch.testing.assert_close(FusedDetector(plain).infer(pages) / 255, theirs, atol=2e-2, rtol=0)


@torch.inference_mode()
def test_the_fused_recognizer_reads_the_same_text_and_nothing_beyond_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        # The sizes of all its layers are multiples of this.
        monkeypatch.setattr(launch, "MLP_BLOCK_HIDDEN", 64)
    network, _ = open_small_recognizer()
    plain, lines = network.to(DEVICE), draw(2, 48, 32)
    resized, padded = torch.tensor([15, 27], device=DEVICE), torch.tensor([20, 32], device=DEVICE)
    theirs, ours = plain.infer(lines, resized, padded), FusedRecognizer(plain).infer(lines, resized, padded)
    inside = torch.arange(4, device=DEVICE) < count_steps(padded)[:, None]
    assert inside.sum() == 2 + 4
    sure = (theirs[1] > 0.4) | ~inside  # at other steps rounding may decide
    assert torch.equal(ours[0][sure], theirs[0][sure])
    torch.testing.assert_close(ours[1][inside], theirs[1][inside], atol=2e-2, rtol=0)
