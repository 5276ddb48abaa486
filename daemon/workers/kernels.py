"""The daemon's side of compiling kernels: what is missing, and the process (compiler.py) that compiles it.

While it runs, it holds the lock of the folder of kernels, and workers wait for that lock before they use a
kernel (stages/images/devices.py). So each kernel is compiled once for a host, while the workers import their
libraries. If the process dies, the lock is free, and the workers compile what they need.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import structlog
from anyio import to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from daemon.config.state import closed_to_others
from daemon.core.hints import command
from daemon.layout.layout import Layout
from daemon.layout.placement import Segment
from daemon.system.children import end
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from daemon.system.log import print_line
from daemon.system.printed import Printed
from daemon.workers.compiler import CompileProgress, CompileRequest, Want
from stages.contract import processes
from stages.contract.base import StageSpec
from stages.kernels.cache import can_compile_for, mark_of, try_lock

log = structlog.get_logger()

COMMAND = processes.python("-m", "daemon.workers.compiler")
PROCESS_BYTES = 840 << 20  # of memory for each process: finding variants takes that, compiling 200 MiB
MOST_PROCESSES = 32  # of about 80 kernels the slowest takes as long as two others
LONGEST_LINE = 4096  # bytes, of a step
POLL_SECONDS = 0.1
STUCK_SECONDS = 120.0  # without a step, after which the process is ended
# No process may open a context on a GPU: that takes seconds, and hundreds of megabytes of its memory.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def list_wants(
    segments: Sequence[Segment], specs: Mapping[str, StageSpec], gpus: Sequence[Gpu]
) -> list[Want]:
    """The stages that may have kernels, each with the compute capabilities of the GPUs that it runs on. In a group
    only the first GPU runs kernels."""
    capabilities = {gpu.device: gpu.compute_capability for gpu in gpus}
    pairs = {
        (stage, capabilities[device])
        for segment in segments
        for stage in segment.stages
        for device in segment.first_devices
        if device in capabilities
    }
    return [
        Want(specs[stage], capability)
        for stage, capability in sorted(pairs)
        if specs[stage].backend != "fake" and can_compile_for(capability)
    ]


def wants_of(layouts: Iterable[Layout]) -> list[Want]:
    return [want for each in layouts for want in list_wants(each.placement.segments, each.specs, each.gpus)]


def list_missing(folder: Path, wants: Sequence[Want]) -> list[Want]:
    """Those that have not been compiled into the folder."""
    # A folder that may not be entered has none of them.
    return [want for want in wants if not os.access(mark_of(folder, want.spec, want.capability), os.F_OK)]


async def compile_for_workers(
    folder: Path,
    wants: Sequence[Want],
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Compile what is missing, and log how it went. Workers that are started once this has started wait for it."""
    missing = await to_thread.run_sync(list_missing, folder, wants)
    if not missing:
        task_status.started()
        return
    began, last, problem = time.monotonic(), CompileProgress(0, 0), ""
    async with contextlib.AsyncExitStack() as stack:
        steps = None
        try:
            printed = Printed("kernels")
            with os.fdopen(await printed.open(), "wb") as file:
                stack.callback(printed.close)
                steps = await stack.enter_async_context(compiling(folder, missing, output=file.fileno()))
        except OSError as error:  # a read-only or full disk, too few processes
            problem = f"{error.filename or folder}: {error.strerror}"
        task_status.started()
        if steps:
            log.info("compiling kernels", stages=sorted({want.spec.name for want in missing}))
            async for last in steps:
                problem = last.problem or problem
    if problem:
        log.warning(
            "not all kernels were compiled before the workers needed them",
            cause=problem,
            compiled=last.done,
            of=last.known,
            fix=command("warm"),
        )
    elif steps:
        log.info("kernels compiled", kernels=last.done, seconds=round(time.monotonic() - began, 1))


@contextlib.asynccontextmanager
async def compiling(
    folder: Path, wants: Sequence[Want], *, patient: bool = False, output: int | None = None
) -> AsyncIterator[AsyncIterator[CompileProgress] | None]:
    """Within the context, a process compiles kernels into a folder; yields its steps.

    If another one is doing that already: yields None, or waits for its end if `patient`. output: a descriptor
    for what the process prints. Raises OSError.
    """
    waited = False
    _make(folder)
    while (lock := try_lock(folder)) is None:
        if not patient:
            yield None
            return
        if not waited:
            waited = True
            print_line(f"Another visiond is compiling kernels into {folder}; waiting for it.")
        await anyio.sleep(POLL_SECONDS)
    try:
        process = await _start(folder, wants, lock, output)
    finally:
        os.close(lock)  # the process has it
    try:
        yield _steps(process)
    finally:
        await end(process)
        assert process.stdout
        await process.stdout.aclose()


def _make(folder: Path) -> None:
    with closed_to_others():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)


async def _start(folder: Path, wants: Sequence[Want], lock: int, output: int | None) -> anyio.abc.Process:
    host = Host.here()
    processes_at_once = max(1, min(host.cores, MOST_PROCESSES, host.free_bytes // PROCESS_BYTES))
    with tempfile.TemporaryFile() as order:
        order.write(msgspec.msgpack.encode(CompileRequest(str(folder), list(wants), processes_at_once)))
        order.seek(0)
        return await anyio.open_process(
            [*COMMAND, str(os.getpid())],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=output,
            env=processes.environment(ENVIRONMENT | {"TRITON_CACHE_DIR": str(folder)}),
            pass_fds=(lock,),
        )


async def _steps(process: anyio.abc.Process) -> AsyncIterator[CompileProgress]:
    """The last step has a problem if the process did not end well."""
    assert process.stdout
    lines = BufferedByteReceiveStream(process.stdout)
    step = CompileProgress(0, 0)
    with contextlib.suppress(anyio.IncompleteRead):
        while True:
            with anyio.move_on_after(STUCK_SECONDS) as waiting:
                line = await lines.receive_until(b"\n", LONGEST_LINE)
            if waiting.cancelled_caught:
                problem = f"the process that compiles the kernels has not gone on for {STUCK_SECONDS:g} s"
                yield msgspec.structs.replace(step, problem=problem)
                return
            step = msgspec.json.decode(line, type=CompileProgress)
            yield step
    if status := await process.wait():
        how = processes.describe_end(status, "was killed by", "ended with status")
        yield msgspec.structs.replace(step, problem=f"the process that compiles the kernels {how}")
