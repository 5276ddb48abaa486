"""Describes the stage CLIP for the rest of the program. Imports no torch."""

from __future__ import annotations

import base64
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from stages.contract import invented, recognition
from stages.contract.descriptor import BYTES, Descriptor, KnownModel
from stages.contract.manifest import LABELS

CLASSIFIER = {"classifier.": "a model of this family for classes"}
MODELS = (
    KnownModel("clip", "CLIPModel", "CLIP with both its halves", foreign=CLASSIFIER, has_size=True),
    KnownModel(
        "metaclip_2", "MetaClip2Model", "MetaCLIP 2 with both its halves", foreign=CLASSIFIER, has_size=True
    ),
    KnownModel(
        "siglip",
        "SiglipModel",
        "SigLIP, and SigLIP 2 of a fixed size",
        foreign=CLASSIFIER,
        version=2,
        has_size=True,
    ),
)
FLEXIBLE = (KnownModel("siglip2", "Siglip2Model", "SigLIP 2 NaFlex", foreign=CLASSIFIER, version=2),)
CHATTING = (
    KnownModel(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "Qwen3-VL-Embedding",
        loaded_as="Qwen3VLModel",
        embeds=True,
    ),
)
TOWERS = (*MODELS, *FLEXIBLE, *CHATTING)  # each embeds captions too


class Embedding(msgspec.Struct, frozen=True):
    """A vector of unit length; `base64` holds its little-endian values."""

    dim: int
    dtype: str  # "float16" or "float32"
    base64: str


class Tag(msgspec.Struct, frozen=True):
    """A label, and its probability: among all labels, or by SigLIP's models that of this label alone."""

    label: str
    score: float


class Clip(msgspec.Struct, frozen=True, omit_defaults=True):
    """The embedding and the tags of an image."""

    embedding: Embedding
    tags: list[Tag]  # most probable first
    # Variance of the Laplacian of its brightness, in windows all over it: of near-duplicates of one size the sharper ones have
    # more. None: of an older version.
    sharpness: float | None = None


class ClipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tags. The embedding does not depend on these options."""

    labels: Annotated[
        list[str] | None,
        Meta(
            description="The possible tags; not set: the labels file beside the model, else that of the configured pack. "
            "Without any, or with [], there are no tags."
        ),
    ] = None
    template: Annotated[
        Annotated[str, Meta(pattern=r"\{\}")] | None,
        Meta(
            description="The text that is compared with images for a label; {} is replaced by the label. "
            'Not set: as the model was trained, "a photo of a {}" or for SigLIP "This is a photo of {}.".'
        ),
    ] = None
    top_k: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="The number of tags of an image, the most probable ones. The scores of all labels add up to 1, except "
            "those of SigLIP.",
        ),
    ] = 5


class EmbeddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Embeddings alone: the model gives no probabilities, so there are no tags."""


def find(models: tuple[KnownModel, ...], path: Path) -> dict[str, str]:
    folder = recognition.find_model(path, models, "clip")
    labels = {"labels": LABELS} if (path / LABELS).is_file() else {}
    return {"model": folder, **labels} if folder else {}


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Clip:
    """A unit vector of 16 values, 15 of them zero."""
    values = [float(index == variant % 16) for index in range(16)]
    embedding = Embedding(16, "float16", base64.b64encode(struct.pack("<16e", *values)).decode())
    labels = (invented.LABELS[(variant + place) % len(invented.LABELS)] for place in range(2))
    return Clip(embedding, [Tag(label, score) for label, score in zip(labels, (0.75, 0.25), strict=True)])


CLIP = Descriptor(
    name="clip",
    key="clip",
    result=Clip,
    backends={
        "transformers": recognition.make_backend(
            "stages.clip.stage:ClipStage",
            ClipOptions,
            MODELS,
            version=2,
            find=partial(find, MODELS),
            vocabulary=("labels",),
            small=BYTES,
        ),
        "naflex": recognition.make_backend(
            "stages.clip.naflex:NaflexStage",
            ClipOptions,
            FLEXIBLE,
            find=partial(find, FLEXIBLE),
            vocabulary=("labels",),
        ),
        "chat": recognition.make_backend(
            "stages.clip.chat:ChatEmbeddingStage", EmbeddingOptions, CHATTING, stage="clip"
        ),
    },
    half="bfloat16",  # it does not overflow, and is precise enough for embeddings
    cost=0.03,
    fake=fake,
)
