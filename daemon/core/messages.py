"""The protocol between the daemon and a worker: length-prefixed msgpack over one socket for each worker.

A worker gets a `Setup`, sends `Loaded` for each stage, then `Ready`. After that it gets one `Batch` at a time
for each of its threads and answers each with a `Reply`. In between it sends `Looked` (daemon/workers/canary.py).
The bytes of images are not sent: an `Item` names a range of the shared slab.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from io import IOBase
from math import inf
from typing import IO, TYPE_CHECKING, Any

import msgspec

from stages.contract.base import Limits, StageSpec
from stages.contract.binning import Thresholds

if TYPE_CHECKING:
    import asyncio

LENGTH = struct.Struct("<I")
LEAST_GROUP_PIXELS = 200_000_000  # 600 MB as bytes


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """The first message: which stages the worker runs, and how."""

    name: str
    device: str  # torch device, as the worker names it
    stages: list[StageSpec]
    slab_bytes: int
    threads: int
    decoders: int  # disposable decoder processes
    limits: Limits
    cascade: Thresholds | None  # if set, later stages are skipped once a bin is decided
    pipeline: list[str] = []  # the stages of all segments
    cores: list[int] = []  # on which the worker runs; empty: on any
    rehearse: bool = False  # each thread runs the known images before the first image
    references: str = ""  # the folder where first answers to the known images are kept; empty: nowhere
    group_pixels: int = LEAST_GROUP_PIXELS  # of a batch, decoded at once
    host_group_pixels: int = LEAST_GROUP_PIXELS  # of these, what a GPU does not decode itself


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """One stage has loaded its model; others may still be loading."""

    stage: str
    seconds: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    load_seconds: dict[str, float]  # by stage


class Looked(msgspec.Struct, tag="looked", frozen=True):
    """The worker has looked at its answers to the known images. wrong: by stage; after that it leaves."""

    wrong: dict[str, str]


class Output(msgspec.Struct, array_like=True, frozen=True):
    """A stage's result for one image: the JSON for ledger and sidecar, and this image's share of the time."""

    payload: bytes
    seconds: float


class Item(msgspec.Struct, array_like=True, frozen=True):
    """An image for a worker: where its bytes are in the slab, and the results of earlier segments."""

    offset: int
    length: int
    known: dict[str, bytes]  # stage → JSON


class Batch(msgspec.Struct, tag="batch", frozen=True):
    id: int
    items: list[Item]


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What became of one image: the outputs of the stages that ran, or why there are none."""

    format: str
    width: int
    height: int
    outputs: dict[str, Output]
    reason: str = ""
    detail: str = ""
    transient: bool = False
    pages: int = 1


class StageRun(msgspec.Struct, array_like=True, frozen=True):
    """One call of a stage, for the metrics."""

    stage: str
    images: int
    seconds: float


class Reply(msgspec.Struct, tag="reply", frozen=True):
    id: int
    outcomes: list[Outcome]
    runs: list[StageRun]
    out_of_memory: int = 0  # batches that were halved


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A heartbeat, sent every second by a thread of the worker."""

    resident_bytes: int
    device_used_bytes: int = 0
    device_peak_bytes: int = 0
    device_allocated_bytes: int = 0  # of those used, in tensors
    prepared: dict[str, int] = {}  # for its GPU so far, by kind: PREPARATIONS


class Farewell(msgspec.Struct, tag="farewell", frozen=True):
    """The worker must exit, and says why: a sticky CUDA error, or a model that cannot be loaded."""

    cause: str
    curable: bool  # whether a new worker may succeed
    # A stage cannot be built from its weights and options; the cause is a sentence for the user.
    unusable: bool = False
    out_of_memory: bool = False  # of its device, while it loaded


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """No more batches will come: finish the current ones and exit."""


ToWorker = Setup | Batch | Stop
FromWorker = Loaded | Looked | Ready | Reply | Beat | Farewell

decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: Any) -> bytes:
    """The message as sent over the socket: its length (32 bits, little endian), then its bytes."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def write_frame(stream: IO[bytes], message: Any) -> None:
    """To a stream that blocks."""
    stream.write(frame(message))
    stream.flush()


def read_frame(stream: IOBase | IO[bytes], longest: float = inf) -> bytes:
    """The bytes of the next message from a stream that blocks. longest: in bytes.

    Raises EOFError when the other side is gone, and msgspec.DecodeError if it is longer.
    """
    head = stream.read(LENGTH.size)
    length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    if length > longest:
        raise msgspec.DecodeError(f"a message of {length} bytes")
    body: bytes = stream.read(length)
    if not body or len(body) < length:  # no message is empty
        raise EOFError
    return body


# Event loops report a process that has died in many ways. Here they all become EOFError.


def send(writer: asyncio.StreamWriter | None, message: Any) -> None:
    """Send a message, framed. Raises EOFError when the other side is gone, or not there yet.

    A write that fails closes the transport without a word, and whoever reads gets to know it a turn of the loop later.
    To write in between raises RuntimeError in uvloop, and only logs a warning in asyncio.
    """
    if writer is None or writer.is_closing():
        raise EOFError
    framed = frame(message)
    try:
        writer.write(framed)
    except (OSError, RuntimeError) as error:
        raise EOFError from error


async def receive(reader: asyncio.StreamReader, longest: int) -> bytes:
    """The bytes of the next message. longest: in bytes.

    Raises EOFError when the other side is gone, and msgspec.DecodeError if it is longer.
    """
    try:
        length = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
        if length > longest:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        return await reader.readexactly(length)
    except (OSError, RuntimeError) as error:  # what the transport was closed with
        raise EOFError from error
