"""Loads OCR's two networks: with our own kernels in half precision on a GPU, otherwise with torch.

The daemon compiles the kernels before its workers need them (daemon/workers/compiler.py). Where
nobody has done so, one process takes most of a minute for it: the plain networks run until a
background thread has compiled them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stages.contract.base import DeviceLost, OutOfMemory, StageSpec
from stages.images.devices import (
    device_errors,
    dtype_of,
    has_kernels,
    run_in_background,
    synchronize,
    warn_unfused,
)
from stages.kernels.cache import mark_of
from stages.ocr.direction import reads_right_to_left
from stages.ocr.generic import GenericDetector, GenericRecognizer
from stages.ocr.loading import load_networks
from stages.ocr.ppocr import Detector, Recognizer, group_depthwise

if TYPE_CHECKING:
    from stages.ocr.fused import FusedDetector, FusedRecognizer


Network = TypeVar("Network", bound=torch.nn.Module)

RETRY_SECONDS = 60.0  # after the GPU was out of memory


@dataclass(frozen=True, slots=True)
class Networks:
    detector: Detector | FusedDetector | GenericDetector
    recognizer: Recognizer | FusedRecognizer | GenericRecognizer
    characters: Sequence[str]  # of the recognizer's classes
    leftwards: bool = False  # whether some of them are of a right-to-left script


class NetworkLoader:
    """Loads the plain networks, and replaces them by the fused ones when those are compiled."""

    def __init__(
        self, spec: StageSpec, files: Mapping[str, str], device: str, try_out: Callable[[Networks], object]
    ) -> None:
        """files: as of load_networks. try_out: runs networks once, with all their kernels."""
        self.spec, self.files, self.device, self.try_out = spec, files, torch.device(device), try_out
        self.dtype = dtype_of(spec)
        self._lock = threading.Lock()
        self._fusing: Future[Networks] | None = None
        self._retry_at = 0.0

    def load(self) -> None:
        """Raises OutOfMemory, DeviceLost."""
        self._want_fused = self._can_fuse()
        fused = None
        if self._want_fused and self._is_compiled():
            fused = self._take(run_in_background(self._load_fused))
        self._networks = fused or self._load_plain()

    def latest(self) -> Networks:
        """The best networks so far. Raises DeviceLost.

        Compiling begins with the first call, because then all stages have loaded: some
        record CUDA graphs while they load, and nothing else may wait for the whole device at that time.
        """
        with self._lock:
            if self._fusing and self._fusing.done():
                fusing, self._fusing = self._fusing, None
                self._networks = self._take(fusing) or self._networks
            elif self._want_fused and not self._fusing and time.monotonic() >= self._retry_at:
                self._fusing = run_in_background(self._load_fused)
            return self._networks

    def _take(self, fusing: Future[Networks]) -> Networks | None:
        """Wait for the fused networks; None if they cannot be used, or not yet. Raises DeviceLost."""
        try:
            networks = fusing.result()
        except OutOfMemory:  # others use the memory now; what has been compiled is kept
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return None
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - a kernel does not run here; the plain networks do
            self._want_fused = False
            warn_unfused(error)
            return None
        self._want_fused = False
        return networks

    def _can_fuse(self) -> bool:
        return self.device.type == "cuda" and self.dtype == torch.float16 and has_kernels(self.device)

    def _is_compiled(self) -> bool:
        return os.access(self._find_mark(), os.F_OK)

    def _find_mark(self) -> Path:
        from triton import knobs  # type: ignore[import-untyped]

        major, minor = torch.cuda.get_device_capability(self.device)
        return mark_of(Path(knobs.cache.dir), self.spec, f"{major}.{minor}")

    def _load_fused(self) -> Networks:
        """Those networks that the kernels know are fused, and the others are plain."""
        from stages.ocr.fused import FusedDetector, FusedRecognizer, is_known

        def fuse(network: Any) -> Any:
            if isinstance(network, Detector) and is_known(network):
                return FusedDetector(network.to(self.device))
            if isinstance(network, Recognizer) and is_known(network):
                return FusedRecognizer(network.to(self.device))
            return self._place(network)

        networks = self._load(fuse)
        with suppress(OSError):  # then the next start compiles again
            self._find_mark().touch()
        return networks

    def _load_plain(self) -> Networks:
        if self.device.type != "cpu" and self.dtype == torch.float32:
            torch.backends.cudnn.allow_tf32 = False  # TF32 keeps 10 of the 23 bits of a float32's mantissa
        return self._load(self._place)

    def _load(self, place: Callable[[Any], Any]) -> Networks:
        """place: puts a network on the device."""
        detector, recognizer, characters = load_networks(self.files)
        with torch.inference_mode(), device_errors():
            networks = Networks(
                place(detector), place(recognizer), characters, reads_right_to_left(characters)
            )
            self.try_out(networks)
            synchronize(str(self.device))
        return networks

    def _place(self, network: Network) -> Network:
        """A plain network on the device, in the stage's precision."""
        if self.device.type != "cpu" and self.dtype != torch.float32 and isinstance(network, Detector):
            group_depthwise(network)
        return network.to(self.device, self.dtype).to(memory_format=torch.channels_last)
