"""The worker process: bytes in, results out. It opens none of the user's files and knows nothing of the ledger.

A few threads each take one batch through the whole chain (chain.py). Each stage has a lock,
which makes this a pipeline: while one batch is in BLIP, the next is in OCR.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from daemon.core.errors import may_pass
from daemon.core.messages import (
    Batch,
    Beat,
    Farewell,
    FromWorker,
    Looked,
    Ready,
    Setup,
    ToWorker,
    decode_to_worker,
    frame,
    read_frame,
)
from daemon.system.cores import bind
from daemon.system.gpus import sleep_while_waiting
from daemon.workers.canary import Canary
from daemon.workers.chain import Chain
from stages.contract.base import PREPARED, DeviceLost, OutOfMemory, StageUnusable
from stages.contract.processes import die_with

BEAT_SECONDS = 1.0
NOTHING = Batch(0, [])
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Channel:
    """The worker's end of the socket to the daemon. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb", 1 << 16)
        self._lock = threading.Lock()

    def send(self, message: FromWorker) -> None:
        with self._lock:
            self._connection.sendall(frame(message))

    def receive(self) -> ToWorker:
        """The next message. Raises EOFError when the daemon is gone."""
        return decode_to_worker(read_frame(self._reader))


def main() -> None:
    """Entry of the child process: `python -m daemon.workers.child SOCKET_FD SLAB_FD PARENT_PID`."""
    connection, slab_fd, parent = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with(parent)
    keep_memory()
    for number in (signal.SIGINT, signal.SIGHUP):
        # A terminal sends them to the whole group, but only the daemon obeys.
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    channel = Channel(socket.socket(fileno=connection))
    setup = channel.receive()
    assert isinstance(setup, Setup)
    bind(setup.cores)  # before it allocates, and before libraries count the cores
    if setup.device.startswith("cuda"):
        sleep_while_waiting()
    slab = memoryview(mmap.mmap(slab_fd, setup.slab_bytes, prot=mmap.PROT_READ))
    chain = Chain(setup, slab)
    try:
        seconds = chain.load(channel.send)
    except StageUnusable as error:
        _leave(channel, str(error), curable=False, unusable=True)
    except Exception as error:  # noqa: BLE001 - it is reported to the daemon
        traceback.print_exc()
        full = isinstance(error, OutOfMemory) or "out of memory" in str(error)
        curable = full or is_curable(error)
        _leave(channel, f"{type(error).__name__}: {error}", curable=curable, out_of_memory=full)
    limit_threads()
    _serve(channel, chain, Ready(seconds))


def is_curable(error: Exception) -> bool:
    """Whether the next worker may load what this one could not: its device, or a disk, may be back by then."""
    return isinstance(error, DeviceLost) or may_pass(error)


def _serve(channel: Channel, chain: Chain, ready: Ready) -> None:
    """Hand batches to the threads, once each has rehearsed, until the daemon says stop or is gone."""
    threads = chain.setup.threads
    batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
    rehearsed = threading.Barrier(threads + 1)
    canary = Canary(chain)
    arguments = (channel, chain, canary, batches, rehearsed)
    team = [
        threading.Thread(target=_work, args=arguments, name=f"batch-{n}", daemon=True) for n in range(threads)
    ]
    for thread in team:
        thread.start()
    rehearsed.wait()
    channel.send(ready)
    threading.Thread(target=_beat, args=(channel, canary), name="beat", daemon=True).start()
    try:
        while isinstance(message := channel.receive(), Batch):
            batches.put(message)
    except (EOFError, OSError):
        os._exit(os.EX_UNAVAILABLE)  # the daemon is gone, so nobody needs the results
    for _ in team:
        batches.put(None)
    for thread in team:
        thread.join()
    # Shutting down the interpreter and CUDA takes seconds and gains nothing.
    os._exit(os.EX_OK)


def _work(
    channel: Channel,
    chain: Chain,
    canary: Canary,
    batches: queue.SimpleQueue[Batch | None],
    rehearsed: threading.Barrier,
) -> None:
    """The life of a thread. If it rehearses, the GPU's libraries have set up what they need for it before the first image,
    and a broken device has killed its worker before any of the user's images is suspected."""
    try:
        if chain.setup.rehearse:
            _look(channel, canary)
        rehearsed.wait()
        ended_at = time.monotonic()
        while (batch := _next(batches, canary)) is not None:
            rested = time.monotonic() - ended_at
            if batch.items:
                channel.send(reply := chain.run(batch))
                canary.note(reply)
            if canary.is_due(len(batch.items), rested):
                _look(channel, canary)
            ended_at = time.monotonic()
    except DeviceLost as error:
        _leave(channel, f"the device is lost: {error}", curable=True)
    except BaseException as error:  # noqa: BLE001 - a bug: a new process is better than one thread less
        traceback.print_exc()
        _leave(channel, f"{type(error).__name__}: {error}", curable=True)


def _next(batches: queue.SimpleQueue[Batch | None], canary: Canary) -> Batch | None:
    """The next batch; one without images if none comes until a worker that rests may have to look; None at the end."""
    try:
        return batches.get(timeout=canary.wait_seconds())
    except queue.Empty:
        return NOTHING


def _look(channel: Channel, canary: Canary) -> None:
    """Run the known images. If answers are wrong, so may be those to images, and the worker leaves."""
    wrong = canary.look()
    channel.send(Looked(wrong))
    if wrong:
        faults = "; ".join(f"{stage}: {what}" for stage, what in wrong.items())
        _leave(channel, f"its answers to known images are wrong: {faults}", curable=True)


def _leave(
    channel: Channel, cause: str, *, curable: bool, unusable: bool = False, out_of_memory: bool = False
) -> None:
    """Report why, and exit without touching the device again."""
    try:
        channel.send(Farewell(cause, curable, unusable, out_of_memory))
    finally:
        os._exit(os.EX_SOFTWARE)


def _beat(channel: Channel, canary: Canary) -> None:
    while True:
        memory = _device_memory()
        try:
            channel.send(Beat(_resident_bytes(), *memory, canary.suspicious(), dict(PREPARED)))
        except OSError:
            os._exit(os.EX_UNAVAILABLE)
        time.sleep(BEAT_SECONDS)


def _device_memory() -> tuple[int, int, int]:
    """Bytes that PyTorch keeps for this process, the most that it kept, and those of them that are in tensors."""
    torch: Any = sys.modules.get("torch")
    # A module that another thread is importing does not have all of its parts yet.
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        fake = sys.modules.get("stages.registry.fake")
        return fake.FakeMemory.report() if fake else (0, 0, 0)
    devices = range(torch.cuda.device_count())  # one, or those of a group
    figures = torch.cuda.memory_reserved, torch.cuda.max_memory_reserved, torch.cuda.memory_allocated
    kept, peak, allocated = (sum(map(figure, devices)) for figure in figures)
    return kept, peak, allocated


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def keep_memory() -> None:
    """Let the next batch reuse the memory that one batch frees. By default the C library returns large blocks to the kernel,
    which clears each page when it is touched again: for an image's maps that takes three times as long as the work on them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1):
        # The second value is the largest before glibc 2.35.
        mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)


def limit_threads() -> None:
    """OpenCV would start a thread for each core in each worker; torch and numpy follow OMP_NUM_THREADS."""
    if (opencv := sys.modules.get("cv2")) and (threads := os.environ.get("OMP_NUM_THREADS")):
        opencv.setNumThreads(int(threads))


if __name__ == "__main__":
    main()
