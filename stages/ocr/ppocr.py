"""PP-OCRv6 small: text detection and text recognition, transformers' modules filled from the rapidocr wheel's ONNX files.

Both networks take RGB. The published ones take BGR, so their first convolution's input channels are turned round here.
Batch norms are folded into their convolutions, and the forward passes are this file's own: the recogniser's keeps what
lies right of a line out of its answer, and both write in place where that saves a pass over memory.

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

from stages.ocr.onnxfile import OnnxFile, WeightsError, read_onnx

# The published weights where they differ from transformers' defaults.
DETECTOR_STEM = [3, 24, 48]
DETECTOR_BLOCKS = [  # a list a stage: kernel, channels in, channels out, stride, squeeze and excitation
    [[3, 48, 48, 1, True], [3, 48, 48, 1, False]],
    [[3, 48, 96, 2, False], [3, 96, 96, 1, True], [3, 96, 96, 1, False]],
    [[3, 96, 192, 2, False], *[[3, 192, 192, 1, excited] for excited in (True, False, True, False)]],
    [[3, 192, 384, 2, False], [3, 384, 384, 1, True], [3, 384, 384, 1, False]],
]
DETECTOR_CHANNELS = [48, 96, 192, 384]
SVTR_EPSILON = 1e-5  # of the norms inside the two SVTR blocks; the last norm has transformers' 1e-6

LINE_HEIGHT = 48  # rows of the recogniser's input
BLANK = 0  # CTC's blank class
GROUP_CHANNELS = 32  # of a depthwise convolution that is run as one of groups

KINDS = {"Conv": nn.Conv2d, "ConvTranspose": nn.ConvTranspose2d, "MatMul": nn.Linear, "LayerNorm": nn.LayerNorm}


class Detector(nn.Module):
    """Where there is text."""

    def __init__(self) -> None:
        super().__init__()
        backbone = PPLCNetV4Config(stem_channels=DETECTOR_STEM, block_configs=DETECTOR_BLOCKS)
        config = PPOCRV6SmallDetConfig(backbone_config=backbone, layer_list_out_channels=DETECTOR_CHANNELS)
        network = PPOCRV6SmallDetForObjectDetection(config)
        self.encoder, self.neck, self.head = network.model.backbone.encoder, network.model.neck, network.head

    def look(self, pages: Tensor) -> Tensor:
        """forward, from uint8 [N, H, W, 3]."""
        probabilities: Tensor = self(normalise(pages, self.encoder.convolution.stem4.convolution.weight.dtype))
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
        """The weighted modules in the ONNX file's order: there the neck goes from its smallest map to its largest."""
        yield from encoder_layers(self.encoder)
        for insert in reversed(self.neck.insert_conv):
            yield insert.in_conv
            yield from excitation_layers(insert.squeeze_excitation_block)
        for smooth in reversed(self.neck.input_conv):
            yield smooth.depthwise_convolution
            yield smooth.pointwise_convolution
            yield from excitation_layers(smooth.squeeze_excitation_module)
        yield self.head.conv_down.convolution
        yield self.head.conv_up.convolution
        yield self.head.conv_final


