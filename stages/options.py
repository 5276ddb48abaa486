"""[stages.*.options]: checks them, and defines limits that several backends share. Imports no torch."""

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
    """A stage's options as a struct that forbids unknown fields. Raises ValueError that names the wrong one."""
    try:
        return msgspec.convert(spec.options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ValueError(f"[stages.{spec.name}.options] {error}; {spec.backend} takes {known}.") from error


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """fail: marker → the fault that happens when an image's bytes contain the marker.

    "error" and "transient" are that image's answer. "raise" is raised like a bug in a stage, "oom" as
    OutOfMemory for a batch of more than `oom_above` images, "lost" as DeviceLost. "segfault" and "exit" end
    the process. "hang" blocks it forever, with the interpreter lock held. unusable: why the stage cannot be
    built. notice: like that of a pack. device_file: a file that is locked for the time of each forward pass, so
    that all workers together are no faster than one device.
    """

    load_seconds: float = 0.0
    latency_seconds: float = 0.0  # of a forward pass of at most batch_size images
    latency_per_image_seconds: float = 0.0
    fail: dict[str, Fault] = {}
    oom_above: int = 0
    unusable: str = ""
    notice: str = ""
    device_file: str = ""
