"""The daemon that is measured: a process of its own, as users start it, that lives as long as the measurement."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from daemon.config.loading import Config
from daemon.config.state import CONTROL
from daemon.config.variables import without_settings
from daemon.core.errors import NotRunning, VisiondError
from daemon.monitoring.snapshot import Snapshot
from daemon.server.control import fetch, find_snapshot
from stages.contract.processes import environment, python

POLL_SECONDS = 0.1
STOP_SECONDS = 60.0
Say = Callable[[str], object]


class Failed(VisiondError):
    """The daemon does not work as configured; the message is the reason."""


class Throwaway:
    """A daemon, as a context. It is in a session of its own, so that Ctrl-C reaches only this process, and it stops when
    this one dies."""

    def __init__(
        self, config: Config, file: Path, *options: str, log: Path | None = None, say: Say = lambda _: None
    ) -> None:
        """file: the configuration; options: of `visiond run`; log: None for this process's stderr."""
        self.config = config
        self.tensor_bytes = 0  # of the largest worker, at its peak
        self._command = python("-m", "daemon", "run", "--config", str(file), *options)
        self._log = log
        self._say = say
        self._expected = 0

    def __enter__(self) -> Throwaway:
        out: IO[bytes] | int = self._log.open("wb") if self._log else subprocess.DEVNULL
        self.process = subprocess.Popen(
            python("-m", "stages.contract.processes", str(os.getpid()), *self._command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out if self._log else None,
            env=without_settings(environment()),
            start_new_session=True,
        )
        if not isinstance(out, int):
            out.close()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Otherwise one that is interrupted would say on our stderr how to process the rest, which nobody wants.
        stop = signal.SIGKILL if kind is KeyboardInterrupt and not self._log else signal.SIGTERM
        self.process.send_signal(stop)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait_until_done(self) -> None:
        """With the option --once. Raises VisiondError if it does not succeed."""
        if status := self.process.wait():
            raise VisiondError(f"`visiond run --once` ended with status {status}; its messages are above.")

    def wait_until_ready(self) -> None:
        """Until all workers have loaded their models. Raises Failed."""
        deadline = time.monotonic() + self.config.pipeline.load_timeout_seconds
        while True:
            snapshot = self._look()
            if snapshot and snapshot.workers and all(w.state == "ready" for w in snapshot.workers):
                return
            if time.monotonic() > deadline:
                raise Failed("not all workers were ready within [pipeline] load_timeout_seconds")
            self._say(snapshot.loading_sentence() if snapshot and snapshot.workers else "starting")
            time.sleep(POLL_SECONDS)

    def wait_for_images(self, count: int) -> None:
        """Until this number of further images is finished. Raises Failed."""
        before, self._expected = self._expected, self._expected + count
        patience = self.config.pipeline.batch_timeout_seconds + self.config.pipeline.load_timeout_seconds
        last, changed_at = -1, time.monotonic()
        while True:
            snapshot = self._look()
            ended = snapshot.ended_in_this_run if snapshot else 0
            if snapshot and ended >= self._expected and not snapshot.in_flight:
                break
            if ended != last:
                last, changed_at = ended, time.monotonic()
            if time.monotonic() > changed_at + patience:
                raise Failed(f"no image was finished in {patience:g} s")
            self._say(f"{max(0, ended - before):,} of {count:,} images")
            time.sleep(POLL_SECONDS)
        if self._read_metric("visiond_out_of_memory_total"):
            raise Failed("a batch did not fit into the GPU's memory")

    def _look(self) -> Snapshot | None:
        """Raises Failed if the daemon has ended or a worker was lost."""
        if self.process.poll() is not None:
            raise Failed(self._last_words())
        snapshot = find_snapshot(self.config)
        if snapshot:
            if cause := next((worker.cause for worker in snapshot.workers if worker.cause), ""):
                raise Failed(f"a worker was lost: {cause}")
            peaks = [worker.gpu_peak_bytes for worker in snapshot.workers]
            self.tensor_bytes = max([self.tensor_bytes, *peaks])
        return snapshot

    def _read_metric(self, name: str) -> float:
        """The sum over its labels."""
        with contextlib.suppress(NotRunning):
            text = fetch(self.config.state.path / CONTROL, "GET", "/metrics").decode()
            families = text_string_to_metric_families(text)
            return sum(
                sample.value for family in families for sample in family.samples if sample.name == name
            )
        return 0.0

    def _last_words(self) -> str:
        """Why it has ended: the last line of its log that it wrote itself."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log else []
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return f"the daemon ended: {json.loads(line)['event']}"
        return f"the daemon ended with status {self.process.returncode}"
