"""How far scans came that were stopped, in a file of the state folder: a bucket with ten million objects is listed for
a quarter of an hour. The file is a hint: without it a scan begins again, and every scan that went on from a marker is
followed by a complete one."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path

SAVE_SECONDS = 5.0  # between two writes


class Markers:
    """By the inbox's root, the last path that was admitted. Any thread may use it."""

    def __init__(self, file: Path | None = None) -> None:
        """file: None keeps nothing."""
        self._file = file
        self._markers = _read(file) if file else {}
        self._saved_at = time.monotonic()
        self._writing = threading.Lock()  # each inbox has threads of its own

    def of(self, root: bytes) -> bytes:
        return os.fsencode(self._markers.get(os.fsdecode(root), ""))

    def note(self, root: bytes, marker: bytes) -> None:
        """marker: empty if the scan has come to its end."""
        name = os.fsdecode(root)
        with self._writing:
            if not marker and name not in self._markers:
                return
            self._markers[name] = os.fsdecode(marker)
            if not marker:
                del self._markers[name]
            if self._file and (not marker or time.monotonic() > self._saved_at + SAVE_SECONDS):
                self._saved_at = time.monotonic()
                partial = self._file.with_suffix(".partial")
                with contextlib.suppress(OSError):  # the next may succeed
                    partial.write_text(json.dumps(self._markers, indent=1))
                    partial.replace(self._file)


def _read(file: Path) -> dict[str, str]:
    """Empty if the file is missing or was torn by a crash."""
    try:
        markers = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(markers, dict) and all(isinstance(marker, str) for marker in markers.values())
    return markers if is_whole else {}
