"""Makes a pack of the published architectures with random weights, for `visiond bench`: they take as long as the real models.

YOLOv8n at 640, CLIP ViT-B/32, BLIP-base at 384; OCR has its real weights in every pack. They name what is in
synthetic scenes. The mini pack is made of the same parts, by a distribution of its own (minipack/).
"""

from __future__ import annotations

import copy
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from stages.contract.manifest import MANIFEST, Manifest, StageEntry, digest_folder, list_files, write_manifest
from stages.scenes.shapes import LABELS
from stages.scenes.truth import TAGS, VOCABULARY
from stages.yolo.descriptor import FILES as YOLO_FILES
from stages.yolo.structure import Size, describe
from stages.yolo.weights import build_network, halve, save_network

BLANK_NOTICE = "random weights: answers mean nothing"

YOLO_WIDTH, YOLO_SIZE = 0.25, 640
CLIP_WORDS, BLIP_WORDS = 49408, 30524  # in their vocabularies
CLIP_TOKENS, BLIP_TOKENS = 77, 512  # in their longest texts

# Words of prompts that no caption of a scene has.
PROMPT_WORDS = ("photo", "of", "the", "with", "picture", "image", "object")


@dataclass(frozen=True)
class Vocabulary:
    """The words that the models can use.

    classes: YOLO's. labels: CLIP's tags. words: those that have a token of their own; others are spelled in characters.
    """

    classes: tuple[str, ...]
    labels: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of_scenes(cls) -> Vocabulary:
        """All words for the synthetic scenes."""
        return cls(LABELS, TAGS, tuple(dict.fromkeys([*PROMPT_WORDS, *VOCABULARY])))


@dataclass
class Models:
    """What a pack is made of."""

    yolo: nn.Module
    yolo_config: dict[str, Any]
    clip: CLIPModel
    clip_tokenizer: PreTrainedTokenizerFast
    blip: BlipForConditionalGeneration
    blip_tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary


def make_pack(folder: Path) -> None:
    """Write the pack of random weights."""
    vocabulary = Vocabulary.of_scenes()
    clip_words = make_clip_tokenizer(vocabulary, CLIP_TOKENS)
    blip_words = make_blip_tokenizer(vocabulary, BLIP_TOKENS)
    torch.manual_seed(0)
    yolo, yolo_config = make_yolo(vocabulary, YOLO_WIDTH, YOLO_SIZE)
    clip = CLIPModel(CLIPConfig(text_config=clip_specials(clip_words, CLIP_WORDS))).eval()
    # BLIP's default initializer_range, 1e-10, is for models whose weights are loaded afterwards.
    blip = BlipForConditionalGeneration(
        BlipConfig(
            text_config=blip_specials(blip_words, BLIP_WORDS), vision_config={"initializer_range": 0.02}
        )
    ).eval()
    pack = Models(yolo, yolo_config, clip, clip_words, blip, blip_words, vocabulary)
    save_models(pack, folder, Manifest(name="random", trained=False, notice=BLANK_NOTICE))


def make_yolo(vocabulary: Vocabulary, width: float, edge: int) -> tuple[nn.Module, dict[str, Any]]:
    """yolov8n with this share of yolov8's channels, and the config to build it again. edge: of its images, in pixels."""
    names = list(vocabulary.classes)
    config = {
        "model": describe(Size(0.33, width), len(names)),
        "nc": len(names),
        "names": names,
        "imgsz": edge,
    }
    return build_network(config), config


def clip_specials(tokenizer: PreTrainedTokenizerFast, words: int) -> dict[str, Any]:
    """CLIP's special tokens for its config, in a vocabulary of this size: with the published one the last layer has its full
    cost."""
    return {
        "vocab_size": words,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def blip_specials(tokenizer: PreTrainedTokenizerFast, words: int) -> dict[str, Any]:
    """The same for BLIP, whose captions end with [SEP]."""
    end = tokenizer.sep_token_id
    return clip_specials(tokenizer, words) | {"eos_token_id": end, "sep_token_id": end}


def make_clip_tokenizer(vocabulary: Vocabulary, longest: int) -> PreTrainedTokenizerFast:
    """longest: tokens of a text."""
    return make_tokenizer(
        vocabulary.words,
        {
            "pad_token": "<|padding|>",
            "unk_token": "<|unknown|>",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
        },
        framed_by=("<|startoftext|>", "<|endoftext|>"),
        longest=longest,
    )


def make_blip_tokenizer(vocabulary: Vocabulary, longest: int) -> PreTrainedTokenizerFast:
    """As BLIP's: a caption begins with [DEC], which replaces BERT's [CLS], and ends with [SEP]."""
    return make_tokenizer(
        vocabulary.words,
        {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "bos_token": "[DEC]",
        },
        framed_by=("[CLS]", "[SEP]"),
        longest=longest,
    )


def make_tokenizer(
    words: Sequence[str], specials: dict[str, str], framed_by: tuple[str, str], longest: int
) -> PreTrainedTokenizerFast:
    """WordPiece in lower case: the words are single tokens, others are split into characters. Special tokens come first."""
    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*specials.values(), *words, *characters, *(f"##{character}" for character in characters)]
    ids = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=specials["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    first, last = framed_by
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(first, ids[first]), (last, ids[last])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **specials)


def save_models(models: Models, folder: Path, manifest: Manifest) -> None:
    """Write a pack: the networks with their matrices in float16, their tokenizers, the labels and the manifest.

    Of `manifest`, stages and digests are filled in here.
    """
    save_network(models.yolo.state_dict(), models.yolo_config, folder)
    # A caption describes the whole image, so nothing is cropped for CLIP either.
    clip = CLIPImageProcessor(size=square(models.clip), do_center_crop=False)
    for name, network, tokenizer, processor in (
        ("clip", models.clip, models.clip_tokenizer, clip),
        ("blip", models.blip, models.blip_tokenizer, BlipImageProcessor(size=square(models.blip))),
    ):
        for part in (halve_matrices(network), tokenizer, processor):
            part.save_pretrained(folder / name)
    (folder / "labels.txt").write_text("\n".join(models.vocabulary.labels) + "\n")
    for file in list_files(folder):
        file.chmod(0o644)  # safetensors writes for the owner alone
    stages = {
        "yolo": StageEntry("ultralytics", YOLO_FILES),
        "clip": StageEntry("transformers", {"model": "clip", "labels": "labels.txt"}),
        "blip": StageEntry("transformers", {"model": "blip", "clip": "clip"}),
    }
    manifest = msgspec.structs.replace(manifest, stages=stages, digests=digest_folder(folder))
    write_manifest(folder / MANIFEST, manifest)


def square(network: PreTrainedModel) -> dict[str, int]:
    edge = network.config.vision_config.image_size
    return {"height": edge, "width": edge}


def halve_matrices(network: PreTrainedModel) -> PreTrainedModel:
    """A copy to write; weights that the network shares stay shared."""
    halved = copy.deepcopy(network)
    for parameter in halved.parameters():
        parameter.data = halve(parameter.data)
    return halved


if __name__ == "__main__":
    make_pack(Path(sys.argv[1]))
