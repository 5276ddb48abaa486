"""Small classifiers of transformers with random weights, each with an image processor as on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.stages.checkpoints import HGNET, TOWER, draw_weights, make_model

LABELS = {0: "cat", 1: "dog", 2: "cup", 3: "safe", 4: "nsfw"}
SQUARE = {"size": {"height": 32, "width": 32}}
CROPPED = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
VIT = {"image_size": 32, "patch_size": 8} | TOWER
PYRAMID = {"hidden_sizes": [8, 12, 16, 24], "depths": [1] * 4}
HEADS = PYRAMID | {"num_attention_heads": [1, 2, 2, 4]}
WINDOWS = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
LEVIT = {
    "image_size": 64,
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2] * 3,
    "depths": [1] * 3,
    "key_dim": [8] * 3,
    "attention_ratio": [2] * 3,
    "drop_path_rate": 0,
}
HIERA = {
    "image_size": [32, 32],
    "patch_size": [3, 3],
    "patch_stride": [4, 4],
    "patch_padding": [1, 1],
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "num_query_pool": 1,
    "masked_unit_size": [4, 4],
    "masked_unit_attention": [True, False],
    "query_stride": [2, 2],
}
EDGE_OF_64 = {"size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}}
MOBILEVIT = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 12, 16, 16, 24, 32], "image_size": 64}

# By model_type: the start of the name of its classes, the settings of its configuration, and the image processor that its
# published models have, with settings.
KINDS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "beit": ("Beit", VIT, "Beit", CROPPED | {"size": {"height": 36, "width": 36}, "do_center_crop": True}),
    "bit": (
        "Bit",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
        "Bit",
        CROPPED,
    ),
    "convnext": ("ConvNext", PYRAMID, "ConvNext", {"size": {"shortest_edge": 64}, "crop_pct": 0.875}),
    "convnextv2": ("ConvNextV2", PYRAMID, "ConvNext", {"size": {"shortest_edge": 384}}),
    "cvt": (
        "Cvt",
        {"embed_dim": [8, 12, 16], "depth": [1, 2, 3], "num_heads": [1, 2, 2]},
        "ConvNext",
        EDGE_OF_64,
    ),
    "data2vec-vision": ("Data2VecVision", VIT, "Beit", SQUARE | {"do_center_crop": False}),
    "deit": ("DeiT", VIT, "DeiT", CROPPED | {"size": {"height": 36, "width": 36}}),
    "dinov2": ("Dinov2", VIT, "Bit", CROPPED),
    "dinov2_with_registers": ("Dinov2WithRegisters", VIT, "Bit", CROPPED),
    "efficientnet": (
        "EfficientNet",
        {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 64},
        "EfficientNet",
        {"size": {"height": 64, "width": 64}, "resample": 0, "rescale_offset": False, "include_top": True},
    ),
    "focalnet": (
        "FocalNet",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16]},
        "Bit",
        CROPPED,
    ),
    "hgnet_v2": ("HGNetV2", HGNET, "ConvNext", EDGE_OF_64),
    "hiera": ("Hiera", HIERA, "Bit", CROPPED),
    "ijepa": ("IJepa", VIT, "ViT", SQUARE),
    "levit": (
        "Levit",
        LEVIT,
        "Levit",
        {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    ),
    "mobilenet_v1": ("MobileNetV1", {"depth_multiplier": 0.25}, "MobileNetV1", EDGE_OF_64),
    "mobilenet_v2": ("MobileNetV2", {"depth_multiplier": 0.25}, "MobileNetV2", EDGE_OF_64),
    "mobilevit": ("MobileViT", MOBILEVIT, "MobileViT", EDGE_OF_64),
    "mobilevitv2": ("MobileViTV2", {"image_size": 64, "width_multiplier": 0.25}, "MobileViT", EDGE_OF_64),
    "poolformer": (
        "PoolFormer",
        PYRAMID,
        "PoolFormer",
        {"size": {"shortest_edge": 64}, "crop_pct": 0.95, "crop_size": 64},
    ),
    "pvt_v2": ("PvtV2", HEADS | {"image_size": 64}, "Pvt", {"size": {"height": 64, "width": 64}}),
    "regnet": ("RegNet", PYRAMID | {"embedding_size": 8, "groups_width": 4}, "ConvNext", {"size": 64}),
    "resnet": (
        "ResNet",
        PYRAMID | {"embedding_size": 8},
        "ConvNext",
        {"size": {"shortest_edge": 64}, "crop_pct": 0.875},
    ),
    "segformer": ("Segformer", HEADS, "Segformer", {"size": {"height": 64, "width": 64}}),
    "swiftformer": ("SwiftFormer", {"depths": [1] * 4, "embed_dims": [8, 16, 24, 32]}, "ViT", {"size": 64}),
    "swin": ("Swin", WINDOWS, "ViT", SQUARE | {"resample": 3}),
    "swinv2": ("Swinv2", WINDOWS, "ViT", SQUARE | {"resample": 1}),
    "vit": ("ViT", VIT, "ViT", SQUARE | {"resample": 2}),
    "vit_msn": ("ViTMSN", VIT, "ViT", SQUARE),
    "clip": ("CLIP", {}, "CLIP", CROPPED),
    "metaclip_2": ("MetaClip2", {}, "CLIP", CROPPED),
    "siglip": ("Siglip", {}, "Siglip", SQUARE),
}
WITH_TEXT = ("clip", "metaclip_2", "siglip")


def save(kind: str, folder: Path, *, end: str = "", **settings: Any) -> PreTrainedModel:
    """A small model of a model_type, with its image processor. end: of the name of its class."""
    if kind == "timm_wrapper":
        return save_with_timm(folder, **settings)
    name, config, processor, preparing = KINDS[kind]
    if kind in WITH_TEXT:
        text = TOWER | {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = {"vision_config": TOWER | {"image_size": 32, "patch_size": 8}, "text_config": text}
    made = make_config(name, config | settings)
    model = make_model(f"{name}ForImageClassification{end}", made)
    draw_weights(model)
    calm(model)
    model.save_pretrained(folder)
    getattr(transformers, f"{processor}ImageProcessor")(**preparing).save_pretrained(folder)
    return model


def save_with_timm(folder: Path, **settings: Any) -> Any:
    """A model of timm, with a config.json as in its repositories."""
    timm = pytest.importorskip("timm", reason="timm is not installed: make tools")
    torch.manual_seed(1)
    prepared = {
        "input_size": [3, 160, 160],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
        "crop_mode": "center",
    }
    prepared |= {"mean": [0.5, 0.4, 0.5], "std": [0.5, 0.5, 0.6]} | settings.pop("pretrained_cfg", {})
    config = {
        "architecture": "test_vit",
        "num_classes": len(LABELS),
        "label_names": [*LABELS.values()],
    } | settings
    model = timm.create_model(config["architecture"], num_classes=config["num_classes"]).eval()
    draw_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"pretrained_cfg": prepared}))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


def make_config(name: str, settings: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, f"{name}Config")(**({"id2label": LABELS} | settings))
    return config


@torch.inference_mode()
def calm(model: PreTrainedModel) -> None:
    """Statistics as after training: otherwise each layer makes the numbers larger, and all scores are 0 or 1."""
    torch.manual_seed(0)
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = None
    model.train()
    model(pixel_values=torch.randn(16, 3, 64, 64))
    model.eval()


CLASSIFIERS: dict[str, Callable[[Path], Any]] = {
    kind: partial(save, kind) for kind in (*KINDS, "timm_wrapper")
}
