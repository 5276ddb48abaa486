"""PP-OCRv6 small: text detection and text recognition, transformers' modules filled from the rapidocr wheel's ONNX files.

Both networks take RGB. The published ones take BGR, so the input channels of their first convolution are
reversed here. Batch norms are folded into their convolutions. The forward passes are written here: the
recognizer's masks what is to the right of a line, and both work in place where that saves a pass over memory.
They also run networks of other widths and depths that have the same modules, such as PP-OCRv6 medium's recognizer.

Reference: PaddleOCR's PP-OCRv6; transformers' pp_lcnet_v4, pp_ocrv6_small_det and pp_ocrv6_small_rec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    PPLCNetV4Config,
    PPOCRV6SmallDetConfig,
    PPOCRV6SmallDetForObjectDetection,
    PPOCRV6SmallRecConfig,
    PPOCRV6SmallRecForTextRecognition,
)

from stages.contract.manifest import WeightsError
from stages.ocr.generic import PLAIN, Levels, blank_right
from stages.ocr.onnxfile import OnnxFile

# The published weights where they differ from transformers' defaults.
DETECTOR_STEM = [3, 24, 48]
# A list for each stage: kernel, channels in, channels out, stride, squeeze and excitation.
DETECTOR_BLOCKS = [
    [[3, 48, 48, 1, True], [3, 48, 48, 1, False]],
    [[3, 48, 96, 2, False], [3, 96, 96, 1, True], [3, 96, 96, 1, False]],
    [[3, 96, 192, 2, False], *[[3, 192, 192, 1, excited] for excited in (True, False, True, False)]],
    [[3, 192, 384, 2, False], [3, 384, 384, 1, True], [3, 384, 384, 1, False]],
]
DETECTOR_CHANNELS = [48, 96, 192, 384]
SVTR_EPSILON = 1e-5  # of the norms in the two SVTR blocks; the last norm has transformers' 1e-6

LINE_HEIGHT = 48  # rows of the recognizer's input
BLANK = 0  # CTC's blank class
GROUP_CHANNELS = 32  # in a group, for a depthwise convolution that is run as a grouped one


class OtherLayers(WeightsError):
    """A file has the weights of a network with other layers."""


KINDS = {
    "Conv": nn.Conv2d,
    "ConvTranspose": nn.ConvTranspose2d,
    "MatMul": nn.Linear,
    "LayerNorm": nn.LayerNorm,
}


class Detector(nn.Module):
    """Text detection: where there is text."""

    def __init__(self, network: Any = None, levels: Levels = PLAIN) -> None:
        """network: transformers' PPOCRV6SmallDetForObjectDetection, instead of one with the sizes of PP-OCRv6 small."""
        super().__init__()
        if network is None:
            backbone = PPLCNetV4Config(stem_channels=DETECTOR_STEM, block_configs=DETECTOR_BLOCKS)
            network = PPOCRV6SmallDetForObjectDetection(
                PPOCRV6SmallDetConfig(backbone_config=backbone, layer_list_out_channels=DETECTOR_CHANNELS)
            )
        self.encoder, self.neck, self.head = network.model.backbone.encoder, network.model.neck, network.head
        self.levels = levels

    def infer(self, pages: Tensor) -> Tensor:
        """`forward` on pages, uint8 [N, H, W, 3]."""
        probabilities: Tensor = self(
            self.levels.normalize(pages, self.encoder.convolution.stem4.convolution.weight.dtype)
        )
        return probabilities

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [N, 3, H, W], RGB in -1..1, sides multiples of 32. Returns each pixel's probability of text, [N, H, W]."""
        hidden = run_stem(self.encoder.convolution, pixels)
        features = []
        for stage in self.encoder.blocks:
            for block in stage.blocks:
                hidden = run_block(block, hidden)
            features.append(hidden)
        probabilities: Tensor = self.head(run_neck(self.neck, features))
        return probabilities.squeeze(1)

    def layers(self) -> Iterator[nn.Module]:
        """The modules with weights in the ONNX file's order, where the neck goes from its smallest map to its largest."""
        yield from encoder_layers(self.encoder)
        for insert in reversed(self.neck.insert_conv):
            yield insert.in_conv
            excitation = insert.squeeze_excitation_block
            yield from (excitation.conv1, excitation.conv2)
        for smooth in reversed(self.neck.input_conv):
            yield smooth.depthwise_convolution
            yield smooth.pointwise_convolution
            excitation = smooth.squeeze_excitation_module
            yield from (excitation.conv1, excitation.conv2)
        yield self.head.conv_down.convolution
        yield self.head.conv_up.convolution
        yield self.head.conv_final


