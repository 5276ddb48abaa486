"""Stand-ins without a model: deterministic answers at a few microseconds each, and faults to order. No torch."""

from __future__ import annotations

import base64
import ctypes
import os
import signal
import struct
import time
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from stages.base import (
    Caption,
    Clip,
    Detection,
    DeviceLost,
    Embedding,
    Image,
    ImageError,
    Line,
    Objects,
    Ocr,
    OutOfMemory,
    Reason,
    Result,
    Stage,
    StageSpec,
    StageUnusable,
    Tag,
)
from stages.options import FakeOptions, Fault, read_options

VARIANTS = 64  # answers that differ, of each stage
DIGESTED_BYTES = 4096  # of an image, so that large files cost no more than small ones
LABELS = ("cat", "dog", "car", "tree", "cup", "sign", "book")


class FakeStage(Stage):
    reads_pixels = False

    def __init__(self, spec: StageSpec, device: str) -> None:
        super().__init__(spec, device)
        self.options = read_options(spec, FakeOptions)
        self.faults = {marker.encode(): fault for marker, fault in self.options.fail.items()}

    def load(self) -> None:
        if self.options.unusable:
            raise StageUnusable(self.options.unusable)
        time.sleep(self.options.load_seconds)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        errors = [self._strike(image, len(images)) for image in images] if self.faults else [None] * len(images)
        seconds = ceil(len(images) / self.spec.batch_size) * self.options.latency_seconds
        seconds += len(images) * self.options.latency_per_image_seconds
        if seconds > 0:
            with self.lock:
                time.sleep(seconds)
        return [error or self._answer(image) for image, error in zip(images, errors, strict=True)]

    @abstractmethod
    def _answer(self, image: Image) -> Result: ...

    def _strike(self, image: Image, batch: int) -> ImageError | None:
        data = bytes(image.data)
        for marker, fault in self.faults.items():
            if marker in data and (fault != "oom" or batch > self.options.oom_above):
                return commit_fault(fault)
        return None


def commit_fault(fault: Fault) -> ImageError:
    """Do what a fault says, or return it where it is one image's answer."""
    match fault:
        case "raise":
            raise ValueError("a fault made to order")
        case "oom":
            raise OutOfMemory("a fault made to order")
        case "lost":
            raise DeviceLost("a fault made to order")
        case "segfault":
            signal.raise_signal(signal.SIGSEGV)  # at this thread, so that it goes no further
        case "exit":
            os._exit(3)
        case "hang":
            while True:  # PyDLL keeps the interpreter lock, so no other thread runs either
                ctypes.PyDLL(None).sleep(3600)
    return ImageError(Reason.STAGE, "a fault made to order", transient=fault == "transient")


def variant_of(image: Image) -> int:
    return zlib.crc32(image.data[:DIGESTED_BYTES]) % VARIANTS


@lru_cache(maxsize=4096)
def ocr_answer(variant: int, width: int, height: int) -> Ocr:
    """0 to 4 lines, each a twentieth of the image high and half of it wide."""
    lines = [
        Line(
            f"line {variant}.{row}",
            0.9,
            (
                (0.1 * width, top * height),
                (0.6 * width, top * height),
                (0.6 * width, (top + 0.05) * height),
                (0.1 * width, (top + 0.05) * height),
            ),
        )
        for row, top in enumerate((0.1, 0.2, 0.3, 0.4)[: variant % 5])
    ]
    return Ocr(lines, len(lines), 0.025 * len(lines))


@lru_cache(maxsize=4096)
def yolo_answer(variant: int, width: int, height: int) -> Objects:
    """0 to 6 objects along the image's diagonal, each a tenth of it wide and high."""
    count = variant % 7
    corners = [0.12 * index for index in range(count)]
    detections = [
        Detection(
            LABELS[(variant + index) % (1 + variant % len(LABELS))],
            0.9 - 0.1 * index,
            (corner * width, corner * height, (corner + 0.1) * width, (corner + 0.1) * height),
        )
        for index, corner in enumerate(corners)
    ]
    unique = len({detection.label for detection in detections})
    return Objects(detections, count, unique, (corners[-1] if corners else 0.0) ** 2)


@lru_cache(maxsize=VARIANTS)
def clip_answer(variant: int) -> Clip:
    """A unit vector of 16 values, 15 of them zero."""
    values = [float(index == variant % 16) for index in range(16)]
    embedding = Embedding(16, "float16", base64.b64encode(struct.pack("<16e", *values)).decode())
    return Clip(embedding, [Tag(LABELS[variant % len(LABELS)], 0.75), Tag(LABELS[(variant + 1) % len(LABELS)], 0.25)])


@lru_cache(maxsize=2 * VARIANTS)
def blip_answer(variant: int, similar: bool) -> Caption:
    return Caption(f"a picture of {variant} things", variant / VARIANTS if similar else None)


class FakeOcr(FakeStage):
    name = "ocr"

    def _answer(self, image: Image) -> Result:
        return ocr_answer(variant_of(image), image.width, image.height)


class FakeYolo(FakeStage):
    name = "yolo"

    def _answer(self, image: Image) -> Result:
        return yolo_answer(variant_of(image), image.width, image.height)


class FakeClip(FakeStage):
    name = "clip"

    def _answer(self, image: Image) -> Result:
        return clip_answer(variant_of(image))


class FakeBlip(FakeStage):
    name = "blip"

    def _answer(self, image: Image) -> Result:
        return blip_answer(variant_of(image), "clip" in image.results)
