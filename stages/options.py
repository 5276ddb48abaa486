"""[stages.*.options]: what each backend takes, and the check of what it is given. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from stages.base import StageSpec

Options = TypeVar("Options", bound=msgspec.Struct)

Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
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
    """As rapidocr's; where that has another name for one, it stands in brackets."""

    text_score: Annotated[Fraction, Meta(description="Least score of a line; a line below it is not in the result.")] = 0.5
    mask_threshold: Annotated[
        Fraction, Meta(description="What the detector must give a pixel for it to count as text (rapidocr's thresh).")
    ] = 0.3
    box_threshold: Annotated[
        Fraction, Meta(description="What it must give a box's pixels on average for the box to be read (box_thresh).")
    ] = 0.5
    unclip_ratio: Annotated[
        float,
        Meta(gt=0, le=10, description="How far boxes are grown: by their area over their circumference, times this."),
    ] = 1.6
    max_side: Annotated[
        Side, Meta(description="Pixels. An image whose longer side is more is read at this size (max_side_len).")
    ] = 2000
    min_side: Annotated[
        int, Meta(ge=1, le=736, description="Pixels. One whose shorter side is less is enlarged to this (min_side_len).")
    ] = 30
    map_side: Annotated[
        Side, Meta(description="Pixels. The least shorter side that the detector sees; smaller is enlarged (limit_side_len).")
    ] = 736
    orientation: Annotated[
        bool,
        Meta(
            description="Whether to also read pages that are upside down or sideways. A page whose text has a low score is "
            "then also read the other way round, and the reading with the higher score is used."
        ),
    ] = False


class YoloOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As ultralytics' of these names."""

    conf: Annotated[Fraction, Meta(description="Least score of an object; one below it is not in the result.")] = 0.25
    iou: Annotated[
        Fraction,
        Meta(description="Of two boxes of a class whose overlap is more of what they cover together, the surer one stays."),
    ] = 0.7
    max_det: Annotated[Count, Meta(description="Most objects of an image, the surest.")] = 300
    imgsz: Annotated[
        Count | None,
        Meta(
            description="Pixels of the longer side as the network sees it, a multiple of its stride; not set: the weights' own."
        ),
    ] = None
    allow_pickle: Annotated[
        bool, Meta(description="Whether a .pt file may be read. It is a program: allow only what you trust.")
    ] = False


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


class BlipOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captions."""

    max_new_tokens: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Most tokens of a caption, a word or a part of one each, the prompt's not counted."),
    ] = 20
    force_tokens: Annotated[
        int, Meta(ge=0, le=100_000, description="Exactly so many new tokens, for benchmarks; 0: until the caption ends.")
    ] = 0
    prompt: Annotated[str, Meta(description="What every caption begins with; empty: the model begins.")] = ""


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """fail: the fault that strikes when an image's bytes hold a marker, by marker.

    "error" and "transient" are that image's answer; "raise" is raised like a bug in a stage, "oom" as OutOfMemory for
    a batch of more than `oom_above` images, "lost" as DeviceLost; "segfault" and "exit" end the process; "hang" keeps
    it for ever, with the interpreter lock held. unusable: why the stage cannot be built. notice: as of a pack's weights.
    """

    load_seconds: float = 0.0
    latency_seconds: float = 0.0  # of a forward pass, which takes batch_size images at most
    latency_per_image_seconds: float = 0.0
    fail: dict[str, Fault] = {}
    oom_above: int = 0
    unusable: str = ""
    notice: str = ""