class Recognizer(nn.Module):
    """Text recognition: what a line of text says.

    The network's convolutions, means and attention see the padding to the right of a line, so a line's answer depends on its
    padded width. So that lines of different padded widths can share a tensor, `widths` has each line's own: whatever is to
    the right of it is masked, and the answer is the same as from a tensor of exactly that width.
    """

    shares_tensors = True  # between lines of different padded widths

    def __init__(self, network: Any, levels: Levels = PLAIN) -> None:
        """network: transformers' PPOCRV6SmallRecForTextRecognition."""
        super().__init__()
        self.encoder, self.svtr, self.head = (
            network.model.backbone.encoder,
            network.head.encoder,
            network.head.head,
        )
        self.levels = levels

    @classmethod
    def small(cls, classes: int) -> Recognizer:
        """With the sizes of PP-OCRv6 small."""
        config = PPOCRV6SmallRecConfig(backbone_config=PPLCNetV4Config(), head_out_channels=classes)
        network = cls(PPOCRV6SmallRecForTextRecognition(config))
        for block in network.svtr.svtr_block:
            block.layer_norm1.eps = block.layer_norm2.eps = SVTR_EPSILON
        return network

    def infer(self, lines: Tensor, resized: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """`forward` on lines, uint8 [N, 48, W, 3]. resized, padded: int64 [N], columns without and with padding."""
        pixels = self.levels.normalize(lines, self.head.weight.dtype)
        answers: tuple[Tensor, Tensor] = self(blank_right(pixels, resized), padded)
        return answers

    def forward(self, pixels: Tensor, widths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The most likely class at each step and its probability, both [N, W // 8]; BLANK beyond a line's own width.

        pixels: [N, 3, 48, W], RGB in -1..1, zeros to the right of each line.
        widths: int64 [N], the padded width of each line, at most W; None when all are W.
        """
        probabilities, classes = (
            self.head(self.encode(pixels, widths)).softmax(dim=-1, dtype=torch.float32).max(dim=-1)
        )
        if widths is not None:
            steps = torch.arange(classes.shape[1], device=classes.device)
            classes = classes.masked_fill(steps >= count_steps(widths)[:, None], BLANK)
        return classes, probabilities

    def encode(self, pixels: Tensor, widths: Tensor | None = None) -> Tensor:
        """The last hidden states, [N, W // 8, 120]."""
        halves, quarters, steps = masks_of(widths, pixels.shape[-1], pixels.dtype)
        hidden = run_stem(self.encoder.convolution, pixels, halves)
        for block in (block for stage in self.encoder.blocks for block in stage.blocks):
            hidden = run_block(block, hidden, quarters)
        return self.run_svtr(F.avg_pool2d(hidden, (3, 2)), steps)

    def run_svtr(self, hidden: Tensor, steps: Tensor | None) -> Tensor:
        """hidden: [N, channels, 1, W // 8]. steps: the mask of the steps. Returns the last hidden states."""
        skip, reduce, local = self.svtr.conv_block
        residual = skip(hidden)
        hidden = mask(reduce(hidden), steps)
        hidden = (hidden + local(hidden)).flatten(2).transpose(1, 2)
        for block in self.svtr.svtr_block:
            hidden = hidden + attend(block.self_attn, block.layer_norm1(hidden), steps)
            hidden = hidden + block.mlp(block.layer_norm2(hidden))
        states: Tensor = self.svtr.norm(hidden) + residual.flatten(2).transpose(1, 2)
        return states

    def layers(self) -> Iterator[nn.Module]:
        """The modules with weights in the ONNX file's order."""
        yield from encoder_layers(self.encoder)
        for layer in self.svtr.conv_block:
            yield layer.convolution
        for block in self.svtr.svtr_block:
            yield from (block.layer_norm1, block.self_attn.qkv, block.self_attn.projection)
            yield from (block.layer_norm2, block.mlp.fc1, block.mlp.fc2)
        yield self.svtr.norm
        yield self.head


def count_steps(widths: Tensor) -> Tensor:
    """The number of output steps of lines of `widths` columns: halved three times, rounded up, up and down."""
    return ((widths + 1) // 2 + 1) // 4


def masks_of(widths: Tensor | None, width: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Masks of each line at 1/2, 1/4 and 1/8 of the width, [N, 1, 1, columns]: 1 in the line, 0 to the right of it."""
    if widths is None:
        return None, None, None
    halves, whole = (widths + 1) // 2, (width + 1) // 2
    levels = (whole, halves), ((whole + 1) // 2, (halves + 1) // 2), ((whole + 1) // 4, count_steps(widths))
    columns = torch.arange(whole, device=widths.device)
    return tuple((columns[:size] < own[:, None, None, None]).to(dtype) for size, own in levels)


def mask(hidden: Tensor, kept: Tensor | None) -> Tensor:
    return hidden if kept is None else hidden.mul_(kept)


def run_stem(stem: Any, pixels: Tensor, kept: Tensor | None = None) -> Tensor:
    """The stem pads right and bottom only. Padding all sides and slicing off the surplus saves two copies."""
    hidden = mask(stem.stem1(pixels), kept)
    pooled = F.max_pool2d(hidden, 2, stride=1, padding=1)[..., 1:, 1:]
    detail = F.relu_(
        F.conv2d(hidden, stem.stem2a.convolution.weight, stem.stem2a.convolution.bias, padding=1)
    )
    if kept is not None:
        detail = detail.mul_(F.pad(kept, (1, 0), value=1.0))
    detail = F.relu_(
        F.conv2d(detail, stem.stem2b.convolution.weight, stem.stem2b.convolution.bias, padding=1)
    )
    hidden = torch.cat([pooled, mask(detail[..., 2:, 2:], kept)], dim=1)
    for layer in (stem.stem3, stem.stem4):
        hidden = layer(hidden)
    return hidden


def run_block(block: Any, hidden: Tensor, kept: Tensor | None = None) -> Tensor:
    hidden = block.token_conv(mask(hidden, kept))
    if not isinstance(block.token_squeeze_excitation, nn.Identity):
        hidden = hidden.mul_(excite(block.token_squeeze_excitation.convolutions, hidden, kept))
    out: Tensor = block.channel_conv2(torch.ops.aten.gelu_(block.channel_conv1(hidden)))
    return out.add_(hidden) if block.has_residual else out


def excite(layers: nn.ModuleList, hidden: Tensor, kept: Tensor | None) -> Tensor:
    """A gate for each channel from its mean over the line, mean(hidden · kept) / mean(kept): sums would overflow float16."""
    if kept is None:
        gate = hidden.mean(dim=(2, 3), keepdim=True)
    else:
        share = kept.float().mean(dim=3, keepdim=True)
        gate = ((hidden * kept).mean(dim=(2, 3), keepdim=True) / share).to(hidden.dtype)
    for layer in layers:
        gate = layer(gate)
    return gate


def run_neck(neck: Any, features: Sequence[Tensor]) -> Tensor:
    """The feature maps of the four stages, coarser ones added to finer ones, concatenated at the finest one's size."""
    maps = [insert(feature) for insert, feature in zip(neck.insert_conv, features, strict=True)]
    for finer, coarser in ((2, 3), (1, 2), (0, 1)):
        maps[finer].add_(F.interpolate(maps[coarser], scale_factor=2))
    smoothed = [smooth(layer, hidden) for layer, hidden in zip(neck.input_conv, maps, strict=True)]
    return torch.cat(
        [smoothed[0] if i == 0 else F.interpolate(smoothed[i], scale_factor=2**i) for i in (3, 2, 1, 0)],
        dim=1,
    )


def smooth(layer: Any, hidden: Tensor) -> Tensor:
    hidden = layer.pointwise_convolution(layer.depthwise_convolution(hidden))
    return hidden.add_(layer.squeeze_excitation_module(hidden))


def attend(attention: Any, hidden: Tensor, kept: Tensor | None) -> Tensor:
    query, key, value = (
        attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    )
    allowed = None if kept is None else kept.bool()
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=attention.scale)
    states: Tensor = attention.projection(attended.transpose(1, 2).flatten(2))
    return states


def encoder_layers(encoder: Any) -> Iterator[nn.Module]:
    stem = encoder.convolution
    for layer in (stem.stem1, stem.stem2a, stem.stem2b, stem.stem3, stem.stem4):
        yield layer.convolution
    for block in (block for stage in encoder.blocks for block in stage.blocks):
        yield getattr(block.token_conv, "convolution", block.token_conv)
        if not isinstance(block.token_squeeze_excitation, nn.Identity):
            squeeze, _, expand, _ = block.token_squeeze_excitation.convolutions
            yield from (squeeze, expand)
        yield from (block.channel_conv1.convolution, block.channel_conv2.convolution)


def fill_detector(file: OnnxFile, path: Path | str) -> Detector:
    """The network with a file's weights, in float32 on the CPU.
    Raises WeightsError if they are not those of PP-OCRv6 small."""
    with torch.device("meta"):
        network = Detector()
    fill(network, file, path)
    return network


def fill_recognizer(file: OnnxFile, path: Path | str, classes: int) -> Recognizer:
    with torch.device("meta"):
        network = Recognizer.small(classes)
    fill(network, file, path)
    return network


def group_depthwise(network: Detector) -> None:
    """Run the neck's 7×7 depthwise convolutions as grouped ones, which use a GPU's tensor cores; the results are the same.

    In a group of 32 channels all weights except the diagonal are zero. In half precision with the channels last, cuDNN on an
    H200 takes 0.16 ms for the grouped convolution on a page of 1280×960, and 0.99 ms for the depthwise one.
    """
    for layer in network.neck.input_conv:
        depthwise = layer.depthwise_convolution
        count = depthwise.out_channels
        grouped = nn.Conv2d(
            count, count, depthwise.kernel_size, padding=depthwise.padding, groups=count // GROUP_CHANNELS
        )
        grouped.weight = freeze(np.zeros(grouped.weight.shape, dtype=np.float32))
        grouped.weight[torch.arange(count), torch.arange(count) % GROUP_CHANNELS] = depthwise.weight[:, 0]
        grouped.bias = depthwise.bias
        layer.depthwise_convolution = grouped


def fill(network: Detector | Recognizer, file: OnnxFile, path: Path | str) -> None:
    """Copy the file's layers into the network's modules, in order, and remove the batch norms that are folded into them."""
    modules: list[Any] = list(network.layers())
    if [(KINDS[layer.kind], layer.weight.shape) for layer in file.layers] != list_shapes(network):
        raise OtherLayers(
            f"{path} does not hold the {type(network).__name__.lower()} of PP-OCRv6 small: its layers are different."
        )
    for module, layer in zip(modules, file.layers, strict=True):
        module.weight = freeze(layer.weight)
        module.bias = None if layer.bias is None else freeze(layer.bias)
    modules[0].weight = freeze(file.layers[0].weight[:, ::-1])  # BGR to RGB
    finish(network)


def finish(network: Detector | Recognizer) -> None:
    """Remove the batch norms, which are folded, and let activations work in place."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
            elif isinstance(child, nn.ReLU):
                child.inplace = True
    network.eval()


def list_shapes(network: Detector | Recognizer) -> list[tuple[type[nn.Module], torch.Size]]:
    """What identifies a network: the kind and the shape of each layer, in order."""
    layers: Iterator[Any] = network.layers()
    return [(type(layer), layer.weight.shape) for layer in layers]


def freeze(array: NDArray[np.float32]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(array.copy()), requires_grad=False)
