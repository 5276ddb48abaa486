"""PP-OCRv6's two networks in half precision on a GPU: ppocr's modules, run by the kernels of stages/kernels.

The answers are those of ppocr.Detector and ppocr.Recognizer except for rounding. There is
less rounding here: sums, biases, gates and residuals stay in float32 until a map is written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.kernels import launch
from stages.kernels.layers import (
    Convolution,
    DeconvHead,
    DepthwiseConvolution,
    PointwiseMlp,
    SqueezeExcitation,
)
from stages.ocr.generic import PLAIN
from stages.ocr.loading import load_networks
from stages.ocr.ppocr import BLANK, LINE_HEIGHT, Detector, Recognizer, count_steps, list_shapes

if TYPE_CHECKING:
    from typing_extensions import TypeIs

ENCODER_SLOPE, NECK_SLOPE = 1 / 6, 0.2  # of their hard sigmoids
PADDING_LOGIT = -6e4  # of a class that does not exist; float16 goes to -65504


@dataclass(frozen=True)
class Block:
    """A block of the backbone: depthwise convolution, squeeze and excitation where it has one, pointwise MLP."""

    depthwise: DepthwiseConvolution
    excitation: SqueezeExcitation | None
    mlp: PointwiseMlp

    @classmethod
    def of(cls, block: Any) -> Block:
        excitation = None
        if not isinstance(block.token_squeeze_excitation, nn.Identity):
            squeeze, _, expand, _ = block.token_squeeze_excitation.convolutions
            excitation = SqueezeExcitation.of(squeeze, expand, ENCODER_SLOPE)
        mlp = PointwiseMlp.of(
            block.channel_conv1.convolution, block.channel_conv2.convolution, residual=block.has_residual
        )
        depthwise = DepthwiseConvolution.of(getattr(block.token_conv, "convolution", block.token_conv))
        return cls(depthwise, excitation, mlp)

    def __call__(self, pixels: Tensor, widths: Tensor | None) -> Tensor:
        return_sums = self.excitation is not None
        hidden, sums = launch.depthwise_conv2d(self.depthwise, pixels, widths, return_sums=return_sums)
        gates = (
            launch.squeeze_excitation(self.excitation, sums, size_of(hidden), widths)
            if self.excitation
            else None
        )
        return launch.pointwise_mlp(self.mlp, hidden, gates)


class Encoder:
    """The backbone of both networks."""

    def __init__(self, encoder: Any) -> None:
        stem = encoder.convolution
        self.stem1 = Convolution.of(stem.stem1.convolution)
        self.stem2 = [
            Convolution.of(layer.convolution, padding=(0, 0)) for layer in (stem.stem2a, stem.stem2b)
        ]
        self.stem3, self.stem4 = (Convolution.of(layer.convolution) for layer in (stem.stem3, stem.stem4))
        self.stages = [[Block.of(block) for block in stage.blocks] for stage in encoder.blocks]

    def __call__(
        self, pixels: Tensor, widths: Tensor | None = None, padded: Tensor | None = None
    ) -> list[Tensor]:
        """The map of each stage. pixels: uint8 [N, height, width, 3].

        widths: int64 [N], an image's own columns. padded: int64 [N], its columns with the
        zeros that follow them. The columns after those do not influence the image's answer.
        """
        halves = None if padded is None else (padded + 1) // 2
        quarters = None if halves is None else (halves + 1) // 2
        hidden, _ = launch.conv2d(self.stem1, pixels, widths)
        detail, _ = launch.conv2d(self.stem2[0], hidden, halves)
        hidden, _ = launch.conv2d(self.stem2[1], detail, halves, pooled=hidden)
        hidden, _ = launch.conv2d(self.stem3, hidden, halves)
        hidden, _ = launch.conv2d(self.stem4, hidden)
        maps = []
        for stage in self.stages:
            for block in stage:
                hidden = block(hidden, quarters)
            maps.append(hidden)
        return maps


class FusedDetector:
    """Text detection."""

    def __init__(self, network: Detector) -> None:
        neck, head = network.neck, network.head
        self.encoder = Encoder(network.encoder)
        self.insert = [Convolution.of(layer.in_conv) for layer in neck.insert_conv]
        self.insert_excitations = [
            neck_excitation(layer.squeeze_excitation_block) for layer in neck.insert_conv
        ]
        self.depthwise = [DepthwiseConvolution.of(layer.depthwise_convolution) for layer in neck.input_conv]
        self.pointwise = [Convolution.of(layer.pointwise_convolution) for layer in neck.input_conv]
        self.excitations = [neck_excitation(layer.squeeze_excitation_module) for layer in neck.input_conv]
        self.down = Convolution.of(head.conv_down.convolution)
        self.head = DeconvHead.of(head.conv_up.convolution, head.conv_final)

    def infer(self, pages: Tensor) -> Tensor:
        """Each pixel's probability of text as a byte, uint8 [N, H, W]. pages: uint8 [N, H, W, 3], sides multiples of 32."""
        hidden, _ = launch.conv2d(self.down, self._run_neck(self.encoder(pages)))
        return launch.deconv_head(self.head, hidden)

    def _run_neck(self, maps: Sequence[Tensor]) -> Tensor:
        """The four stages' maps, coarser ones added to finer ones, concatenated at the finest one's size."""
        merged: list[Tensor] = []
        for layer, excitation, hidden in zip(
            self.insert[::-1], self.insert_excitations[::-1], maps[::-1], strict=True
        ):
            inserted, sums = launch.conv2d(layer, hidden, relu=False, return_sums=True)
            gates = launch.squeeze_excitation(excitation, sums, size_of(inserted))
            merged.append(launch.upsample_add(inserted, gates, merged[-1] if merged else None))
        parts = []
        layers = zip(self.depthwise[::-1], self.pointwise[::-1], self.excitations[::-1], merged, strict=True)
        for depthwise, pointwise, excitation, hidden in layers:
            filtered, _ = launch.depthwise_conv2d(depthwise, hidden)
            part, sums = launch.conv2d(pointwise, filtered, relu=False, return_sums=True)
            parts.append((part, launch.squeeze_excitation(excitation, sums, size_of(part))))
        return launch.upsample_concat(parts)


