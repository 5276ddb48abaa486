"""Small checkpoints with random weights of the classes of transformers that backends take, saved as on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import nn
from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SEED = 1  # of all random weights: each process makes the same models
LABELS = {number: f"thing {number}" for number in range(5)}
SMALL: dict[str, Any] = {
    "d_model": 32,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "id2label": LABELS,
}
# num_queries is the number of all proposals: no rounding decides which of two nearly equal ones is left out.
HYBRID = SMALL | {  # those with a convolutional backbone and a hybrid encoder
    "encoder_hidden_dim": 32,
    "encoder_ffn_dim": 48,
    "encoder_in_channels": [16, 24, 32],
    "decoder_in_channels": [32, 32, 32],
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_queries": 84,
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
WINDOWED = SMALL | {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4, "num_queries": 64}
VIT = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "out_features": ["stage2", "stage3"],
}


HEADS_OF_DETR = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
OF_ANY_SHAPE: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 640}}

Make = Callable[[str], Path]


def made_once(place: Path, save: Callable[[str, Path], object]) -> Make:
    """A function that returns the folder of a small model by its type, below `place`. save: makes it, at the first call."""

    def make(kind: str) -> Path:
        if not (place / kind).exists():
            save(kind, place / kind)
        return place / kind

    return make


def make_model(kind: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a class of transformers, by its name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: PreTrainedModel = getattr(transformers, kind)(config)
    return model.eval()


def draw_weights(model: PreTrainedModel, spread: float = 0.3, gain: float = 1.5) -> None:
    """Weights so large that answers depend on the image, and differ between queries; but boxes that are not
    many times as large as the image, whose rounding would be too."""
    generator = torch.Generator().manual_seed(SEED)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d | nn.Embedding):
            width = module.weight[0].numel()
            scale = 1.0 if isinstance(module, nn.Embedding) else gain / width**0.5
            scale *= 0.3 if "bbox" in name else 1.0
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * scale
            if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                bias.data = torch.randn(bias.shape, generator=generator) * spread
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.ones_(module.weight)  # RT-DETR's are drawn near 0, where all proposals are nearly equal


def draw_tokens(model: PreTrainedModel) -> None:
    """Those of YOLOS, which are all alike before a training."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.startswith("vit.") and name.endswith(("detection_tokens", "position_embeddings")):
            parameter.data = torch.randn(parameter.shape, generator=generator)


def make_detector(
    name: str, settings: dict[str, Any], backbone: Any, side: int, processor: str = "RTDetr", **preparing: Any
) -> Callable[[Path], None]:
    """processor: the start of its name. preparing: its settings, where it makes no squares."""
    preparing = preparing or {"size": {"height": side, "width": side}, "do_pad": False}

    def save(folder: Path) -> None:
        given = {"backbone_config": backbone} if backbone else {}
        config = getattr(transformers, f"{name}Config")(**given, **settings)
        model = make_model(f"{name}ForObjectDetection", config)
        draw_weights(model, gain=3.0 if preparing == OF_ANY_SHAPE else 1.2)
        draw_tokens(model)
        model.save_pretrained(folder)
        getattr(transformers, f"{processor}ImageProcessor")(**preparing).save_pretrained(folder)

    return save