class Recognizer(nn.Module):
    """What a line of text says.

    The network's convolutions, means and attention see the padding right of a line, so a line's answer depends on the
    width it is padded to. For lines of unlike padded widths to share a tensor, `widths` gives each line's own: whatever
    lies right of it is kept out, and the answer is the one that a tensor of just that width would get.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        config = PPOCRV6SmallRecConfig(backbone_config=PPLCNetV4Config(), head_out_channels=classes)
        network = PPOCRV6SmallRecForTextRecognition(config)
        self.encoder, self.svtr, self.head = network.model.backbone.encoder, network.head.encoder, network.head.head
        for block in self.svtr.svtr_block:
            block.layer_norm1.eps = block.layer_norm2.eps = SVTR_EPSILON

    def look(self, lines: Tensor, resized: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """forward, from uint8 [N, 48, W, 3]. resized, padded: int64 [N], a line's own columns, and those with its padding."""
        pixels = normalise(lines, self.head.weight.dtype)
        columns = torch.arange(lines.shape[2], device=lines.device)
        answers: tuple[Tensor, Tensor] = self(pixels.masked_fill_(columns >= resized[:, None, None, None], 0), padded)
        return answers

    def forward(self, pixels: Tensor, widths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The likeliest class at each step and its probability, both [N, W // 8]; BLANK right of a line's own width.

        pixels: [N, 3, 48, W], RGB in -1..1, zeros right of each line.
        widths: int64 [N], what each line is padded to, at most W; None when all are W.
        """
        probabilities, classes = self.head(self.encode(pixels, widths)).softmax(dim=-1, dtype=torch.float32).max(dim=-1)
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
        return self.read(F.avg_pool2d(hidden, (3, 2)), steps)

    def read(self, hidden: Tensor, steps: Tensor | None) -> Tensor:
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
        """The weighted modules in the ONNX file's order."""
        yield from encoder_layers(self.encoder)
        for layer in self.svtr.conv_block:
            yield layer.convolution
        for block in self.svtr.svtr_block:
            yield from (block.layer_norm1, block.self_attn.qkv, block.self_attn.projection)
            yield from (block.layer_norm2, block.mlp.fc1, block.mlp.fc2)
        yield self.svtr.norm
        yield self.head


def normalise(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [N, height, width, 3] to -1..1, [N, 3, height, width] with the channels last in memory."""
    return levels.float().mul_(2 / 255).sub_(1).to(dtype).permute(0, 3, 1, 2)


def count_steps(widths: Tensor) -> Tensor:
    """How many steps of the output belong to lines of `widths` columns: halved three times, up, up and down."""
    return ((widths + 1) // 2 + 1) // 4


def masks_of(widths: Tensor | None, width: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """What belongs to each line at a half, a quarter and an eighth of the width: ones, then zeros, [N, 1, 1, columns]."""
    if widths is None:
        return None, None, None
    halves, whole = (widths + 1) // 2, (width + 1) // 2
    levels = (whole, halves), ((whole + 1) // 2, (halves + 1) // 2), ((whole + 1) // 4, count_steps(widths))
    columns = torch.arange(whole, device=widths.device)
    return tuple((columns[:size] < own[:, None, None, None]).to(dtype) for size, own in levels)


def mask(hidden: Tensor, kept: Tensor | None) -> Tensor:
    return hidden if kept is None else hidden.mul_(kept)


def run_stem(stem: Any, pixels: Tensor, kept: Tensor | None = None) -> Tensor:
    """The stem pads right and bottom only. Padding all round and slicing the surplus off spares two copies."""
    hidden = mask(stem.stem1(pixels), kept)
    pooled = F.max_pool2d(hidden, 2, stride=1, padding=1)[..., 1:, 1:]
    detail = F.relu_(F.conv2d(hidden, stem.stem2a.convolution.weight, stem.stem2a.convolution.bias, padding=1))
    if kept is not None:
        detail = detail.mul_(F.pad(kept, (1, 0), value=1.0))
    detail = F.relu_(F.conv2d(detail, stem.stem2b.convolution.weight, stem.stem2b.convolution.bias, padding=1))
    hidden = torch.cat([pooled, mask(detail[..., 2:, 2:], kept)], dim=1)
    for layer in (stem.stem3, stem.stem4):
        hidden = layer(hidden)
    return hidden


def run_block(block: Any, hidden: Tensor, kept: Tensor | None = None) -> Tensor:
    hidden = block.token_conv(mask(hidden, kept))
    if not isinstance(block.token_squeeze_excitation, nn.Identity):
        hidden = hidden.mul_(excite(block.token_squeeze_excitation.convolutions, hidden, kept))
    mixed: Tensor = block.channel_conv2(torch.ops.aten.gelu_(block.channel_conv1(hidden)))
    return mixed.add_(hidden) if block.has_residual else mixed


def excite(layers: nn.ModuleList, hidden: Tensor, kept: Tensor | None) -> Tensor:
    """A gate for each channel from its mean over the line. Sums of so many values would not fit into float16."""
    if kept is None:
        gate = hidden.mean(dim=(2, 3), keepdim=True)
    else:
        share = kept.float().mean(dim=3, keepdim=True)
        gate = ((hidden * kept).mean(dim=(2, 3), keepdim=True) / share).to(hidden.dtype)
    for layer in layers:
        gate = layer(gate)
    return gate


def run_neck(neck: Any, features: Sequence[Tensor]) -> Tensor:
    """The feature maps of the four stages, coarser ones added to finer ones, side by side at the finest's size."""
    maps = [insert(feature) for insert, feature in zip(neck.insert_conv, features, strict=True)]
    for finer, coarser in ((2, 3), (1, 2), (0, 1)):
        maps[finer].add_(F.interpolate(maps[coarser], scale_factor=2))
    smoothed = [smooth(layer, hidden) for layer, hidden in zip(neck.input_conv, maps, strict=True)]
    return torch.cat([smoothed[0] if i == 0 else F.interpolate(smoothed[i], scale_factor=2**i) for i in (3, 2, 1, 0)], dim=1)


def smooth(layer: Any, hidden: Tensor) -> Tensor:
    hidden = layer.pointwise_convolution(layer.depthwise_convolution(hidden))
    return hidden.add_(layer.squeeze_excitation_module(hidden))


def attend(attention: Any, hidden: Tensor, kept: Tensor | None) -> Tensor:
    query, key, value = attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    allowed = None if kept is None else kept.bool()
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=attention.scale)
    states: Tensor = attention.projection(mixed.transpose(1, 2).flatten(2))
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


def excitation_layers(module: Any) -> Iterator[nn.Module]:
    yield from (module.conv1, module.conv2)


def load_detector(path: Path | str) -> Detector:
    """The network with a file's weights, in float32 on the CPU. Raises WeightsError if they are not PP-OCRv6 small's."""
    with torch.device("meta"):
        network = Detector()
    fill(network, read_onnx(path), path)
    return network


def load_recognizer(path: Path | str) -> tuple[Recognizer, list[str]]:
    """The network with a file's weights, and the text of each of its classes. Raises WeightsError."""
    file = read_onnx(path)
    if "character" not in file.metadata:
        raise WeightsError(f'{path} has no "character" entry in its metadata: it is no text recogniser of rapidocr\'s.')
    characters = ["", *file.metadata["character"].split("\n"), " "]
    with torch.device("meta"):
        network = Recognizer(len(characters))
    fill(network, file, path)
    return network, characters


def group_depthwise(network: Detector) -> None:
    """Make the neck's 7×7 depthwise convolutions a GPU's tensor cores' work: the same, as convolutions of groups.

    In a group of 32 channels all weights but the diagonal are zero. In half precision with the channels last, cuDNN on
    an H200 takes 0.16 ms for such a one on a page of 1280×960, for the depthwise one 0.99 ms.
    """
    for layer in network.neck.input_conv:
        narrow = layer.depthwise_convolution
        count = narrow.out_channels
        wide = nn.Conv2d(count, count, narrow.kernel_size, padding=narrow.padding, groups=count // GROUP_CHANNELS)
        wide.weight = freeze(np.zeros(wide.weight.shape, dtype=np.float32))
        wide.weight[torch.arange(count), torch.arange(count) % GROUP_CHANNELS] = narrow.weight[:, 0]
        wide.bias = narrow.bias
        layer.depthwise_convolution = wide


def fill(network: Detector | Recognizer, file: OnnxFile, path: Path | str) -> None:
    """Give each weighted module the layer that has its place in the file; drop the norms that those have taken in."""
    modules: list[Any] = list(network.layers())
    if [(KINDS[layer.kind], layer.weight.shape) for layer in file.layers] != [(type(m), m.weight.shape) for m in modules]:
        raise WeightsError(f"{path} is not PP-OCRv6 small for a {type(network).__name__.lower()}: it has other layers.")
    for module, layer in zip(modules, file.layers, strict=True):
        module.weight = freeze(layer.weight)
        module.bias = None if layer.bias is None else freeze(layer.bias)
    modules[0].weight = freeze(file.layers[0].weight[:, ::-1])  # BGR to RGB
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
            elif isinstance(child, nn.ReLU):
                child.inplace = True
    network.eval()


def freeze(array: NDArray[np.float32]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(array.copy()), requires_grad=False)
