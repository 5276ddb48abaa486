"""Builds each stage of a configuration and tries it on test images,
for `visiond check` and `visiond models make`.

This happens in a child process (daemon/workers/tryout.py), so that this one needs no torch,
and a crash is one more finding.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import msgspec

from daemon.layout.layout import Layout
from daemon.placement.placement import Segment
from daemon.workers.tryout import IMAGES, TrialRequest, Tryout, note
from stages.contract import processes

COMMAND = processes.python("-m", "daemon.workers.tryout")
CHUNK = 1 << 16
DEATH_SECONDS = 10.0


def try_stages(layout: Layout) -> Iterator[Tryout]:
    """Try every stage in turn, on the first device that holds it."""
    known: list[dict[str, bytes]] = [{} for _ in range(IMAGES)]
    for segment in layout.placement.segments:
        stages = list(segment.stages)
        while stages:  # after a stage that ended its process, a new one tries the others
            for tryout in _try_segment(layout, Segment(tuple(stages), segment.devices), known):
                stages.remove(tryout.stage)
                note(tryout, known)
                yield tryout


def _try_segment(layout: Layout, segment: Segment, known: list[dict[str, bytes]]) -> Iterator[Tryout]:
    """Try these stages in one child. If the child dies, the last tryout is of the stage that it died of."""
    setup, environment = layout.set_up(segment, 0, 0)
    settings = layout.config.pipeline
    patience = settings.load_timeout_seconds + settings.batch_timeout_seconds
    waiting, device = list(segment.stages), segment.devices[0]
    with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryFile() as log:
        try:
            child = _start(TrialRequest(setup, known), environment | {"TRITON_CACHE_DIR": kernels}, log)
        except OSError as error:
            yield Tryout(
                waiting[0], device, problem=f"no process can be started to try it: {error.strerror}."
            )
            return
        try:
            for line in _lines(child, patience):
                tryout = msgspec.json.decode(line, type=Tryout)
                waiting.remove(tryout.stage)
                yield msgspec.structs.replace(tryout, device=device)
            if waiting:
                yield Tryout(waiting[0], device, problem=_describe_end(child, log))
        except (TimeoutError, subprocess.TimeoutExpired):
            if waiting:
                yield Tryout(
                    waiting[0], device, problem=f"building and trying it took longer than {patience:g} s."
                )
        finally:
            child.kill()
            # A child that hangs in the kernel, as on a broken GPU, cannot be reaped.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(DEATH_SECONDS)
            assert child.stdout
            child.stdout.close()


def _start(order: TrialRequest, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:  # a pipe is full after 64 KiB, and nobody reads yet
        file.write(msgspec.msgpack.encode(order))
        file.seek(0)
        return subprocess.Popen(
            [*COMMAND, str(os.getpid())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=log,
            env=processes.environment(environment),
        )


def _lines(child: subprocess.Popen[bytes], patience_seconds: float) -> Iterator[bytes]:
    """The child's lines, until it ends. Raises TimeoutError when one takes longer than patience_seconds."""
    assert child.stdout
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        rest, deadline = b"", time.monotonic() + patience_seconds
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            data = os.read(child.stdout.fileno(), CHUNK)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                yield from lines
                deadline = time.monotonic() + patience_seconds


def _describe_end(child: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    status = child.wait(DEATH_SECONDS)
    how = processes.describe_end(status, "was killed by", "ended with status")
    log.seek(0)
    printed = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    last = f": {printed[-1].strip()}" if printed and status >= 0 else ""
    return f"its test process {how}{last}."
