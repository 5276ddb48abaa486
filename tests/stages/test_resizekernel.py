"""The kernels that make a network's input, beside cv2: on a GPU as compiled, elsewhere interpreted."""

from __future__ import annotations

import pytest
import torch

from stages import letterbox
from stages.devices import pixels_of
from stages.letterbox import Letterbox, fill_canvases
from tests.stages.pictures import draw_noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small program as for a large one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(letterbox, "TILE", {"ROWS": 32, "COLUMNS": 32})


@pytest.mark.parametrize("size", [(48, 64), (96, 128), (31, 40), (1, 7)])
def test_canvases_are_those_of_cv2(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """A picture that fits, one of twice its size, where cv2 averages four pixels, and what shrinks or grows by any ratio."""
    pictures = pixels_of([draw_noise(*size), draw_noise(size[0] * 2, size[1] * 2, 1)])
    boxes = [Letterbox.fit(*picture.shape[1:], 64, 32) for picture in pictures]
    theirs = fill_canvases(pictures, boxes, torch.float16)
    monkeypatch.setattr(letterbox, "has_kernels_for", lambda _: True)
    ours = fill_canvases([picture.to(DEVICE) for picture in pictures], boxes, torch.float16)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours.cpu(), theirs)
