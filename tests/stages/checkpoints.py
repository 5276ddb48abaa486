"""Small checkpoints with random weights of the classes of transformers that backends take, saved as on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

LABELS = {number: f"thing {number}" for number in range(5)}
SMALL: dict[str, Any] = {
    "d_model": 32,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "num_queries": 20,
    "id2label": LABELS,
}
HYBRID = SMALL | {  # those with a convolutional backbone and a hybrid encoder
    "encoder_hidden_dim": 32,
    "encoder_ffn_dim": 48,
    "encoder_in_channels": [16, 24, 32],
    "decoder_in_channels": [32, 32, 32],
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [12, 16, 24, 32],
    "depths": [1] * 4,
    "layer_type": "bottleneck",
}
HGNET = {
    "embedding_size": 8,
    "hidden_sizes": [12, 16, 24, 32],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 12, 16, 24],
    "stage_mid_channels": [8] * 4,
    "stage_out_channels": [12, 16, 24, 32],
    "stage_num_blocks": [1] * 4,
    "stage_numb_of_layers": [2] * 4,
}
WINDOWED = SMALL | {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4}
VIT = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "out_features": ["stage2", "stage3"],
}


def draw_weights(model: PreTrainedModel, spread: float = 0.3) -> None:
    """Weights so large that answers depend on the image, and differ between queries."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            width = module.weight[0].numel()
            scale = 1.0 if isinstance(module, nn.Embedding) else 1.5 / width**0.5
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * scale
            if getattr(module, "bias", None) is not None:
                module.bias.data = torch.randn(module.bias.shape, generator=generator) * spread


def make_detector(name: str, settings: dict[str, Any], backbone: Any, side: int) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        config = getattr(transformers, f"{name}Config")(backbone_config=backbone, **settings)
        model = getattr(transformers, f"{name}ForObjectDetection")(config)
        draw_weights(model)
        model.save_pretrained(folder)
        kind = {"RfDetr": "RfDetr", "LwDetr": "DeformableDetr"}.get(name, "RTDetr")
        processor = getattr(transformers, f"{kind}ImageProcessor")
        processor(size={"height": side, "width": side}, do_pad=False).save_pretrained(folder)

    return save


DETECTORS = {
    "rt_detr": make_detector(
        "RTDetr",
        HYBRID,
        transformers.RTDetrResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"]),
        64,
    ),
    "rt_detr_v2": make_detector(
        "RTDetrV2",
        HYBRID,
        transformers.RTDetrResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"]),
        64,
    ),
    "d_fine": make_detector(
        "DFine", HYBRID, transformers.HGNetV2Config(**HGNET, out_features=["stage2", "stage3", "stage4"]), 64
    ),
    "deimv2": make_detector(
        "Deimv2", HYBRID, transformers.HGNetV2Config(**HGNET, out_features=["stage2", "stage3", "stage4"]), 64
    ),
    "rf_detr": make_detector(
        "RfDetr",
        WINDOWED,
        transformers.RfDetrDinov2Config(**VIT, image_size=112, patch_size=14, num_windows=2),
        112,
    ),
    "lw_detr": make_detector(
        "LwDetr",
        WINDOWED | {"projector_scale_factors": [1.0]},
        transformers.LwDetrViTConfig(**VIT, image_size=128, pretrain_image_size=128, num_windows=4),
        128,
    ),
}
