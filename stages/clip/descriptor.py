"""What the rest of the program has to know of CLIP. Imports no torch."""

from __future__ import annotations

import base64
import struct
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from stages import invented, recognition
from stages.descriptor import Backend, Descriptor, Files

LABELS = "labels.txt"  # what tags are chosen from, one a line; beside a model, or in a pack
MODEL = recognition.Model(
    type="clip",
    name="CLIPModel",
    description="CLIP with both its halves",
    foreign={"classifier.": "CLIP for classes"},
)


class Embedding(msgspec.Struct, frozen=True):
    """A vector of unit length; `base64` holds its little-endian values."""

    dim: int
    dtype: str  # "float16" or "float32"
    base64: str


class Tag(msgspec.Struct, frozen=True):
    """A label, and its probability among all labels."""

    label: str
    score: float


class Clip(msgspec.Struct, frozen=True):
    """What an image is like."""

    embedding: Embedding
    tags: list[Tag]  # most probable first; softmax over all the labels asked for


class ClipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tags. The embedding depends on none of these."""

    labels: Annotated[
        list[str] | None,
        Meta(description="What images may be tagged with; not set: the pack's labels file; without one there are no tags."),
    ] = None
    template: Annotated[
        str,
        Meta(pattern=r"\{\}", description="The text that stands for a label, which takes the place of the {} in it."),
    ] = "a photo of a {}"
    top_k: Annotated[
        int, Meta(ge=0, le=100_000, description="Tags of an image, the likeliest; their scores add up to 1 over all labels.")
    ] = 5


def find(path: Path) -> dict[str, str]:
    folder = recognition.find_model(path, MODEL)
    labels = {"labels": LABELS} if (path / LABELS).is_file() else {}
    return {"model": folder, **labels} if folder else {}


def check(files: Files, *, allow_pickle: bool) -> None:
    recognition.check_transformers(MODEL, files["model"])


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
        "transformers": Backend(
            place="stages.clip.stage:ClipStage",
            options=ClipOptions,
            version=2,
            find=find,
            check=check,
            takes=MODEL.name,
        ),
    },
    half="bfloat16",  # it does not overflow, and embeddings bear it
    cost=0.03,
    fake=fake,
)
