"""PP-OCRv6's two networks for half precision on a GPU: ppocr's modules, run by fused kernels (launch.py).

The answers are those of ppocr.Detector and ppocr.Recognizer but for rounding, of which there is less here: sums, biases,
gates and residuals stay in float32 until a map is written.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from stages.kernels.launch import choose, convolve, enlarge, excite, filter_channels, join, merge, mix
from stages.kernels.layers import Convolution, Depthwise, Excitation, Head, Mixer
from stages.ocr.ppocr import BLANK, Detector, Recognizer, count_steps

# What decides how a kernel is compiled, relative to the folder of the stages.
SOURCES = (
    *("kernels/convolution.py", "kernels/pointwise.py", "kernels/launch.py", "kernels/layers.py"),
    *("ocr/warpkernel.py", "ocr/fused.py"),
)

ENCODER_SLOPE, NECK_SLOPE = 1 / 6, 0.2  # of their hard sigmoids
NEVER = -6e4  # the logit of a class that there is not; float16 goes to -65504


@dataclass(frozen=True)
class Block:
    filter: Depthwise
    excitation: Excitation | None
    mixer: Mixer

    @classmethod
    def of(cls, block: Any) -> Block:
        excitation = None
        if not isinstance(block.token_squeeze_excitation, nn.Identity):
            squeeze, _, expand, _ = block.token_squeeze_excitation.convolutions
            excitation = Excitation.of(squeeze, expand, ENCODER_SLOPE)
        mixer = Mixer.of(block.channel_conv1.convolution, block.channel_conv2.convolution, residual=block.has_residual)
        return cls(Depthwise.of(getattr(block.token_conv, "convolution", block.token_conv)), excitation, mixer)

    def __call__(self, pixels: Tensor, widths: Tensor | None) -> Tensor:
        filtered, sums = filter_channels(self.filter, pixels, widths, want_sums=self.excitation is not None)
        gates = excite(self.excitation, sums, (filtered.shape[1], filtered.shape[2]), widths) if self.excitation else None
        return mix(self.mixer, filtered, gates)


class Encoder:
    """The backbone of both networks."""

    def __init__(self, encoder: Any) -> None:
        stem = encoder.convolution
        self.first = Convolution.of(stem.stem1.convolution)
        self.detail = [Convolution.of(layer.convolution, padding=(0, 0)) for layer in (stem.stem2a, stem.stem2b)]
        self.last = [Convolution.of(layer.convolution) for layer in (stem.stem3, stem.stem4)]
        self.stages = [[Block.of(block) for block in stage.blocks] for stage in encoder.blocks]

    def __call__(self, pixels: Tensor, whole: Tensor | None = None, padded: Tensor | None = None) -> list[Tensor]:
        """Each stage's map. pixels: uint8 [N, height, width, 3]; of each image its first columns count, `whole` [N] many,
        and then zeros up to `padded` [N] many."""
        halves = None if padded is None else (padded + 1) // 2
        quarters = None if halves is None else (halves + 1) // 2
        hidden, _ = convolve(self.first, pixels, whole)
        detail, _ = convolve(self.detail[0], hidden, halves)
        hidden, _ = convolve(self.detail[1], detail, halves, pooled=hidden)
        hidden, _ = convolve(self.last[0], hidden, halves)
        hidden, _ = convolve(self.last[1], hidden)
        maps = []
        for stage in self.stages:
            for block in stage:
                hidden = block(hidden, quarters)
            maps.append(hidden)
        return maps


class FusedDetector:
    """Where there is text."""

    def __init__(self, network: Detector) -> None:
        neck, head = network.neck, network.head
        self.encoder = Encoder(network.encoder)
        self.insert = [Convolution.of(layer.in_conv) for layer in neck.insert_conv]
        self.insert_gates = [gate_of(layer.squeeze_excitation_block) for layer in neck.insert_conv]
        self.filters = [Depthwise.of(layer.depthwise_convolution) for layer in neck.input_conv]
        self.narrow = [Convolution.of(layer.pointwise_convolution) for layer in neck.input_conv]
        self.narrow_gates = [gate_of(layer.squeeze_excitation_module) for layer in neck.input_conv]
        self.down = Convolution.of(head.conv_down.convolution)
        self.head = Head.of(head.conv_up.convolution, head.conv_final)

    def look(self, pages: Tensor) -> Tensor:
        """pages: uint8 [N, H, W, 3], sides multiples of 32. Returns each pixel's probability of text as a byte, [N, H, W]."""
        hidden, _ = convolve(self.down, self._run_neck(self.encoder(pages)))
        return enlarge(self.head, hidden)

    def _run_neck(self, maps: Sequence[Tensor]) -> Tensor:
        """The four stages' maps, coarser ones added to finer ones, side by side at the finest's size."""
        merged: list[Tensor] = []
        for layer, gate, hidden in zip(self.insert[::-1], self.insert_gates[::-1], maps[::-1], strict=True):
            inserted, sums = convolve(layer, hidden, relu=False, want_sums=True)
            merged.append(merge(inserted, excite(gate, sums, sizes(inserted)), merged[-1] if merged else None))
        parts = []
        layers = zip(self.filters[::-1], self.narrow[::-1], self.narrow_gates[::-1], merged, strict=True)
        for depthwise, narrow, gate, hidden in layers:
            part, sums = convolve(narrow, filter_channels(depthwise, hidden)[0], relu=False, want_sums=True)
            parts.append((part, excite(gate, sums, sizes(part))))
        return join(parts)