def make_detr(
    name: str, processor: str, out: tuple[str, ...] = ("stage4",), **settings: Any
) -> Callable[[Path], None]:
    """A DETR as published, whose images keep their shape."""
    shared = SMALL | {"encoder_layers": 2, "encoder_ffn_dim": 48, "num_queries": 20} | settings
    backbone = None if "backbone" in settings else transformers.ResNetConfig(**RESNET, out_features=list(out))
    return make_detector(name, shared | HEADS_OF_DETR, backbone, 0, processor, **OF_ANY_SHAPE)


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
        "RfDetr",
    ),
    "lw_detr": make_detector(
        "LwDetr",
        WINDOWED | {"projector_scale_factors": [1.0]},
        transformers.LwDetrViTConfig(**VIT, image_size=128, pretrain_image_size=128, num_windows=4),
        128,
        "DeformableDetr",
    ),
    "detr": make_detr("Detr", "Detr"),
    "conditional_detr": make_detr("ConditionalDetr", "ConditionalDetr"),
    "dab-detr": make_detr("DabDetr", "ConditionalDetr", hidden_size=32),
    "deformable_detr": make_detr(
        "DeformableDetr", "DeformableDetr", ("stage2", "stage3", "stage4"), d_model=64
    ),
    "yolos": make_detector(
        "Yolos",
        {
            "image_size": [64, 96],
            "num_detection_tokens": 20,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "id2label": LABELS,
        },
        None,
        0,
        "Yolos",
        **OF_ANY_SHAPE,
    ),
}


def save_with_timm(kind: str, folder: Path) -> None:
    """A DETR whose backbone is of timm, with a config.json as its authors published it."""
    WITH_TIMM[kind](folder)
    config = json.loads((folder / "config.json").read_text())
    del config["backbone_config"]
    published = {"use_timm_backbone": True, "backbone": "test_resnet", "use_pretrained_backbone": True}
    (folder / "config.json").write_text(json.dumps(config | published))


WITH_TIMM = {
    "detr": make_detr("Detr", "Detr", backbone="test_resnet"),
    "dab-detr": make_detr("DabDetr", "ConditionalDetr", hidden_size=32, backbone="test_resnet"),
}


WORDS = (
    "a",
    "photo",
    "of",
    "this",
    "is",
    ".",
    "red",
    "circle",
    "tree",
    "very",
    "unusual",
    "thing",
    "two",
    "blue",
)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def make_tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """Whole words, between a first and a last token."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(SPECIAL + WORDS)}, "<unk>")
    )
    words.normalizer = tokenizers.normalizers.Lowercase()
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [(name, SPECIAL.index(name)) for name in ("<bos>", "<eos>")]
    words.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A <eos>", special_tokens=ends)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=longest, **names)


def make_towers(
    name: str, processor: BaseImageProcessor, vision: dict[str, Any], text: dict[str, Any]
) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        vocabulary = {
            "vocab_size": len(SPECIAL + WORDS),
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = getattr(transformers, f"{name}Config")(
            text_config=TOWER | vocabulary | {"max_position_embeddings": 16} | text,
            vision_config=TOWER | {"patch_size": 8, "image_size": 32} | vision,
            projection_dim=24,
        )
        model = make_model(f"{name}Model", config)
        draw_weights(model)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        make_tokenizer(16).save_pretrained(folder)

    return save


CROPPED = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
TOWERS = {
    "clip": make_towers("CLIP", transformers.CLIPImageProcessor(**CROPPED), {}, {}),
    "metaclip_2": make_towers("MetaClip2", transformers.CLIPImageProcessor(**CROPPED), {}, {}),
    "siglip": make_towers(
        "Siglip",
        transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
        {},
        {"projection_size": 32},
    ),
    "siglip2": make_towers(
        "Siglip2",
        transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=20),
        {"num_patches": 16},
        {"projection_size": 32},
    ),
}


def save_owlv2(folder: Path) -> None:
    vocabulary = {"vocab_size": len(SPECIAL + WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.Owlv2Config(
        text_config=TOWER | vocabulary | {"max_position_embeddings": 16},
        vision_config=TOWER | {"patch_size": 8, "image_size": 48},
        projection_dim=32,
    )
    model = make_model("Owlv2ForObjectDetection", config)
    draw_weights(model)
    model.class_head.logit_shift.weight.data.zero_()  # otherwise some images have no object at all
    model.save_pretrained(folder)
    transformers.Owlv2ImageProcessor(size={"height": 48, "width": 48}).save_pretrained(folder)
    make_tokenizer(16).save_pretrained(folder)
