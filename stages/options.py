"""[stages.*.options]: what each backend takes, and the check of what it is given. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from stages.base import StageSpec

Options = TypeVar("Options", bound=msgspec.Struct)

Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Side = Annotated[int, Meta(ge=32, le=4096)]
Fault = Literal["error", "transient", "raise", "oom", "lost", "segfault", "exit", "hang"]


def read_options(spec: StageSpec, kind: type[Options]) -> Options:
    """A stage's options as a struct that forbids unknown fields. Raises ValueError, naming the one that is wrong."""
    try:
        return msgspec.convert(spec.options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ValueError(f"[stages.{spec.name}.options] {error}; {spec.backend} takes {known}.") from error


class OcrOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """rapidocr's, with what it calls them."""

    text_score: Fraction = 0.5
    mask_threshold: Fraction = 0.3  # thresh
    box_threshold: Fraction = 0.5  # box_thresh
    unclip_ratio: Annotated[float, Meta(gt=0, le=10)] = 1.6
    max_side: Side = 2000  # max_side_len
    min_side: Annotated[int, Meta(ge=1, le=736)] = 30  # min_side_len
    map_side: Side = 736  # limit_side_len


class YoloOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conf: Fraction = 0.25  # least score of a detection
    iou: Fraction = 0.7  # of two boxes of a class that overlap more, the surer one stays
    max_det: Count = 300
    imgsz: Count | None = None  # the longer side as the network sees it; None: the weights' own
    allow_pickle: bool = False  # whether a .pt file may be read


class ClipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    labels: list[str] | None = None  # what images may be tagged with; None: the pack's labels file
    template: Annotated[str, Meta(pattern=r"\{\}")] = "a photo of a {}"  # the text that stands for a label
    top_k: Annotated[int, Meta(ge=0)] = 5  # tags of an image


class BlipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_new_tokens: Annotated[int, Meta(ge=1)] = 20
    force_tokens: Annotated[int, Meta(ge=0)] = 0  # exactly so many new tokens, for benchmarks; 0: until it ends
    prompt: str = ""  # what every caption begins with


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """fail: the fault that strikes when an image's bytes hold a marker, by marker.

    "error" and "transient" are that image's answer; "raise" is raised like a bug in a stage, "oom" as OutOfMemory for
    a batch of more than `oom_above` images, "lost" as DeviceLost; "segfault" and "exit" end the process; "hang" keeps
    it for ever, with the interpreter lock held.
    """

    load_seconds: float = 0.0
    latency_seconds: float = 0.0  # of a forward pass, which takes batch_size images at most
    latency_per_image_seconds: float = 0.0
    fail: dict[str, Fault] = {}
    oom_above: int = 0