class FusedRecognizer:
    """What a line of text says."""

    def __init__(self, network: Recognizer) -> None:
        self.encoder = Encoder(network.encoder)
        self.svtr = copy.deepcopy(network.svtr).half()
        # As many classes more as make rows a multiple of 128 bytes: for others the product is three times slower.
        surplus = -network.head.out_features % 64
        self.head_weight = F.pad(network.head.weight.detach(), (0, 0, 0, surplus)).half()
        self.head_bias = F.pad(network.head.bias.detach(), (0, surplus), value=NEVER).half()
        self.local = Depthwise.of(network.svtr.conv_block[2].convolution)

    def look(self, lines: Tensor, resized: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """The likeliest class at each step and its probability, both [N, W // 8]; BLANK right of a line's own width.

        lines: uint8 [N, 48, W, 3]. resized, padded: int64 [N], a line's own columns, and those with its padding.
        """
        assert padded is not None
        hidden = self.encoder(lines, resized, padded)[-1]
        # The mean of 3×2, for which torch's own pooling takes ten times as long with the channels last.
        count, rows, columns, channels = hidden.shape
        pooled = hidden[:, :, : columns // 2 * 2].reshape(count, rows, columns // 2, 2, channels).mean(dim=(1, 3))
        steps = torch.arange(pooled.shape[1], device=lines.device) < count_steps(padded)[:, None]
        classes, probabilities = choose(F.linear(self._read(pooled, steps), self.head_weight, self.head_bias))
        return classes.masked_fill(~steps, BLANK), probabilities

    def _read(self, pooled: Tensor, steps: Tensor) -> Tensor:
        """pooled: [N, steps, channels]. Returns the last hidden states, [N, steps, 120]."""
        skip, reduce, _ = self.svtr.conv_block
        residual, hidden = (F.silu(F.linear(pooled, pointwise(part), part.convolution.bias)) for part in (skip, reduce))
        hidden = hidden * steps[..., None]
        hidden = hidden + F.silu(filter_channels(self.local, hidden[:, None].contiguous())[0][:, 0])
        for block in self.svtr.svtr_block:
            hidden = hidden + attend(block.self_attn, block.layer_norm1(hidden), steps)
            hidden = hidden + block.mlp(block.layer_norm2(hidden))
        states: Tensor = self.svtr.norm(hidden) + residual
        return states


def attend(attention: Any, hidden: Tensor, steps: Tensor) -> Tensor:
    """Self-attention by plain matrix products: the fused ones, for these small heads, plan each shape anew."""
    query, key, value = attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (query * attention.scale) @ key.transpose(-1, -2)
    weights = scores.masked_fill(~steps[:, None, None], float("-inf")).softmax(dim=-1)
    states: Tensor = attention.projection((weights @ value).transpose(1, 2).flatten(2))
    return states


def gate_of(module: Any) -> Excitation:
    return Excitation.of(module.conv1, module.conv2, NECK_SLOPE, residual=True)


def pointwise(part: Any) -> Tensor:
    weight: Tensor = part.convolution.weight[..., 0, 0]
    return weight


def sizes(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[1], pixels.shape[2]


def compiled_mark(device: torch.device) -> Path:
    """The file that says, beside Triton's own, that all kernels of the networks have been compiled and run."""
    stages = Path(__file__).parents[1]
    sources = b"".join((stages / source).read_bytes() for source in SOURCES)
    told = f"{triton.__version__} {torch.cuda.get_device_capability(device)}".encode()
    return Path(triton.knobs.cache.dir) / f"visiond-{hashlib.sha256(sources + told).hexdigest()[:16]}"
