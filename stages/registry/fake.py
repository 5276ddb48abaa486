"""Fake stages without a model: deterministic answers in a few microseconds each, and faults on request.
No torch, unless one is to read pixels, which are then decoded as for a model."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import TextIO

from stages.contract.base import (
    DeviceLost,
    Image,
    ImageError,
    OutOfMemory,
    Reason,
    Result,
    Stage,
    StageSpec,
    StageUnusable,
)
from stages.contract.invented import VARIANTS, invent
from stages.contract.options import FakeOptions, Fault, read_options
from stages.registry.registry import find_stage

DIGESTED_BYTES = 4096  # of an image, so that large files take no longer than small ones
FAKE_CONTEXT = 1 << 30  # bytes of what a fake stage takes when it is loaded
NONE: frozenset[str] = frozenset()


class FakeStage(Stage):
    """A fake of any stage of the registry."""

    def __init__(self, spec: StageSpec, device: str) -> None:
        super().__init__(spec, device)
        self.options = read_options(spec, FakeOptions)
        self.reads_pixels = self.options.reads_pixels
        self.faults = {marker.encode(): fault for marker, fault in self.options.fail.items()}
        self._uses = find_stage(spec.name).uses

    def load(self) -> None:
        if self.options.unusable:
            raise StageUnusable(self.options.unusable)
        time.sleep(self.options.load_seconds)
        if self.options.memory_folder:
            FakeMemory(self.options).take(self.options.load_bytes)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        with FakeMemory(self.options).hold(len(images) * self.options.image_bytes):
            return self._run(images)

    def _run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        errors = (
            [self._strike(image, len(images)) for image in images] if self.faults else [None] * len(images)
        )
        seconds = ceil(len(images) / self.spec.batch_size) * self.options.latency_seconds
        seconds += len(images) * self.options.latency_per_image_seconds
        if seconds > 0:
            with self.lock, self._device():
                time.sleep(seconds)
        return [error or self._answer(image) for image, error in zip(images, errors, strict=True)]

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """Waits until no other worker uses the fake device."""
        if not self.options.device_file:
            yield
            return
        with open(self.options.device_file, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self.options.switch_seconds:
                self._switch(file)
            yield

    def _switch(self, file: TextIO) -> None:
        """Lose time if another process had the device. The file has the pid of the last one."""
        file.seek(0)
        own = str(os.getpid())
        if file.read() != own:
            time.sleep(self.options.switch_seconds)
            file.truncate(0)
            file.write(own)
            file.flush()

    def _answer(self, image: Image) -> Result:
        earlier = frozenset(name for name in self._uses if name in image.results) if self._uses else NONE
        variant = (variant_of(image) + self.options.salt) % VARIANTS
        return answer(self.name, variant, image.width, image.height, earlier)

    def _strike(self, image: Image, batch: int) -> ImageError | None:
        data = bytes(image.data)
        for marker, fault in self.faults.items():
            if marker in data and (fault != "oom" or batch > self.options.oom_above):
                return commit_fault(fault)
        return None


class FakeMemory:
    """The memory of a fake GPU: a folder with a file for each process, which has the number of bytes that the
    process uses. A file with another name is a neighbor's, and a file of a process that has ended does not count.
    """

    _own: dict[str, int] = {}  # bytes that this process uses, by folder
    _peak = 0
    _lock = threading.Lock()

    def __init__(self, options: FakeOptions) -> None:
        self.folder, self.total = options.memory_folder, options.memory_bytes

    def take(self, count: int) -> None:
        """Raises OutOfMemory."""
        with self._lock, open(os.path.join(self.folder, ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if count > 0 and count_used(self.folder) + count > self.total:
                raise OutOfMemory("the fake GPU is full")
            own = self._own[self.folder] = self._own.get(self.folder, 0) + count
            FakeMemory._peak = max(self._peak, own)
            partial = Path(self.folder, f".{os.getpid()}")
            partial.write_text(str(own))
            partial.rename(Path(self.folder, str(os.getpid())))

    @classmethod
    def report(cls) -> tuple[int, int, int]:
        """Bytes that this process has, the most that it had, and again those that it has, as it keeps no others. As with torch,
        its context is not counted."""
        own = max(0, sum(cls._own.values()) - FAKE_CONTEXT)
        return own, max(0, cls._peak - FAKE_CONTEXT), own

    @contextlib.contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Raises OutOfMemory."""
        if not self.folder:
            yield
            return
        self.take(count)
        try:
            yield
        finally:
            self.take(-count)


def count_used(folder: str) -> int:
    """Bytes of a fake GPU's memory that are in use."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    alive = [name for name in names if not name.isdigit() or os.path.exists(f"/proc/{name}")]
    used = 0
    for name in alive:
        with contextlib.suppress(FileNotFoundError):  # it has just given all of it back
            used += int(Path(folder, name).read_text())
    return used


def commit_fault(fault: Fault) -> ImageError:
    """Cause a fault, or return it if it is one image's answer."""
    match fault:
        case "raise":
            raise ValueError("a requested fault")
        case "oom":
            raise OutOfMemory("a requested fault")
        case "lost":
            raise DeviceLost("a requested fault")
        case "segfault":
            signal.raise_signal(signal.SIGSEGV)  # sent to this thread, so that it stops here
        case "exit":
            os._exit(3)
        case "hang":
            while True:  # PyDLL keeps the interpreter lock, so no other thread runs either
                ctypes.PyDLL(None).sleep(3600)
    return ImageError(Reason.STAGE, "a requested fault", transient=fault == "transient")


def answer(stage: str, variant: int, width: int, height: int, earlier: frozenset[str]) -> Result:
    """The answer of a fake stage. variant: a number below VARIANTS.
    earlier: the stages that it may use and that have run."""
    described = find_stage(stage)
    if described.fake:
        return described.fake(variant, width, height, earlier)
    return invent(described.result, variant, width, height, earlier)


def variant_of(image: Image) -> int:
    return zlib.crc32(image.data[:DIGESTED_BYTES]) % VARIANTS
