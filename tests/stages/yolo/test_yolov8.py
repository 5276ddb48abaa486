from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from stages.images.devices import pixels_of
from stages.weights.packs import Pack
from stages.yolo import library
from stages.yolo.letterbox import Letterbox, fill_canvases
from stages.yolo.structure import SIZES, Size, describe
from stages.yolo.yolov8 import YoloV8
from tests.stages.yolo.detectors import files_in, make_sure_of_itself, read_asset


@pytest.mark.parametrize("letter", SIZES)
def test_its_predictions_are_those_of_ultralytics(letter: str) -> None:
    """In each published size, with a quarter of the channels."""
    published = SIZES[letter]
    size = Size(published.depth, published.width / 4, published.max_channels)
    torch.manual_seed(0)
    theirs = library.build({"model": describe(size, 7), "nc": 7})
    photo = read_asset("bus.jpg")
    make_sure_of_itself(theirs, photo, 128)
    ours = YoloV8(size, 7)
    ours.load_state_dict(theirs.state_dict())
    ours.double(), theirs.double()  # sixty layers of random weights make rounding errors large
    assert ours.stride == theirs.stride.max()
    pixels = fill_canvases(
        pixels_of([photo]), [Letterbox.fit(photo.height, photo.width, 128, 32)], torch.float64
    )
    expected = theirs(pixels)[0].float()
    assert torch.allclose(ours(pixels), expected, atol=1e-3)
    ours.fold_norms()
    assert not any("bn" in name for name, _ in ours.named_parameters())
    assert torch.allclose(ours(pixels), expected, atol=1e-3)


def test_half_precision_moves_no_box_by_a_pixel() -> None:
    torch.manual_seed(0)
    network = YoloV8(Size(0.33, 0.125), 3)
    sides = [torch.randn(1, 64, cells, cells).bfloat16() for cells in (80, 40, 20)]
    exact: Any = network.model[-1]
    half: Any = YoloV8(Size(0.33, 0.125), 3).bfloat16().model[-1]
    boxes = []
    for head, dtype in ((exact, torch.float32), (half, torch.bfloat16)):
        for number, given in enumerate(sides):
            head.cv2[number] = Given(given.to(dtype))
            head.cv3[number] = Given(torch.zeros(1, 3, *given.shape[2:], dtype=dtype))
        boxes.append(head(*sides)[:, :4])
    assert torch.allclose(boxes[0], boxes[1], atol=1e-3)


class Given(torch.nn.Module):
    """Returns the same map for all features."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.values


@pytest.fixture
def no_ultralytics() -> Iterator[None]:
    """As if it were not installed. All modules of the stages are imported anew."""

    def ours() -> dict[str, Any]:
        return {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in ("stages", "ultralytics")
        }

    before = ours()
    for name in before:
        del sys.modules[name]
    hidden = ["ultralytics", *(name for name in before if name.startswith("ultralytics."))]
    sys.modules |= cast(Any, dict.fromkeys(hidden))
    yield
    for name in ours():
        del sys.modules[name]
    sys.modules |= before


def test_the_stage_runs_without_ultralytics(blank_pack: Pack, no_ultralytics: None) -> None:
    from stages.contract.base import Image, StageSpec
    from stages.yolo.stage import YoloStage

    with pytest.raises(ImportError):
        from ultralytics.nn import tasks  # noqa: F401
    files = files_in(blank_pack.folder)
    stage = YoloStage(StageSpec("yolo", "ultralytics", files, options={"conf": 0.0}), "cpu")
    stage.load()
    [answer] = stage.run([Image(memoryview(b""), 64, 64, torch.zeros(3, 64, 64, dtype=torch.uint8))])
    assert answer.count > 0  # type: ignore[union-attr]
