"""What a stage is: a model that turns a batch of images into one result for each.

This file and descriptor.py are the whole contract between the daemon and the models. They import no torch, so that the daemon
can read them too. A new stage is a subclass of `Stage` and a `Descriptor`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    import torch


class Reason(StrEnum):
    """Why an image has no result. A closed set: it is a label in the metrics, so never free text."""

    EMPTY = "empty"  # no bytes
    NOT_AN_IMAGE = "not-an-image"  # the bytes are of no image format
    FORMAT = "format"  # an image format that is not read here
    HEADER = "header"  # the header cannot be parsed or states impossible dimensions
    PIXELS = "pixels"  # more pixels than max_pixels
    ASPECT = "aspect"  # longer than max_aspect_ratio
    TRUNCATED = "truncated"  # the file ends before its pixels do
    DECODER = "decoder"  # the decoder refused it, crashed, or ran over its memory or time
    BYTES = "bytes"  # a larger file than the slab takes
    UNREADABLE = "unreadable"  # no permission, or an I/O error
    NOT_REGULAR = "not-regular"  # a link, FIFO, socket or device
    STAGE = "stage"  # a stage raised an error on it
    MEMORY = "memory"  # out of GPU memory even alone
    TIMEOUT = "timeout"  # its worker had to be killed for taking too long
    POISON = "poison"  # its worker died on it, alone, more than once
    RULE = "rule"  # the user's binning rule raised an error on it


class ImageError(Exception):
    """One image cannot be processed; its batch-mates are not concerned.

    `transient` tells whether another try may succeed.
    """

    def __init__(self, reason: Reason, detail: str, *, transient: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.transient = transient


class OutOfMemory(Exception):
    """The device had no memory for this batch; half of it may fit."""


class DeviceLost(Exception):
    """The device's context is unusable (every CUDA error but out-of-memory is sticky): the process must go."""


class StageUnusable(ValueError):
    """A stage cannot be built from its weights and options, and a new try would not change that. Says why, for the user."""


# What a stage says of an image, of the type in its descriptor. Boxes are pixels of the upright image (EXIF applied), x right,
# y down. A result is encoded to JSON once, in the worker, and goes into the ledger and the sidecar as those bytes.
Result = msgspec.Struct


class StageSpec(msgspec.Struct, frozen=True):
    """A stage as configured and resolved by the daemon: all that a worker needs to build it."""

    name: str  # as in its descriptor
    backend: str  # one of those in its descriptor
    files: dict[str, str] = {}  # role → path of a verified file or folder; {} for fake backends
    fingerprint: str = ""  # changes whenever the answers may
    dtype: str = "float32"  # "float32", "bfloat16" or "float16"
    batch_size: int = 16  # most images for one forward pass
    options: dict[str, Any] = {}  # the backend's own settings
    notice: str = ""  # what to say beside its answers, of the weights that they come from


@dataclass(slots=True)
class Image:
    """One image inside a worker.

    pixels: uint8 tensor [3, height, width], RGB, upright, on the worker's device; None when no
        stage of the worker looks at pixels.
    results: what earlier stages said of it, by stage name.
    """

    data: memoryview
    width: int
    height: int
    pixels: torch.Tensor | None = None
    results: dict[str, Result] = field(default_factory=dict)


class Stage(ABC):
    """A model. Built and loaded once in a worker, then called by several threads."""

    reads_pixels: ClassVar[bool] = True

    def __init__(self, spec: StageSpec, device: str) -> None:
        """device: a torch device string ("cpu", "cuda:0"), or anything at all for fake stages."""
        self.spec = spec
        self.name = spec.name
        self.device = device
        self.lock = threading.Lock()  # held round the part that runs on the device

    @abstractmethod
    def load(self) -> None:
        """Put the model on the device and run it once, so that the first batch meets a warm model."""

    @abstractmethod
    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        """One answer for each image, in order. Images may differ in size; batch-mates never change an answer.

        Raises OutOfMemory when the batch does not fit and DeviceLost when the device is gone; any
        other error is taken as one image's fault, which the caller isolates by halving the batch.
        """


class Header(msgspec.Struct, frozen=True):
    """What an image file says of itself, without its pixels. Width and height are of the upright image."""

    format: str  # Pillow's name: "JPEG", "PNG", "WEBP", …
    width: int
    height: int
    orientation: int  # EXIF orientation 1..8
    pages: int = 1  # pictures in the file, of which the first is read


class Limits(msgspec.Struct, frozen=True):
    """What an image may be. The defaults keep every stage's preprocessing within bounds."""

    max_pixels: int = 100_000_000
    max_aspect_ratio: float = 50.0
    decode_seconds: float = 20.0  # CPU time of the disposable decoder for one image
    decode_bytes: int = 2 << 30  # its address space


def advise(settings: str) -> str:
    """How to allow what a limit has refused."""
    return f"To allow it, set {settings} under [pipeline] in daemon.toml"
