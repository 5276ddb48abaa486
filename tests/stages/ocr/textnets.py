"""Small text detectors and recognizers with random weights of the classes of transformers that the backend takes, saved
as on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BaseImageProcessor

from tests.stages.checkpoints import draw_weights, make_model

CHARACTERS = ["blank", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "ß", " "]
OUT = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
CONVOLUTION = {
    name: [kernel, 1, [size // 2 for size in kernel]]
    for name, kernel in {
        "reduce_channel": [1, 1],
        "return_channel": [1, 1],
        **{
            f"{way}_{length}ratio": kernel
            for length, size in (("long", 7), ("mid", 5), ("short", 3))
            for way, kernel in (
                ("vertical_long_to_small_conv", [size, 1]),
                ("horizontal_small_to_long_conv", [1, size]),
                ("symmetric_conv_long", [size, size]),
            )
        },
    }.items()
}
PATHS = {
    "intraclass_block_config": CONVOLUTION,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "neck_out_channels": 32,
}


def block(*rows: tuple[int, int, Any, bool]) -> list[list[Any]]:
    return [[3, *row] for row in rows]


def make_lcnet(stem: str = "large", *, narrows: bool = False) -> transformers.PPLCNetV4Config:
    """narrows: for a recognizer, whose rows are halved and whose columns stay."""
    down: Any = [2, 1] if narrows else 2
    return transformers.PPLCNetV4Config(
        stem_type=stem,
        stem_channels=[3, 8, 16],
        block_configs=[
            block((16, 16, 1, True)),
            block((16, 24, 1 if narrows else down, False), (24, 24, 1, True)),
            block((24, 32, down, False)),
            block((32, 40, down, True), (40, 40, 1, False)),
        ],
        **OUT,
    )


def make_old_lcnet(*, narrows: bool = False) -> transformers.PPLCNetV3Config:
    down: Any = [2, 1] if narrows else 2
    return transformers.PPLCNetV3Config(
        scale=1.0,
        divisor=8,
        conv_symmetric_num=2,
        block_configs=[
            block((16, 16, 1, False)),
            block((16, 24, [1, 2] if narrows else 2, False), (24, 24, 1, False)),
            block((24, 32, down, False)),
            block((32, 40, down, True)),
            block((40, 48, down, True), (48, 48, 1, False)),
        ],
        out_features=["stage2", "stage3", "stage4", "stage5"],
    )


def make_hgnet(**settings: Any) -> transformers.HGNetV2Config:
    return transformers.HGNetV2Config(
        embedding_size=8,
        hidden_sizes=[12, 16, 24, 32],
        depths=[1] * 4,
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 12, 16, 24],
        stage_mid_channels=[8] * 4,
        stage_out_channels=[12, 16, 24, 32],
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[2] * 4,
        **OUT,
        **settings,
    )


def add_statistics(model: nn.Module) -> None:
    """Batch norms with means and variances that are not 0 and 1: otherwise folding them wrongly would change nothing."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean = torch.randn(module.num_features, generator=generator) * 0.1
            module.running_var = torch.rand(module.num_features, generator=generator) + 0.5
            module.bias.data = torch.randn(module.num_features, generator=generator) * 0.1


LAST = ("conv_final", "convolution_final", "head.head", "fc2")


def draw_noise(count: int, height: int, width: int, seed: int = 4) -> torch.Tensor:
    """Soft blotches, uint8 [count, height, width, 3]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 3, height // 8, width // 8), generator=generator)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    return (smooth * 255).byte().permute(0, 2, 3, 1).contiguous()


def spread_answers(model: nn.Module, height: int) -> None:
    """Scale the last layers so that probabilities are neither 0 nor 1, and differ between places."""
    pixels = draw_noise(4, height, 320, seed=3).permute(0, 3, 1, 2) / 127.5 - 1
    for name, layer in model.named_modules():
        if name.endswith(LAST) and not name.startswith(("model", "head.encoder")):
            seen: list[torch.Tensor] = []
            hook = layer.register_forward_hook(lambda _, inputs, output, seen=seen: seen.append(output))
            with torch.inference_mode():
                model(pixels)
            hook.remove()
            values = seen[0].flatten(0, -2) if isinstance(layer, nn.Linear) else seen[0].reshape(-1, 1)
            width, center = (part.clone() for part in torch.std_mean(values / 3, dim=0))  # of each class
            layer.bias.data = (layer.bias.data - center * 3) / width
            layer.weight.data /= width[:, None] if isinstance(layer, nn.Linear) else width.item()


def make(
    name: str, task: str, processor: Callable[[], BaseImageProcessor], **settings: Any
) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        config = getattr(transformers, f"PPOCR{name}Config")(**settings)
        model = make_model(f"PPOCR{name}For{task}", config)
        draw_weights(model, gain=1.5)
        add_statistics(model)
        spread_answers(model, 48 if task == "TextRecognition" else 96)
        model.save_pretrained(folder)
        processor().save_pretrained(folder)

    return save


def make_detector(name: str, **settings: Any) -> Callable[[Path], None]:
    processor = lambda: transformers.PPOCRV5ServerDetImageProcessor(limit_side_len=160, limit_type="min")  # noqa: E731
    return make(f"{name}Det", "ObjectDetection", processor, **settings)


def make_recognizer(name: str, version: str = "V6Small", **settings: Any) -> Callable[[Path], None]:
    processor = lambda: getattr(transformers, f"PPOCR{version}RecImageProcessor")(character_list=CHARACTERS)  # noqa: E731
    return make(f"{name}Rec", "TextRecognition", processor, head_out_channels=len(CHARACTERS), **settings)


SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2}
DETECTORS = {
    "pp_ocrv6_small_det": make_detector(
        "V6Small",
        backbone_config=make_lcnet(),
        layer_list_out_channels=[16, 24, 32, 40],
        neck_out_channels=32,
    ),
    "pp_ocrv6_medium_det": make_detector("V6Medium", backbone_config=make_lcnet(), **PATHS),
    "pp_ocrv5_mobile_det": make_detector(
        "V5Mobile",
        backbone_config=make_old_lcnet(),
        layer_list_out_channels=[8, 12, 16, 24],
        neck_out_channels=32,
    ),
    "pp_ocrv5_server_det": make_detector("V5Server", backbone_config=make_hgnet(), **PATHS),
}
TINY_DETECTOR = make_detector(
    "V6Small",
    backbone_config=make_lcnet("small"),
    layer_list_out_channels=[16, 24, 32, 40],
    neck_out_channels=32,
)
RECOGNIZERS = {
    "pp_ocrv6_tiny_rec": make_recognizer(
        "V6Tiny", backbone_config=make_lcnet("small", narrows=True), hidden_size=16
    ),
    "pp_ocrv6_small_rec": make_recognizer("V6Small", backbone_config=make_lcnet(narrows=True), **SMALL),
    "pp_ocrv5_mobile_rec": make_recognizer(
        "V5Mobile", "V5Server", backbone_config=make_old_lcnet(narrows=True), **SMALL
    ),
    "pp_ocrv5_server_rec": make_recognizer(
        "V5Server",
        "V5Server",
        backbone_config=make_hgnet(
            stem_strides=[2, 1, 1, 1, 1],
            stage_downsample=[True] * 4,
            stage_downsample_strides=[[2, 1], [1, 2], [2, 1], [2, 1]],
        ),
        **SMALL,
    ),
}
TEXTNETS = DETECTORS | RECOGNIZERS
