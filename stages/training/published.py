"""Makes a pack of the published architectures with random weights,
for `visiond bench`: they take as long as the real models.

YOLOv8n at 640, CLIP ViT-B/32, BLIP-base at 384; OCR has its real weights in every pack.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BlipConfig, BlipForConditionalGeneration, CLIPConfig, CLIPModel

from stages.contract.manifest import Manifest
from stages.training import mini

SIZES = mini.Sizes(yolo_width=0.25, yolo_size=640, clip_tokens=77, blip_tokens=512)
CLIP_WORDS, BLIP_WORDS = 49408, 30524  # in their vocabularies


def make_pack(folder: Path) -> None:
    """Write the pack. Its captions use the words of the synthetic scenes."""
    words = mini.Vocabulary.of_scenes()
    clip_words, blip_words = mini.make_clip_tokenizer(words, SIZES), mini.make_blip_tokenizer(words, SIZES)
    torch.manual_seed(0)
    yolo, yolo_config = mini.make_yolo(words, SIZES)
    clip = CLIPModel(CLIPConfig(text_config=specials(clip_words, clip_words.eos_token_id, CLIP_WORDS))).eval()
    blip_text = specials(blip_words, blip_words.sep_token_id, BLIP_WORDS) | {
        "sep_token_id": blip_words.sep_token_id
    }
    # BLIP's default initializer_range, 1e-10, is for models whose weights are loaded afterwards.
    blip = BlipForConditionalGeneration(
        BlipConfig(text_config=blip_text, vision_config={"initializer_range": 0.02})
    ).eval()
    models = mini.MiniModels(yolo, yolo_config, clip, clip_words, blip, blip_words, words)
    mini.save_models(models, folder, Manifest(name="random", trained=False, notice=mini.BLANK_NOTICE))


def specials(tokenizer: Any, end: int, size: int) -> dict[str, int]:
    """The tokenizer's special tokens in a vocabulary of the published size,
    so that the last layer has its full cost."""
    return {
        "vocab_size": size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
    }


if __name__ == "__main__":
    make_pack(Path(sys.argv[1]))
