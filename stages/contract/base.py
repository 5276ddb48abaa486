"""A stage: a model that turns a batch of images into one result for each.

This file and descriptor.py are the whole contract between the daemon and the models. They import no torch,
so that the daemon can import them too. A new stage is a subclass of `Stage` and a `Descriptor`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

# The tag and the caption of an image that the models of a pack do not know.
UNFAMILIAR = "not a scene of the demonstration pack"
# Images of the batches of a GPU with much memory. With smaller ones, stages save memory even if that takes time.
FULL_BATCH = 128
SIZE_STEP = 16  # images, between the sizes of large batches: a GPU fills others up with empty ones
# What this process has prepared for its GPU so far: images wait for what comes after the load. Threads may miscount a little.
PLAN, RECORDING, COMPILATION = PREPARATIONS = ("plan", "recording", "compilation")
PREPARED = Counter[str]()


class Reason(StrEnum):
    """Why an image has no result. A closed set: it is a label in the metrics, so it is never free text."""

    EMPTY = "empty"  # no bytes
    NOT_AN_IMAGE = "not-an-image"  # the bytes are not of an image format
    FORMAT = "format"  # an image format that is not supported
    HEADER = "header"  # the header cannot be parsed, or has dimensions that the file cannot have
    PIXELS = "pixels"  # more pixels than max_pixels
    ASPECT = "aspect"  # longer than max_aspect_ratio
    TRUNCATED = "truncated"  # the file ends before its pixels do
    DECODER = "decoder"  # the decoder refused it, crashed, or exceeded its memory or time
    BYTES = "bytes"  # the file is larger than the slab
    UNREADABLE = "unreadable"  # no permission, or an I/O error
    NOT_REGULAR = "not-regular"  # a link, FIFO, socket or device
    STAGE = "stage"  # a stage raised an error on it
    MEMORY = "memory"  # out of GPU memory, even alone
    TIMEOUT = "timeout"  # its worker took too long and was killed
    POISON = "poison"  # its worker died on it, alone, more than once
    RULE = "rule"  # the user's binning rule raised an error on it
    CONTAINER = "container"  # an archive, document or video that cannot be unpacked, or not all of it
    UNPACKED = "unpacked"  # what was in it are images of their own: no failure


class ImageError(Exception):
    """One image cannot be processed. The other images of its batch are not affected.

    transient: whether another try may succeed.
    """

    def __init__(self, reason: Reason, detail: str, *, transient: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.transient = transient


class OutOfMemory(Exception):
    """The device does not have enough memory for this batch; half of it may fit."""


class DeviceLost(Exception):
    """The device's context cannot be used any more: every CUDA error except out-of-memory is sticky.
    The process must exit."""


class StageUnusable(ValueError):
    """A stage cannot be built from its weights and options, and another try would not help.
    The message explains the cause to the user."""


# A stage's answer for an image, of the type in its descriptor. Boxes are pixels of the upright image (EXIF
# applied), x to the right, y down. A result is encoded to JSON once, in the worker; the ledger and the
# sidecar get those bytes.
Result = msgspec.Struct


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a model is, so that an answer can be traced to it. Empty where it is not known."""

    name: str = ""  # as it is typed for `visiond models pull`; without weights, the backend's
    repository: str = ""  # of the model hub
    commit: str = ""  # from which it was pulled, in full
    license: str = ""
    backend: str = ""
    dtype: str = ""  # as in StageSpec
    options: dict[str, Any] = {}
    visiond: str = ""  # the version that ran it

    @property
    def title(self) -> str:
        """What people call it: its name, and the start of the commit."""
        return f"{self.name}@{self.commit[:12]}" if self.commit else self.name

    def describe(self) -> str:
        """In one line."""
        options = (f"{name} = {msgspec.json.encode(value).decode()}" for name, value in self.options.items())
        version = f"visiond {self.visiond}" if self.visiond else ""
        known = ", ".join(filter(None, (self.license, self.dtype, *options, version)))
        return f"{self.title} ({known})" if known else self.title


