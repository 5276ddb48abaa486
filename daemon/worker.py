"""The child: bytes in, results out. It touches no files of the user's and knows nothing of the ledger.

A few threads each take one batch through the whole chain in straight-line code: open, decode, then stage after stage. The
stages' own locks make a pipeline of that: while one batch is in BLIP the next is in OCR. An image that cannot
be done never takes its batch-mates with it: the batch is halved until the culprit is alone.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from daemon.messages import (
    LENGTH,
    Batch,
    Beat,
    Farewell,
    FromWorker,
    Item,
    Outcome,
    Output,
    Ready,
    Reply,
    Setup,
    StageRun,
    Stop,
    decode_to_worker,
    frame,
)
from stages import registry
from stages.base import DeviceLost, Header, Image, ImageError, OutOfMemory, Reason, Result, Stage
from stages.binning import is_decided
from stages.images import decode, inspect

BEAT_SECONDS = 1.0
PICTURE = b"P6\n64 64\n255\n" + bytes(range(256)) * 48  # that a worker rehearses on
GROUP_PIXELS = 200_000_000  # of a batch that are decoded at once: 600 MB as bytes

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Entry:
    """One image of a batch on its way through the chain."""

    item: Item
    header: Header | None = None
    image: Image | None = None
    error: ImageError | None = None
    payloads: dict[str, bytes] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        header = self.header
        form = (header.format, header.width, header.height) if header else ("", 0, 0)
        if self.error is None:
            return Outcome(*form, self.outputs)
        return Outcome(*form, self.outputs, self.error.reason, self.error.detail, self.error.transient)


class Chain:
    """The stages of one segment, from bytes to results."""

    def __init__(self, setup: Setup, slab: memoryview) -> None:
        self.setup = setup
        self._slab = slab
        self._stages: list[Stage] = []
        self._decode: Callable[[Sequence[Entry]], None] | None = None
        self.out_of_memory = 0

    def load(self) -> dict[str, float]:
        """Build and load every stage; returns the seconds of each."""
        seconds = {}
        for spec in self.setup.stages:
            started = time.perf_counter()
            stage = registry.build(spec, self.setup.device)
            stage.load()
            self._stages.append(stage)
            seconds[spec.name] = time.perf_counter() - started
        if any(stage.reads_pixels for stage in self._stages):
            self._decode = _decoding(self.setup)
        if self.setup.rehearse:
            self._rehearse()
        return seconds

    def _rehearse(self) -> None:
        """A picture of our own goes first: a device that kills its worker on any image does so here, before one of the
        user's can be blamed for it."""
        slab, self._slab = self._slab, memoryview(PICTURE)
        self.run(Batch(0, [Item(0, len(PICTURE), {})]))
        self._slab = slab

    def run(self, batch: Batch) -> Reply:
        """Every image through every stage that it still needs. Raises DeviceLost when this process is no use any more."""
        entries = [self._open(item) for item in batch.items]
        runs: list[StageRun] = []
        for group in _groups(entries):
            if self._decode:
                self._decode([entry for entry in group if self._remaining(entry)])
            for stage in self._stages:
                self._apply(stage, [entry for entry in group if stage in self._remaining(entry)], runs)
            for entry in group:
                entry.image = None  # pixels of the next group want the room
        halved, self.out_of_memory = self.out_of_memory, 0
        return Reply(batch.id, [entry.outcome() for entry in entries], runs, halved)

    def _open(self, item: Item) -> Entry:
        """Look at the header, and at what earlier segments said."""
        entry = Entry(item, payloads=dict(item.known))
        data = self._slab[item.offset : item.offset + item.length]
        try:
            header = entry.header = inspect(data, self.setup.limits)
        except ImageError as error:
            entry.error = error
            return entry
        known = {name: registry.decode(name, payload) for name, payload in item.known.items()}
        entry.image = Image(data, header.format, header.width, header.height, None, known)
        return entry

    def _remaining(self, entry: Entry) -> list[Stage]:
        """The stages this image still needs; none when it has failed or, in mode cascade, its bin is decided."""
        if entry.error or entry.image is None:
            return []
        cascade = self.setup.cascade
        if cascade and is_decided(entry.payloads, cascade, self.setup.pipeline):
            return []
        return [stage for stage in self._stages if stage.name not in entry.payloads]

    def _apply(self, stage: Stage, entries: list[Entry], runs: list[StageRun]) -> None:
        if not entries:
            return
        started = time.perf_counter()
        answers = self._ask(stage, [entry.image for entry in entries if entry.image])
        seconds = time.perf_counter() - started
        runs.append(StageRun(stage.name, len(entries), seconds))
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, ImageError):
                entry.error = answer
            elif entry.image:
                self._take(stage, entry, entry.image, answer, seconds / len(entries))

    def _take(self, stage: Stage, entry: Entry, image: Image, answer: Result, seconds: float) -> None:
        """Keep an answer, if what will be stored can be read again: JSON has no NaN."""
        payload = _encode(answer)
        try:
            registry.decode(stage.name, payload)
        except msgspec.DecodeError as error:
            entry.error = ImageError(Reason.STAGE, f"{stage.name} gave a result that cannot be stored: {error}")
            return
        image.results[stage.name] = answer
        entry.payloads[stage.name] = payload
        entry.outputs[stage.name] = Output(payload, seconds)

    def _ask(self, stage: Stage, images: list[Image]) -> list[Result | ImageError]:
        """The stage's answers; an error or a lack of memory halves the batch, down to the image that causes it."""
        try:
            return stage.run(images)
        except DeviceLost:
            raise
        except OutOfMemory as error:
            self.out_of_memory += 1
            if len(images) == 1:
                return [ImageError(Reason.MEMORY, f"{stage.name}: {error}", transient=True)]
        except Exception as error:  # noqa: BLE001 - one batch, whatever its images make the model do
            if len(images) == 1:
                traceback.print_exc()
                return [ImageError(Reason.STAGE, f"{stage.name}: {type(error).__name__}: {error}", transient=True)]
        half = len(images) // 2
        return self._ask(stage, images[:half]) + self._ask(stage, images[half:])


