"""Describes the stage BLIP for the rest of the program. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from stages import recognition
from stages.clip import descriptor as clip
from stages.descriptor import Descriptor, Files, Model
from stages.invented import VARIANTS

MODELS = (
    Model(
        "blip",
        "BlipForConditionalGeneration",
        "BLIP for captions",
        foreign={"text_encoder.": "BLIP for questions or retrieval", "itm_head.": "BLIP for retrieval"},
    ),
)


class Caption(msgspec.Struct, frozen=True):
    """A sentence about an image."""

    text: str
    similarity: float | None  # cosine of CLIP's image and caption embeddings; None without a CLIP stage


class BlipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions."""

    max_new_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Most tokens (words or parts of words) of a caption, without those of the prompt.",
        ),
    ] = 20
    force_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="The exact number of new tokens, for benchmarks; 0: until the caption ends.",
        ),
    ] = 0
    prompt: Annotated[
        str, Meta(description="The words that every caption begins with; empty: the model chooses all words.")
    ] = ""


def check(files: Files, *, allow_pickle: bool) -> None:
    recognition.check_transformers(MODELS, files["model"])
    if "clip" in files:
        recognition.check_transformers((*clip.MODELS, *clip.FLEXIBLE), files["clip"])


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Caption:
    return Caption(f"a picture of {variant} things", variant / VARIANTS if "clip" in earlier else None)


BLIP = Descriptor(
    name="blip",
    key="caption",
    result=Caption,
    uses=("clip",),
    backends={
        "transformers": recognition.make_backend(
            "stages.blip.stage:BlipStage",
            BlipOptions,
            MODELS,
            version=2,
            check=check,
            shares={"clip": ("clip", "model")},
        ),
    },
    half="bfloat16",  # it does not overflow, and is precise enough for captions
    cost=0.29,
    fake=fake,
)
