"""The protocol between the coordinator and an executor in another process: length-prefixed msgpack over a socket.

The executor gets an `ExecutorSetup`, sends `Staffed` when its workers have loaded their models, and an `ExecutorReport` every
second. Between these it calls the coordinator (the protocol `JobSource` in executor.py): each call has a
number, which its answer repeats. Nearly all calls are about groups of images, because the coordinator's time
is what limits a machine with many GPUs. The bytes of images are not sent: an executor reads the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from daemon.core import messages
from daemon.core.jobs import Content, Ending, Job, Placed, Read
from daemon.monitoring.samples import Sample
from daemon.monitoring.snapshot import ExecutorState
from daemon.system.cores import Cores
from daemon.system.gpus import Gpu
from daemon.system.mounts import KnownFolder
from stages.contract.base import StageSpec

LONGEST_MESSAGE = 1 << 30  # bytes


class ExecutorSetup(msgspec.Struct, tag="setup", frozen=True):
    """The first message: what the executor works on, and with what."""

    name: str
    config: bytes  # JSON
    specs: list[StageSpec]
    cores: Cores
    gpus: list[Gpu]  # of the machine, as the daemon found them at its start
    segments: list[tuple[list[str], list[str]]]  # the whole placement: stages and devices
    workers: list[list[int]]  # of each segment, the numbers of those in this executor
    inboxes: list[int]  # their numbers in the ledger, in the order of the configuration
    bins: list[str]  # those that a rule has named before now
    known: list[list[KnownFolder]]  # of each inbox, the folders of its results
    slab_bytes: int


class NextJobs(msgspec.Struct, tag="next_jobs", frozen=True):
    number: int


class NoteRead(msgspec.Struct, tag="note_read", frozen=True):
    number: int
    read: dict[int, Read]


class Keep(msgspec.Struct, tag="keep", frozen=True):
    number: int
    contents: list[Content]


class Blame(msgspec.Struct, tag="blame", frozen=True):
    number: int
    image: int
    deaths: int


class End(msgspec.Struct, tag="end", frozen=True):
    number: int
    endings: list[Ending]


class NotePublished(msgspec.Struct, tag="published", frozen=True):
    """images: those whose endings were committed together. newest: as in Committed. The rest is as in a Publication."""

    number: int
    images: list[int]
    newest: set[int]
    placed: list[Placed]
    held: dict[int, str]
    folders: list[bytes]
    begun_at: float


class LetGo(msgspec.Struct, tag="let_go", frozen=True):
    images: list[int]


class Staffed(msgspec.Struct, tag="staffed", frozen=True):
    """Every worker has loaded its models, or will not be started again."""


class ExecutorReport(msgspec.Struct, tag="report", frozen=True):
    """The state of the executor, and its metrics."""

    state: ExecutorState
    samples: list[Sample]


class ExecutorFarewell(msgspec.Struct, tag="farewell", frozen=True):
    """The executor must end. error: the name of the exception that the daemon ends with, or empty."""

    error: str
    text: str


class Jobs(msgspec.Struct, tag="jobs", frozen=True):
    """The answer to NextJobs. bins: those that images of other executors got since the last answer."""

    number: int
    jobs: list[Job]
    bins: list[str]


class Known(msgspec.Struct, tag="known", frozen=True):
    """The answer to NoteRead: what the ledger already knows about some of the images."""

    number: int
    contents: dict[int, Content | None]


class Done(msgspec.Struct, tag="done", frozen=True):
    """The answer to Keep, Blame and NotePublished."""

    number: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """The answer to End. newest: as in Committed. changed: those that ended differently, or with other results, because
    the ledger had others for the same bytes."""

    number: int
    newest: set[int]
    changed: list[Ending]


class LogLevel(msgspec.Struct, tag="log_level", frozen=True):
    """The lowest level that is logged from now on."""

    level: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Let go of the jobs that wait for a worker, and wait for no disk."""


class ExecutorStop(msgspec.Struct, tag="stop", frozen=True):
    """There will be no more jobs: end the workers, then exit."""


Call = NextJobs | NoteRead | Keep | Blame | End | NotePublished
Answer = Jobs | Known | Done | Ended
FromExecutor = Call | LetGo | Staffed | ExecutorReport | ExecutorFarewell
ToExecutor = ExecutorSetup | Answer | LogLevel | Drain | ExecutorStop

decode_from_executor: Callable[[bytes], FromExecutor] = msgspec.msgpack.Decoder(FromExecutor).decode
decode_to_executor: Callable[[bytes], ToExecutor] = msgspec.msgpack.Decoder(ToExecutor).decode


def send(writer: asyncio.StreamWriter, message: FromExecutor | ToExecutor) -> None:
    """Send a message. A name in it that is not UTF-8 is shown with backslashes. Raises EOFError when the other side is
    gone."""
    try:
        messages.send(writer, message)
    except UnicodeEncodeError:
        messages.send(writer, _escape(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _escape(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape(key): _escape(each) for key, each in value.items()}
        case list() | tuple():
            return [_escape(each) for each in value]
    return value


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The bytes of the next message. Raises EOFError when the other side is gone."""
    return await messages.receive(reader, LONGEST_MESSAGE)
