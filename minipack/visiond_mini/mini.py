"""The architectures of the mini pack, untrained: small enough to ship, with the same classes as the full ones.

What the models are to name is a parameter, so that the tests, the trainer and the package share one recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from stages.weights.published import (
    Models,
    Vocabulary,
    blip_specials,
    clip_specials,
    make_blip_tokenizer,
    make_clip_tokenizer,
    make_yolo,
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the networks; with the defaults they have less than 10 MB together in float16."""

    yolo_width: float = 0.125  # of yolov8's channels
    yolo_size: int = 320
    image_size: int = 192  # CLIP's and BLIP's: the whole image, squeezed to a square
    clip_patch: int = 16
    clip_vision: dict[str, int] = field(default_factory=lambda: layers(5, 128, 256, 4))
    clip_text: dict[str, int] = field(default_factory=lambda: layers(2, 128, 256, 4))
    embedding: int = 128
    clip_tokens: int = 24
    blip_patch: int = 12
    blip_vision: dict[str, int] = field(default_factory=lambda: layers(6, 192, 384, 6))
    blip_text: dict[str, int] = field(default_factory=lambda: layers(2, 128, 256, 4))
    blip_tokens: int = 32


def layers(count: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": count,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


def make_models(seed: int, vocabulary: Vocabulary, sizes: Sizes) -> Models:
    """The three networks with random weights, in eval mode, and their tokenizers."""
    clip_tokenizer = make_clip_tokenizer(vocabulary, sizes.clip_tokens)
    blip_tokenizer = make_blip_tokenizer(vocabulary, sizes.blip_tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yolo, yolo_config = make_yolo(vocabulary, sizes.yolo_width, sizes.yolo_size)
        clip = make_clip(clip_tokenizer, sizes)
        blip = make_blip(blip_tokenizer, sizes)
    return Models(yolo, yolo_config, clip, clip_tokenizer, blip, blip_tokenizer, vocabulary)


def make_clip(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> CLIPModel:
    text = {
        **sizes.clip_text,
        **clip_specials(tokenizer, len(tokenizer)),
        "max_position_embeddings": sizes.clip_tokens,
    }
    vision = {**sizes.clip_vision, "image_size": sizes.image_size, "patch_size": sizes.clip_patch}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=sizes.embedding)
    ).eval()


def make_blip(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> BlipForConditionalGeneration:
    text = {
        **sizes.blip_text,
        **blip_specials(tokenizer, len(tokenizer)),
        "max_position_embeddings": sizes.blip_tokens,
    }
    vision = {
        **sizes.blip_vision,
        "image_size": sizes.image_size,
        "patch_size": sizes.blip_patch,
        "initializer_range": 0.02,  # BLIP's own default, 1e-10, is for models that are loaded at once
    }
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision)).eval()