def _decoding(setup: Setup) -> Callable[[Sequence[Entry]], None]:
    """A function that gives entries their pixels, on the worker's device."""
    from stages.decoder import Decoders

    decoders = Decoders(setup.decoders, setup.limits)

    def give_pixels(entries: Sequence[Entry]) -> None:
        wanted = [(entry.image, entry.header) for entry in entries if entry.image and entry.header]
        answers = decode([(image.data, header) for image, header in wanted], setup.device, decoders, setup.limits)
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, ImageError):
                entry.error = answer
            elif entry.image:
                entry.image.pixels = answer

    return give_pixels


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The batch in runs of bounded pixels, so that one huge image neither fails nor crowds out its mates."""
    group: list[Entry] = []
    pixels = 0
    for entry in entries:
        area = entry.header.width * entry.header.height if entry.header else 0
        if group and pixels + area > GROUP_PIXELS:
            yield group
            group, pixels = [], 0
        group.append(entry)
        pixels += area
    yield group


class Line:
    """The worker's end of the socket to the daemon. Several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb", 1 << 16)
        self._lock = threading.Lock()

    def send(self, message: FromWorker) -> None:
        with self._lock:
            self._connection.sendall(frame(message))

    def receive(self) -> Setup | Batch | Stop:
        """The next message. Raises EOFError when the daemon has gone."""
        head = self._reader.read(LENGTH.size)
        body = self._reader.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
        if not body:
            raise EOFError
        return decode_to_worker(body)


def main() -> None:
    """Entry of the child process: `python -m daemon.worker SOCKET_FD SLAB_FD PARENT_PID`."""
    connection, slab_fd, parent = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides what it means
    os.dup2(2, 1)  # whatever a library prints goes to the log
    line = Line(socket.socket(fileno=connection))
    setup = line.receive()
    assert isinstance(setup, Setup)
    slab = memoryview(mmap.mmap(slab_fd, setup.slab_bytes, prot=mmap.PROT_READ))
    chain = Chain(setup, slab)
    try:
        seconds = chain.load()
    except Exception as error:  # noqa: BLE001 - it is told to the daemon
        traceback.print_exc()
        _leave(line, f"{type(error).__name__}: {error}", curable=isinstance(error, OutOfMemory | DeviceLost))
    line.send(Ready(seconds))
    threading.Thread(target=_beat, args=(line,), name="beat", daemon=True).start()
    _serve(line, chain, setup.threads)


def _serve(line: Line, chain: Chain, threads: int) -> None:
    """Hand batches to the threads until the daemon says stop or is gone."""
    batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
    team = [threading.Thread(target=_work, args=(line, chain, batches), name=f"batch-{n}") for n in range(threads)]
    for thread in team:
        thread.daemon = True
        thread.start()
    try:
        while isinstance(message := line.receive(), Batch):
            batches.put(message)
    except (EOFError, OSError):
        os._exit(os.EX_UNAVAILABLE)  # the daemon is gone: nobody wants the results
    for _ in team:
        batches.put(None)
    for thread in team:
        thread.join()
    # Interpreter and CUDA shutdown take seconds and gain nothing.
    os._exit(os.EX_OK)


def _work(line: Line, chain: Chain, batches: queue.SimpleQueue[Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        try:
            line.send(chain.run(batch))
        except DeviceLost as error:
            _leave(line, f"the device is lost: {error}", curable=True)
        except BaseException as error:  # noqa: BLE001 - a defect: better a new process than a thread less
            traceback.print_exc()
            _leave(line, f"{type(error).__name__}: {error}", curable=True)


def _leave(line: Line, cause: str, *, curable: bool) -> None:
    """Say why, and go without touching the device again."""
    try:
        line.send(Farewell(cause, curable))
    finally:
        os._exit(os.EX_SOFTWARE)


def _beat(line: Line) -> None:
    while True:
        used, peak = _device_memory()
        try:
            line.send(Beat(_resident_bytes(), used, peak))
        except OSError:
            os._exit(os.EX_UNAVAILABLE)
        time.sleep(BEAT_SECONDS)


def _device_memory() -> tuple[int, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _die_with(parent: int) -> None:
    """Be killed when the daemon dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(os.EX_UNAVAILABLE)


if __name__ == "__main__":
    main()
