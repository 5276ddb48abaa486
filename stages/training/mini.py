"""The architectures of the pack inside the package, untrained: small enough to ship,
with the same classes as the full ones.

What the models are to name is a parameter, so that the tests, the trainer and the package share one recipe.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from stages.yolo.structure import Size, describe
from stages.yolo.weights import build_network, halve, save_network

BLANK_NOTICE = "random weights: answers mean nothing"

YOLO_FILES = {"weights": "yolo.safetensors", "config": "yolo.json"}  # in a pack's folder

# Words of prompts that no caption of a scene has.
PROMPT_WORDS = ("photo", "of", "the", "with", "picture", "image", "object")


@dataclass(frozen=True)
class Vocabulary:
    """The words that the models can use.

    classes: YOLO's. labels: CLIP's tags. words: those that have a token of their own;
    others are spelled in characters.
    """

    classes: tuple[str, ...]
    labels: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of_scenes(cls) -> Vocabulary:
        """All words for the synthetic scenes of scenes.py."""
        return cls(LABELS, TAGS, tuple(dict.fromkeys([*PROMPT_WORDS, *VOCABULARY])))


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


@dataclass
class MiniModels:
    yolo: nn.Module
    yolo_config: dict[str, Any]
    clip: CLIPModel
    clip_tokenizer: PreTrainedTokenizerFast
    blip: BlipForConditionalGeneration
    blip_tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary


def make_blank_pack(folder: Path, seed: int, sizes: Sizes | None = None) -> Manifest:
    """Write a pack of the mini architectures with random weights."""
    return save_models(
        make_models(seed, Vocabulary.of_scenes(), sizes or Sizes()),
        folder,
        Manifest(name="mini", description="Small blank models.", trained=False, notice=BLANK_NOTICE),
    )


def make_models(seed: int, vocabulary: Vocabulary, sizes: Sizes) -> MiniModels:
    """The three networks with random weights, in eval mode, and their tokenizers."""
    clip_tokenizer, blip_tokenizer = (
        make_clip_tokenizer(vocabulary, sizes),
        make_blip_tokenizer(vocabulary, sizes),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yolo, yolo_config = make_yolo(vocabulary, sizes)
        clip = make_clip(clip_tokenizer, sizes)
        blip = make_blip(blip_tokenizer, sizes)
    return MiniModels(yolo, yolo_config, clip, clip_tokenizer, blip, blip_tokenizer, vocabulary)


def make_yolo(vocabulary: Vocabulary, sizes: Sizes) -> tuple[nn.Module, dict[str, Any]]:
    """yolov8n with narrower layers, and the config to build it again."""
    names = list(vocabulary.classes)
    structure = describe(Size(0.33, sizes.yolo_width), len(names))
    config = {"model": structure, "nc": len(names), "names": names, "imgsz": sizes.yolo_size}
    return build_network(config), config


def make_clip(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> CLIPModel:
    text = {
        **sizes.clip_text,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": sizes.clip_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {**sizes.clip_vision, "image_size": sizes.image_size, "patch_size": sizes.clip_patch}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=sizes.embedding)
    ).eval()


def make_blip(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> BlipForConditionalGeneration:
    text = {
        **sizes.blip_text,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": sizes.blip_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        **sizes.blip_vision,
        "image_size": sizes.image_size,
        "patch_size": sizes.blip_patch,
        "initializer_range": 0.02,  # BLIP's own default, 1e-10, is for models that are loaded at once
    }
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision)).eval()


def make_clip_tokenizer(vocabulary: Vocabulary, sizes: Sizes) -> PreTrainedTokenizerFast:
    return make_tokenizer(
        vocabulary.words,
        {
            "pad_token": "<|padding|>",
            "unk_token": "<|unknown|>",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
        },
        framed_by=("<|startoftext|>", "<|endoftext|>"),
        longest=sizes.clip_tokens,
    )


def make_blip_tokenizer(vocabulary: Vocabulary, sizes: Sizes) -> PreTrainedTokenizerFast:
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
        longest=sizes.blip_tokens,
    )


def make_tokenizer(
    words: Sequence[str], specials: dict[str, str], framed_by: tuple[str, str], longest: int
) -> PreTrainedTokenizerFast:
    """WordPiece in lower case: the words are single tokens, others are split into characters.
    Special tokens come first."""
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


def save_models(models: MiniModels, folder: Path, manifest: Manifest) -> Manifest:
    """Write a pack: the networks with their matrices in float16, their tokenizers,
    the labels and the manifest.

    Of `manifest`, stages and digests are filled in here.
    """
    save_network(models.yolo.state_dict(), models.yolo_config, folder)
    for name, network, tokenizer, processor in (
        # A caption describes the whole image, so nothing is cropped for CLIP either.
        (
            "clip",
            models.clip,
            models.clip_tokenizer,
            CLIPImageProcessor(size=square(models.clip), do_center_crop=False),
        ),
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
    return manifest


def square(network: PreTrainedModel) -> dict[str, int]:
    edge = network.config.vision_config.image_size
    return {"height": edge, "width": edge}


def halve_matrices(network: PreTrainedModel) -> PreTrainedModel:
    """A copy to write; weights that the network shares stay shared."""
    halved = copy.deepcopy(network)
    for parameter in halved.parameters():
        parameter.data = halve(parameter.data)
    return halved
