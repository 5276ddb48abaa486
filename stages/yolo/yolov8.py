"""YOLOv8 in plain torch (https://docs.ultralytics.com/models/yolov8).

The modules and parameters are named as in ultralytics' files, so that weights fit both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, log
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stages.pretrained import convolutions
from stages.yolo.network import YoloNetwork
from stages.yolo.structure import Row, Size, list_backbone, list_head

BINS = 16  # of the distribution of a box's side, in cells of the feature map
EPS = 1e-3  # of the batch norms that weights were trained with
WIDENED = ("Conv", "C2f", "SPPF")  # layers whose channels the width multiplies
OBJECTS = 5  # that an untrained network expects in an image of 640 pixels; sets the biases of the scores


class LayerShape(NamedTuple):
    """Of a feature map. stride: the pixels of a cell."""

    channels: int
    stride: int


class YoloV8(YoloNetwork):
    is_end_to_end = False

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        self.model, self.sources = nn.ModuleList(), []
        shapes: list[LayerShape] = []  # of the layers' outputs
        for row in [*list_backbone(), *list_head()]:
            self.sources.append([row[0]] if isinstance(row[0], int) else row[0])
            inputs = [shapes[source] if shapes else LayerShape(3, 1) for source in self.sources[-1]]
            layer, shape = make_layer(row, inputs, size, classes)
            self.model.append(layer)
            shapes.append(shape)
        self.stride = max(shape.stride for shape in shapes)
        self.eval()

    def fold_norms(self) -> None:
        convolutions.fold_norms(self)

    def forward(self, pixels: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for layer, sources in zip(self.model, self.sources, strict=True):
            inputs = [outputs[source] if outputs else pixels for source in sources]
            outputs.append(layer(*inputs))
        return outputs[-1]


def make_layer(
    row: Row, inputs: Sequence[LayerShape], size: Size, classes: int
) -> tuple[nn.Module, LayerShape]:
    """The layer of a row, and the shape of its output."""
    _, repeats, kind, arguments = row
    channels, stride = inputs[0]
    out_channels = (
        ceil(min(arguments[0], size.max_channels) * size.width / 8) * 8 if kind in WIDENED else channels
    )
    match kind:
        case "Conv":
            return Conv(channels, out_channels, kernel=3, stride=2), LayerShape(out_channels, stride * 2)
        case "C2f":
            count = max(round(repeats * size.depth), 1)
            block = C2f(channels, out_channels, count, shortcut=True in arguments)
            return block, LayerShape(out_channels, stride)
        case "SPPF":
            return SPPF(channels, out_channels), LayerShape(out_channels, stride)
        case "nn.Upsample":
            return nn.Upsample(scale_factor=2, mode="nearest"), LayerShape(channels, stride // 2)
        case "Concat":
            return Concat(), LayerShape(sum(shape.channels for shape in inputs), stride)
        case _:
            return Detect(inputs, classes), inputs[0]


class Conv(nn.Module):
    """A convolution that keeps the size (divided by the stride), a batch norm, and SiLU."""

    def __init__(self, channels: int, out_channels: int, *, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, EPS)
        self.act = nn.SiLU()

    def forward(self, pixels: Tensor) -> Tensor:
        values: Tensor = self.act(self.bn(self.conv(pixels)))
        return values


class Bottleneck(nn.Module):
    def __init__(self, channels: int, *, shortcut: bool) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels, kernel=3)
        self.cv2 = Conv(channels, channels, kernel=3)
        self.shortcut = shortcut

    def forward(self, pixels: Tensor) -> Tensor:
        values: Tensor = self.cv2(self.cv1(pixels))
        return pixels + values if self.shortcut else values


class C2f(nn.Module):
    """A cross-stage partial block: half of the channels go through `count` bottlenecks, and the outputs of all of them
    are used."""

    def __init__(self, channels: int, out_channels: int, count: int, *, shortcut: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.cv1 = Conv(channels, 2 * half)
        self.cv2 = Conv((2 + count) * half, out_channels)
        self.m = nn.ModuleList(Bottleneck(half, shortcut=shortcut) for _ in range(count))

    def forward(self, pixels: Tensor) -> Tensor:
        parts = list(self.cv1(pixels).chunk(2, dim=1))
        for bottleneck in self.m:
            parts.append(bottleneck(parts[-1]))
        values: Tensor = self.cv2(torch.cat(parts, dim=1))
        return values


class SPPF(nn.Module):
    """Spatial pyramid pooling: the largest values in windows of 1, 5, 9 and 13 cells."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels // 2)
        self.cv2 = Conv(channels // 2 * 4, out_channels)
        self.m = nn.MaxPool2d(5, stride=1, padding=2)

    def forward(self, pixels: Tensor) -> Tensor:
        parts = [self.cv1(pixels)]
        for _ in range(3):
            parts.append(self.m(parts[-1]))
        values: Tensor = self.cv2(torch.cat(parts, dim=1))
        return values


class Concat(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=1)


class Expectation(nn.Module):
    """The mean of each distribution over distances of 0 to 15 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.copy_(torch.arange(BINS).view(1, -1, 1, 1))

    def forward(self, logits: Tensor) -> Tensor:
        """float32 [images, 4 * 16, anchors] to cells [images, 4, anchors]."""
        images, _, anchors = logits.shape
        shares = logits.view(images, 4, BINS, anchors).softmax(dim=2)
        # The numbers 0 to 15 are exact in half precision too.
        return (shares * self.conv.weight.float().view(1, 1, BINS, 1)).sum(dim=2)


class Detect(nn.Module):
    """Boxes and scores of each cell of three feature maps. A side of a box is a distribution over distances (Li et al.,
    Generalized Focal Loss, https://arxiv.org/abs/2006.04388)."""

    def __init__(self, inputs: Sequence[LayerShape], classes: int) -> None:
        super().__init__()
        first, self.strides = inputs[0].channels, [shape.stride for shape in inputs]
        box_channels, score_channels = max(16, first // 4, BINS * 4), max(first, min(classes, 100))
        self.cv2 = nn.ModuleList(make_branch(shape.channels, box_channels, 4 * BINS) for shape in inputs)
        self.cv3 = nn.ModuleList(
            # So that training begins with few objects
            make_branch(
                shape.channels,
                score_channels,
                classes,
                bias=log(OBJECTS / classes / (640 / shape.stride) ** 2),
            )
            for shape in inputs
        )
        self.dfl = Expectation()
        self.anchors: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def forward(self, *features: Tensor) -> Tensor:
        """In float32 from here: half precision would move boxes by up to 2 pixels."""
        sides, scores = (
            torch.cat(
                [branch(map_).flatten(2) for branch, map_ in zip(branches, features, strict=True)], dim=2
            )
            for branches in (self.cv2, self.cv3)
        )
        centers, strides = self._find_anchors(features)
        low, high = self.dfl(sides.float()).chunk(2, dim=1)
        corners = centers - low, centers + high
        boxes = torch.cat(((corners[0] + corners[1]) / 2, corners[1] - corners[0]), dim=1) * strides
        return torch.cat((boxes, scores.float().sigmoid()), dim=1)

    def _find_anchors(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The centers of all cells in cells, x and y, [2, anchors], and their strides, [anchors]."""
        device = features[0].device
        key = device, *(map_.shape[2:] for map_ in features)
        if key not in self.anchors:
            centers, strides = [], []
            for map_, stride in zip(features, self.strides, strict=True):
                y, x = torch.meshgrid(*(torch.arange(side) + 0.5 for side in map_.shape[2:]), indexing="ij")
                centers.append(torch.stack((x, y)).flatten(1))
                strides.append(torch.full((y.numel(),), float(stride)))
            self.anchors[key] = torch.cat(centers, dim=1).to(device), torch.cat(strides).to(device)
        return self.anchors[key]


def make_branch(channels: int, hidden: int, out_channels: int, *, bias: float = 1.0) -> nn.Sequential:
    last = nn.Conv2d(hidden, out_channels, 1)
    nn.init.constant_(last.bias, bias)  # type: ignore[arg-type]
    return nn.Sequential(Conv(channels, hidden, kernel=3), Conv(hidden, hidden, kernel=3), last)
