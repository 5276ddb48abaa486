from __future__ import annotations

import asyncio
import socket
from typing import Any

import anyio.lowlevel
import pytest

from daemon.core import messages
from daemon.core.jobs import Failure
from daemon.pipeline import wire
from daemon.pipeline.wire import End
from stages.contract.base import Reason
from tests.makers import failed, make_job


class Writer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data


async def pass_on(message: Any) -> bytes:
    writer: Any = Writer()
    wire.send(writer, message)
    reader = asyncio.StreamReader()
    reader.feed_data(writer.written)
    return await wire.receive(reader)


@pytest.mark.anyio
async def test_a_name_that_is_not_utf_8_passes_with_backslashes() -> None:
    ending = failed(make_job(path=b"\xff.jpg"), Reason.RULE, "no bin for \udcff.jpg")
    message = wire.decode_from_executor(await pass_on(End(1, [ending])))
    assert isinstance(message, End)
    [other] = message.endings
    assert other.failure == Failure(Reason.RULE, "no bin for \\udcff.jpg")
    assert other.job == ending.job


@pytest.mark.anyio
async def test_the_end_of_the_other_side_is_an_end_of_file() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\x05\x00\x00\x00ab")
    reader.feed_eof()
    with pytest.raises(EOFError):
        await wire.receive(reader)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": True}), ("asyncio", {"use_uvloop": False})],
    ids=["uvloop", "asyncio"],
)
async def test_to_write_to_a_process_that_is_gone_is_an_end_of_file_however_often(
    anyio_backend: object,
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    _, writer = await asyncio.open_unix_connection(sock=ours)
    theirs.close()
    messages.send(writer, b"this write fails without a word")
    for _ in range(3):  # the loop closes the transport in one of these turns
        with pytest.raises(EOFError):
            messages.send(writer, b"this one is the next")
        await anyio.lowlevel.checkpoint()
    writer.close()
