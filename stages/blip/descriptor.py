"""Describes the stage BLIP for the rest of the program. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stages.clip import descriptor as clip
from stages.contract import recognition
from stages.contract.descriptor import BYTES, SMALL, Backend, Descriptor, Files, KnownModel
from stages.contract.invented import VARIANTS

MODELS = (
    KnownModel(
        "blip",
        "BlipForConditionalGeneration",
        "BLIP for captions",
        foreign={"text_encoder.": "BLIP for questions or retrieval", "itm_head.": "BLIP for retrieval"},
        has_size=True,
    ),
)
BLIP2 = (
    KnownModel(
        "blip-2",
        "Blip2ForConditionalGeneration",
        "BLIP-2 for captions",
        foreign={"itm_head.": "BLIP-2 for retrieval"},
        has_size=True,
    ),
)
FLORENCE = (
    KnownModel(
        "florence2",
        "Florence2ForConditionalGeneration",
        "Florence-2, as in florence-community/Florence-2-base",
        foreign=dict.fromkeys(("image_pos_embed.", "davit"), "an older Florence-2 that needs remote code"),
    ),
)
CHAT = tuple(
    KnownModel(kind, f"{name}ForConditionalGeneration", description, embeds=False)
    for kind, name, description in (
        ("smolvlm", "SmolVLM", "SmolVLM2"),
        ("idefics3", "Idefics3", "SmolVLM, Idefics3"),
        ("qwen3_vl", "Qwen3VL", "Qwen3-VL"),
        ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2.5-VL"),
        ("qwen2_vl", "Qwen2VL", "Qwen2-VL"),
        ("internvl", "InternVL", "InternVL3"),
        ("llava_onevision", "LlavaOnevision", "LLaVA-OneVision"),
    )
)

NewTokens = Annotated[
    int,
    Meta(
        ge=1,
        le=100_000,
        description="Most tokens (words or parts of words) of a caption, without those of the prompt.",
    ),
]
ForcedTokens = Annotated[
    int,
    Meta(
        ge=0,
        le=100_000,
        description="The exact number of new tokens, for benchmarks; 0: until the caption ends.",
    ),
]


class Caption(msgspec.Struct, frozen=True):
    """A sentence about an image."""

    text: str
    # Cosine of CLIP's image and caption embeddings; None without a CLIP stage, and for unfamiliar images.
    similarity: float | None


class BlipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions by BLIP."""

    max_new_tokens: NewTokens = 20
    force_tokens: ForcedTokens = 0
    prompt: Annotated[
        str, Meta(description="The words that every caption begins with; empty: the model chooses all words.")
    ] = ""


class Blip2Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions by BLIP-2."""

    max_new_tokens: NewTokens = 30
    force_tokens: ForcedTokens = 0
    prompt: Annotated[
        str,
        Meta(
            description="The words that the model continues, for example `a photo of` or a question. They are not part "
            "of the caption."
        ),
    ] = ""


class FlorenceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions by Florence-2."""

    task: Annotated[
        Literal["caption", "detailed", "more detailed"],
        Meta(description="One short sentence, one or two longer ones, or a paragraph."),
    ] = "caption"
    max_new_tokens: NewTokens = 256
    force_tokens: ForcedTokens = 0


class ChatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions by models that answer questions about images."""

    prompt: Annotated[str, Meta(description="What the model is asked about each image.")] = (
        "Describe this image in one sentence."
    )
    max_new_tokens: NewTokens = 64
    force_tokens: ForcedTokens = 0


def make_captioner(
    place: str, options: type[msgspec.Struct], models: tuple[KnownModel, ...], **fields: Any
) -> Backend:
    """A backend whose captions are compared with the images by the model of the stage CLIP."""

    def check(files: Files, *, allow_pickle: bool) -> None:
        recognition.check_transformers(models, files["model"])
        if "clip" in files:
            recognition.check_transformers(clip.TOWERS, files["clip"])

    shares = {"clip": ("clip", "model")}
    return recognition.make_backend(
        place, options, models, stage="blip", check=check, shares=shares, **fields
    )


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Caption:
    return Caption(f"a picture of {variant} things", variant / VARIANTS if "clip" in earlier else None)


BLIP = Descriptor(
    name="blip",
    key="caption",
    result=Caption,
    uses=("clip",),
    backends={
        "transformers": make_captioner("stages.blip.stage:BlipStage", BlipOptions, MODELS, version=2),
        "blip2": make_captioner(
            "stages.blip.generation:Blip2Stage", Blip2Options, BLIP2, small=SMALL, can_spread=True
        ),
        "florence": make_captioner(
            "stages.blip.generation:FlorenceStage", FlorenceOptions, FLORENCE, small=BYTES
        ),
        "chat": make_captioner(
            "stages.blip.generation:ChatStage", ChatOptions, CHAT, small=SMALL, can_spread=True
        ),
    },
    half="bfloat16",  # it does not overflow, and is precise enough for captions
    cost=0.29,
    takes_memory=True,
    has_variants=True,
    fake=fake,
)
