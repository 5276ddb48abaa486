"""The daemon's side of one worker process; the process itself runs child.py."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Mapping

import anyio
import anyio.abc
import msgspec
import structlog

from daemon.core.errors import WorkerLost
from daemon.core.messages import (
    Batch,
    Beat,
    Farewell,
    Item,
    Loaded,
    Looked,
    Ready,
    Reply,
    Setup,
    Stop,
    decode_from_worker,
    receive,
    send,
)
from daemon.system import children
from daemon.system.printed import Printed
from stages.contract import processes

log = structlog.get_logger()

LONGEST_MESSAGE = 256 << 20  # bytes
OLD_SECONDS = 60.0  # a worker that dies so long after it has loaded was not broken from the start
OUTPUT_SECONDS = 0.5  # after its end, to read what it printed


class Worker:
    """A worker process, its state, and the messages to and from it."""

    def __init__(
        self,
        setup: Setup,
        device: str,
        process: anyio.abc.Process,
        connection: socket.socket,
        printed: Printed | None = None,
    ) -> None:
        self.name = setup.name
        self.device = device
        self.threads = setup.threads
        self.process = process
        self.connection = connection
        self._printed = printed
        self.alive = False
        self.loaded = False
        self.stages_loaded: list[str] = []
        self.answered = 0  # batches
        self.heard_at = time.monotonic()
        self.beat = Beat(0)
        self.cause = ""  # why it ended, if it could report that
        self.timed_out = False
        self.curable = True
        self.out_of_memory = False  # its device's memory did not suffice to load
        self.leaving = False  # it gets no more batches, and gives its device's memory back
        self.ended = anyio.Event()
        self.looked_at = 0.0  # Unix seconds, when it last found its answers to known images right
        self.wrong: dict[str, str] = {}  # what it found wrong in them, by stage
        self.unusable = False  # one of its stages cannot be built by any worker
        self.shared = False  # its GPU, by MPS: then its end proves nothing about its images or its slot
        self.died_alone = False  # while it ran the one image that all its threads were reserved for
        self.died_idle = False  # long after it had loaded, without work and a word: others have killed it
        # Set while all its threads are reserved; the event fires when the last one is back.
        self.alone: anyio.Event | None = None
        self.parked = 0
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._loaded_at = math.inf  # monotonic
        self._writer: asyncio.StreamWriter | None = None  # once it loads
        self._numbers = 0
        self._setup = setup

    @classmethod
    async def start(cls, setup: Setup, device: str, slab_fd: int, environment: Mapping[str, str]) -> Worker:
        """Start the process. It has loaded nothing yet."""
        child = await children.start(
            "daemon.workers.child", Printed(setup.name), slab_fd, environment=environment
        )
        return cls(setup, device, *child)

    @property
    def busy(self) -> int:
        """Its threads that have a batch; all of them while one image is to run alone."""
        return self.threads if self.alone else len(self._pending)

    async def load(self, timeout_seconds: float) -> Ready:
        """Wait until its models are loaded. Raises WorkerLost."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self.connection)
            send(self._writer, self._setup)
            with anyio.fail_after(timeout_seconds):
                while isinstance(message := await self._receive(), Loaded | Looked):
                    if isinstance(message, Looked):
                        self._note_look(message)
                        continue
                    self.stages_loaded.append(message.stage)
                    log.info(
                        "model loaded",
                        worker=self.name,
                        stage=message.stage,
                        seconds=round(message.seconds, 2),
                    )
        except TimeoutError:
            raise WorkerLost(self.name, f"its models were not loaded within {timeout_seconds:g} s") from None
        except (EOFError, OSError):  # OSError: it could not be connected
            raise WorkerLost(self.name, "") from None  # `why_it_ended` says why
        if isinstance(message, Farewell):
            self.curable, self.unusable = message.curable, message.unusable
            self.out_of_memory = message.out_of_memory
            raise WorkerLost(self.name, message.cause)
        assert isinstance(message, Ready)
        self.alive = self.loaded = True
        self.heard_at = self._loaded_at = time.monotonic()
        return message

    async def run(self, items: list[Item], timeout_seconds: float) -> Reply:
        """Run a batch. Raises WorkerLost when the worker dies, or takes too long and is killed."""
        if not self.alive or self.leaving:
            raise WorkerLost(self.name, self.cause or "it is gone", began=False)
        self._numbers += 1
        number = self._numbers
        try:
            send(self._writer, Batch(number, items))
        except EOFError:  # it has died, and `listen` will only see it now
            self.abandon()
            raise WorkerLost(self.name, self.cause or "it died", began=False) from None
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            with anyio.fail_after(timeout_seconds):
                reply: Reply = await future
                return reply
        except TimeoutError:
            self.timed_out = True
            advice = "if this machine needs longer, raise batch_timeout_seconds"
            self.cause = f"a batch was not done within {timeout_seconds:g} s; {advice}"
            await self.kill()
            raise self._loss() from None
        finally:
            self._pending.pop(number, None)

    async def listen(self) -> None:
        """Take replies until the worker ends; then every batch that it has raises WorkerLost."""
        try:
            while True:
                message = await self._receive()
                self.heard_at = time.monotonic()
                if isinstance(message, Reply):
                    self.answered += 1
                    future = self._pending.pop(message.id, None)
                    if future and not future.done():
                        future.set_result(message)
                elif isinstance(message, Beat):
                    self.beat = message
                elif isinstance(message, Looked):
                    self._note_look(message)
                elif isinstance(message, Farewell):
                    self.cause, self.curable = message.cause, message.curable
        except EOFError:
            pass
        finally:
            self.abandon()

    def abandon(self, cause: str = "") -> None:
        """Give the worker up: every batch that it has raises WorkerLost, and further messages are ignored."""
        if not self.alive:
            return
        is_old = time.monotonic() - self._loaded_at > OLD_SECONDS
        self.died_idle = is_old and not any((self._pending, self.cause, self.wrong, cause))
        self.alive, self.cause = False, self.cause or cause
        if self.alone:
            self.died_alone = self.alone.is_set() and bool(self._pending)
            self.alone.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._loss())

    def _note_look(self, message: Looked) -> None:
        self.wrong = self.wrong or message.wrong
        self.looked_at = self.looked_at if message.wrong else time.time()

    def _loss(self) -> WorkerLost:
        began = not (self.shared or self.wrong)
        return WorkerLost(self.name, self.cause or "it died", timed_out=self.timed_out, began=began)

    def dismiss(self) -> None:
        """Tell the worker that no more batches will come. It exits when it has finished those it has."""
        if self.alive:
            with contextlib.suppress(EOFError):
                send(self._writer, Stop())

    def give_up(self) -> None:
        """End it while it loads: it does not listen yet."""
        children.kill(self.process)

    def leave(self) -> None:
        """Let it finish the batches that it has, and exit, so that its device's memory is free."""
        self.leaving = True
        self.dismiss()

    @property
    def left(self) -> bool:
        """Whether it has ended as `leave` asked."""
        return self.leaving and self.process.returncode == 0

    async def kill(self) -> None:
        await children.end(self.process)
        self.ended.set()
        if self.process.returncode is None:
            details = {"worker": self.name, "pid": self.process.pid}
            if children.is_ending(self.process.pid):
                log.warning("worker is still ending; the GPU's driver has not freed what it had", **details)
            else:
                log.error("worker cannot be killed: a system call in it does not return", **details)
        if self._printed:
            await self._printed.finish(OUTPUT_SECONDS)
        if self._writer:
            self._writer.close()
        self.connection.close()

    def why_it_ended(self) -> str:
        """Why the worker ended, in a sentence for the log."""
        when = "" if self.loaded else " while it loaded its models"
        return self.cause or f"{processes.describe_end(self.process.returncode)}{when}"

    async def _receive(self) -> Loaded | Looked | Ready | Reply | Beat | Farewell:
        try:
            return decode_from_worker(await receive(self._reader, LONGEST_MESSAGE))
        except msgspec.MsgspecError as error:
            self.cause = f"it sent an invalid message: {error}"
            raise EOFError from error