class StageSpec(msgspec.Struct, frozen=True):
    """A stage as configured and resolved by the daemon: everything that a worker needs to build it."""

    name: str  # as in its descriptor
    backend: str  # one of those in its descriptor
    files: dict[str, str] = {}  # role → path of a verified file or folder; {} for fake backends
    fingerprint: str = ""  # changes whenever the answers may change
    # "float32", "bfloat16" or "float16"; or of smaller weights, "int8", "float8" or "int4": then the rest is bfloat16
    dtype: str = "float32"
    batch_size: int = 16  # most images of one forward pass
    options: dict[str, Any] = {}  # the backend's own settings
    provenance: Provenance = Provenance()
    notice: str = ""  # about its weights, to be shown with its answers
    # Torch devices over which the model's layers are spread, the worker's own first; empty: all of it is there.
    spread: list[str] = []
    workers: int = 1  # that share the memory of its device, with its own
    single: bool = False  # images mostly come one at a time: work on a single one is recorded

    @property
    def paths(self) -> dict[str, Path]:
        """The files, as paths."""
        return {role: Path(file) for role, file in self.files.items()}


@dataclass(slots=True)
class Image:
    """One image inside a worker.

    pixels: uint8 tensor [3, height, width], RGB, upright, on the worker's device; None if no stage of the
        worker needs pixels.
    results: of earlier stages, by stage name.
    unfamiliar: whether a pack's classifier calls it so, and the file of that classifier: stages of one pack ask
        the same one.
    """

    data: memoryview
    width: int
    height: int
    pixels: torch.Tensor | None = None
    results: dict[str, Result] = field(default_factory=dict)
    unfamiliar: tuple[str, bool] | None = None


class Stage(ABC):
    """A model. It is built and loaded once in a worker, and then called by several threads."""

    reads_pixels: bool = True

    def __init__(self, spec: StageSpec, device: str) -> None:
        """device: a torch device string ("cpu", "cuda:0"), or anything at all for fake stages. Images are on it,
        and so is the model, or its first layers if the spec spreads it."""
        self.spec = spec
        self.name = spec.name
        self.device = device
        self.lock = threading.Lock()  # held by the part that runs on the device

    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        """Launch each Triton kernel that the stage has with this spec once, on tiny tensors on the CPU.

        No kernel runs: the launches are noted, and what they need is compiled before there is work
        (stages/kernels/variants.py). They must not depend on the batch size, which may be another at the next
        start. By default a stage has no kernels.
        """
        return

    @abstractmethod
    def load(self) -> None:
        """Put the model on the device and run it once, so that it is warm for the first batch."""

    @abstractmethod
    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        """One answer for each image, in order. Images may differ in size;
        the other images of a batch never change an answer.

        Raises OutOfMemory if the batch does not fit, and DeviceLost if the device cannot be used any more.
        Any other error is blamed on one image, which the caller finds by halving the batch.
        """


class Header(msgspec.Struct, frozen=True):
    """The content of an image file's header. Width and height are of the upright image."""

    format: str  # Pillow's name: "JPEG", "PNG", "WEBP", …
    width: int
    height: int
    orientation: int  # EXIF orientation 1..8
    pages: int = 1  # pictures in the file; only one is read: see stages/images/pages.py
    is_deep: bool = False  # more than 8 bits, a layout that Pillow does not know, or a JPEG with rows of zeros: not for a GPU


class Limits(msgspec.Struct, frozen=True):
    """The limits of an image. The defaults also limit the cost of every stage's preprocessing."""

    max_pixels: int = 100_000_000
    max_aspect_ratio: float = 50.0
    decode_seconds: float = 20.0  # CPU time of the disposable decoder for one image
    decode_bytes: int = 2 << 30  # its address space


def advise(settings: str) -> str:
    """How to allow an image that a limit has refused."""
    return f"To allow it, set {settings} under [pipeline] in daemon.toml"