class FusedRecognizer:
    """Text recognition."""

    shares_tensors = True

    def __init__(self, network: Recognizer) -> None:
        self.encoder = Encoder(network.encoder)
        self.svtr = copy.deepcopy(network.svtr).half()
        # Pad the classes until a row is a multiple of 128 bytes. The
        # matrix product takes three times as long for other sizes.
        padding = -network.head.out_features % 64
        self.head_weight = F.pad(network.head.weight.detach(), (0, 0, 0, padding)).half()
        self.head_bias = F.pad(network.head.bias.detach(), (0, padding), value=PADDING_LOGIT).half()
        self.local = DepthwiseConvolution.of(network.svtr.conv_block[2].convolution)

    def infer(self, lines: Tensor, resized: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """The most likely class at each step and its probability, both [N, W // 8]; BLANK beyond a line's own width.

        lines: uint8 [N, 48, W, 3]. resized: int64 [N], a line's own columns. padded: int64 [N], its columns with its padding.
        """
        assert padded is not None
        hidden = self.encoder(lines, resized, padded)[-1]
        # The mean over 3×2 windows. torch's own pooling takes ten times as long with the channels last.
        count, rows, columns, channels = hidden.shape
        pooled = (
            hidden[:, :, : columns // 2 * 2].reshape(count, rows, columns // 2, 2, channels).mean(dim=(1, 3))
        )
        lengths = count_steps(padded)
        steps = torch.arange(pooled.shape[1], device=lines.device) < lengths[:, None]
        logits = F.linear(self._run_svtr(pooled, steps, lengths), self.head_weight, self.head_bias)
        classes, probabilities = launch.argmax_softmax(logits)
        return classes.masked_fill(~steps, BLANK), probabilities

    def _run_svtr(self, pooled: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        """pooled: [N, steps, channels]. steps: bool [N, steps], those of each line. lengths: int64 [N], their
        number. Returns the last hidden states, [N, steps, 120]."""
        skip, reduce, _ = self.svtr.conv_block  # two convolutions of 1×1, here as linear layers
        residual, hidden = (
            F.silu(F.linear(pooled, part.convolution.weight[..., 0, 0], part.convolution.bias))
            for part in (skip, reduce)
        )
        hidden = hidden * steps[..., None]
        filtered, _ = launch.depthwise_conv2d(self.local, hidden[:, None].contiguous())
        hidden = hidden + F.silu(filtered[:, 0])
        for block in self.svtr.svtr_block:
            attention = block.self_attn
            qkv = attention.qkv(block.layer_norm1(hidden))
            mixed = launch.attention(qkv, lengths, attention.num_heads, attention.scale)
            hidden = hidden + attention.projection(mixed)
            hidden = hidden + block.mlp(block.layer_norm2(hidden))
        states: Tensor = self.svtr.norm(hidden) + residual
        return states


def neck_excitation(module: Any) -> SqueezeExcitation:
    return SqueezeExcitation.of(module.conv1, module.conv2, NECK_SLOPE, residual=True)


def size_of(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[1], pixels.shape[2]


def is_known(network: nn.Module) -> TypeIs[Detector | Recognizer]:
    """Whether the kernels run a network: one with the layers of PP-OCRv6 small, and any number of characters. The
    kernels were tried with no other sizes."""
    if not isinstance(network, Detector | Recognizer) or network.levels != PLAIN:
        return False
    with torch.device("meta"):
        small = Detector() if isinstance(network, Detector) else Recognizer.small(network.head.out_features)
    return list_shapes(network) == list_shapes(small)


def launch_kernels(files: Mapping[str, str]) -> None:
    """Launch each kernel of both networks once, as stages.contract.base.Stage.launch_kernels describes.
    Kernels are the same for all sizes, unless a map has one row: no page is that flat."""
    widths = torch.tensor([64])
    detector, recognizer, _ = load_networks(files)
    with torch.inference_mode():
        if is_known(detector):
            FusedDetector(detector).infer(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
        if is_known(recognizer):
            lines = torch.zeros(1, LINE_HEIGHT, 64, 3, dtype=torch.uint8)
            FusedRecognizer(recognizer).infer(lines, widths, widths)
