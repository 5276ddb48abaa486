"""OCR's two networks on their device: in half precision on a GPU by kernels of our own, else by torch.

To compile the kernels takes most of a minute. Where that has not been done before, the plain networks read until a thread
of its own has seen to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stages.base import DeviceLost, OutOfMemory
from stages.devices import device_errors, has_kernels, run_apart, settle, tell_unfused
from stages.ocr.ppocr import Detector, Recognizer, group_depthwise, load_detector, load_recognizer

if TYPE_CHECKING:
    from stages.ocr.fused import FusedDetector, FusedRecognizer


REST_SECONDS = 60.0  # after a lack of memory


@dataclass(frozen=True, slots=True)
class Networks:
    detector: Detector | FusedDetector
    recognizer: Recognizer | FusedRecognizer
    characters: Sequence[str]  # by the recogniser's classes


class NetworkLoader:
    """Gives the best networks that there are by now."""

    def __init__(
        self, files: Mapping[str, str], device: str, dtype: torch.dtype, try_out: Callable[[Networks], object]
    ) -> None:
        """files: of "det" and "rec". try_out: runs networks once, through every kernel that they have."""
        self.files, self.device, self.dtype, self.try_out = files, torch.device(device), dtype, try_out
        self._lock = threading.Lock()
        self._fusing: Future[Networks] | None = None
        self._rest_until = 0.0

    def load(self) -> None:
        """Raises OutOfMemory, DeviceLost."""
        self._wants_fused = self._can_fuse()
        fused = self._take(run_apart(self._load_fused)) if self._wants_fused and self._is_compiled() else None
        self._networks = fused or self._load_plain()

    def latest(self) -> Networks:
        """Compiling begins with the first call, when all stages have loaded: some record CUDA graphs meanwhile, beside which
        nothing else may use the device. Raises DeviceLost."""
        with self._lock:
            if self._fusing and self._fusing.done():
                fusing, self._fusing = self._fusing, None
                self._networks = self._take(fusing) or self._networks
            elif self._wants_fused and not self._fusing and time.monotonic() >= self._rest_until:
                self._fusing = run_apart(self._load_fused)
            return self._networks

    def _take(self, fusing: Future[Networks]) -> Networks | None:
        """The networks by kernels, waited for; None if there are none, or none yet. Raises DeviceLost."""
        try:
            networks = fusing.result()
        except OutOfMemory:  # for now others have the room; what has been compiled stays so
            self._rest_until = time.monotonic() + REST_SECONDS
            return None
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - one of them will not run here: no reason to do without OCR
            self._wants_fused = False
            tell_unfused(error)
            return None
        self._wants_fused = False
        return networks

    def _can_fuse(self) -> bool:
        return self.device.type == "cuda" and self.dtype == torch.float16 and has_kernels(self.device)

    def _is_compiled(self) -> bool:
        from stages.ocr.fused import compiled_mark

        return compiled_mark(self.device).exists()

    def _load_fused(self) -> Networks:
        from stages.ocr.fused import FusedDetector, FusedRecognizer, compiled_mark

        detector, (recognizer, characters) = load_detector(self.files["det"]), load_recognizer(self.files["rec"])
        with torch.inference_mode(), device_errors():
            fused = FusedDetector(detector.to(self.device)), FusedRecognizer(recognizer.to(self.device))
            networks = Networks(*fused, characters)
            self.try_out(networks)
            settle(str(self.device))
        with suppress(OSError):  # then the next start compiles as the first did
            compiled_mark(self.device).touch()
        return networks

    def _load_plain(self) -> Networks:
        detector, (recognizer, characters) = load_detector(self.files["det"]), load_recognizer(self.files["rec"])
        if self.device.type != "cpu" and self.dtype != torch.float32:
            group_depthwise(detector)
        elif self.device.type != "cpu":
            torch.backends.cudnn.allow_tf32 = False  # TF32 keeps 10 bits of a float32's 23
        with torch.inference_mode(), device_errors():
            networks = Networks(
                detector.to(self.device, self.dtype).to(memory_format=torch.channels_last),
                recognizer.to(self.device, self.dtype).to(memory_format=torch.channels_last),
                characters,
            )
            self.try_out(networks)
            settle(str(self.device))
        return networks
