"""What people say about an image: its objects, its tags, its captions, its text, or its classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from daemon.core.sidecar import timestamp

Box = tuple[float, float, float, float]  # x0, y0, x1, y1


class Kind(StrEnum):
    OBJECTS = "objects"
    TAGS = "tags"
    CAPTION = "caption"
    TEXT = "text"
    CLASSES = "classes"


# The stage whose answers are compared with labels of a kind.
STAGE_OF = {
    Kind.OBJECTS: "yolo",
    Kind.TAGS: "clip",
    Kind.CAPTION: "blip",
    Kind.TEXT: "ocr",
    Kind.CLASSES: "classifier",  # and each of its variants
}


class ObjectLabel(msgspec.Struct, frozen=True, omit_defaults=True):
    """box: pixels of the upright image. crowd: several that cannot be told apart, as COCO's iscrowd; a score leaves it out."""

    label: str
    box: Box
    crowd: bool = False


# Objects; or tags; or captions, of which there may be several; or the whole text; or by the name of a classifier its class.
Value = list[ObjectLabel] | list[str] | str | dict[str, str]
TYPES: dict[Kind, Any] = {
    Kind.OBJECTS: list[ObjectLabel],
    Kind.TAGS: list[str],
    Kind.CAPTION: list[str],
    Kind.TEXT: str,
    Kind.CLASSES: dict[str, str],
}


class Said(NamedTuple):
    """What a file says about one image.

    name: of the image, as the file has it. scale: what the boxes count as the whole image; None: its pixels. size: of the
    image in pixels, as the file has it; None: the file does not say. digest, origin: of a label that visiond has exported:
    which image it is of, `sha256:` and so on, and where it was from. held_out: as of Label. by_model: the file has scores, as
    models give them.
    """

    name: str
    kind: Kind
    value: Value
    scale: tuple[float, float] | None = None
    size: tuple[float, float] | None = None
    digest: str = ""
    origin: str = ""
    held_out: bool | None = None
    by_model: bool = False

    @property
    def image(self) -> str:
        """Its name, or its digest if nothing else can be meant."""
        return self.digest if self.origin else self.name


class Label(NamedTuple):
    """What people say about an image, and where that is from. held_out: whether trainings are scored on the image and do not
    learn from it; None: no file of labels says it."""

    value: Value
    origin: str
    made_at: float  # Unix seconds
    held_out: bool | None = None


LeftOut = Callable[[str], None]  # called with what a file says that is not taken, in words
LookUp = Callable[[bytes], Mapping[Kind, Label]]  # of the image with a digest

NO_LABELS: Mapping[Kind, Label] = {}


def no_labels(digest: bytes) -> Mapping[Kind, Label]:
    return NO_LABELS


def by_stage(kind: Kind, value: Value) -> Mapping[str, Any]:
    """What is said of the answers of each stage."""
    return value if isinstance(value, dict) else {STAGE_OF[kind]: value}


def describe(labels: Mapping[Kind, Label]) -> bytes:
    """As JSON, with their origin. Empty without any."""
    told = {
        kind: {"value": label.value, "origin": label.origin, "made_at": timestamp(label.made_at)}
        | ({} if label.held_out is None else {"held_out": label.held_out})
        for kind, label in labels.items()
    }
    return msgspec.json.encode(told) if told else b""


def decode(kind: Kind, text: bytes | str) -> Value:
    """Raises msgspec.MsgspecError."""
    value: Value = msgspec.json.decode(text, type=TYPES[kind])
    return value


def is_held_out(digest: bytes, share: float, said: bool | None = None) -> bool:
    """Whether a training does not learn from the image with this digest, but is scored on it. share: of all images; 1: all.
    said: as `held_out` of Label. Without it the digest alone decides, so that an image stays on its side when others are
    added."""
    if said is not None and share < 1:
        return said
    return int.from_bytes(digest[:4]) < share * 2**32
