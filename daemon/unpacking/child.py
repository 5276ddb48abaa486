"""The child process that reads one container, with the arguments PARENT_PID CHANNEL_FD FILE_FD KIND RULES LIMITS.

Libraries for archives, documents and videos crash, hang and use too much memory on bad bytes, as those for images do.
So they run in the same kind of process as the disposable decoders: it can open no file, and has limits of memory and
of CPU time for each step. It only sends what it finds; the parent (folder.py) gives names and writes.

What it sends: messages.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from daemon.core.messages import frame
from daemon.unpacking import members
from daemon.unpacking.members import WALKERS, Item, Member, Rules, UnbufferedReader
from daemon.unpacking.messages import (
    AllRead,
    Declared,
    FolderEntry,
    Link,
    MemberBegun,
    MemberEnded,
    Message,
    Piece,
    StillAtWork,
    Twin,
)
from stages.contract.base import Limits, advise
from stages.images.sandbox import DETAIL_CHARACTERS, confine, seal

MOST = 2**64 - 1  # that a message can state
LONGEST_NAME = 1 << 16  # bytes of a member's name that are sent
NICE = 5  # images that wait come before those that are still packed
BEAT_SECONDS, BEATS = 1.0, 4  # at least so many in decode_seconds


def main(arguments: Sequence[str]) -> None:
    parent, channel_fd, file_fd = map(int, arguments[:3])
    kind, rules = arguments[3], msgspec.json.decode(arguments[4], type=Rules)
    limits = msgspec.json.decode(arguments[5], type=Limits)
    os.nice(NICE)
    confine(parent, limits)
    members.prepare(kind)
    with socket.socket(fileno=channel_fd) as channel, UnbufferedReader(file_fd) as file:
        seal()
        Sending(channel, kind, limits).send_all(WALKERS[kind](file, rules))


class Sending:
    """Sends the members of one container. The parent gives it time for each message."""

    def __init__(self, channel: socket.socket, kind: str, limits: Limits) -> None:
        self._channel, self._kind, self._limits = channel, kind, limits
        self._beat_seconds = min(BEAT_SECONDS, limits.decode_seconds / BEATS)
        self._sent_at = 0.0

    def send_all(self, items: Iterator[Item]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent no longer reads
            try:
                for item in items:
                    self._send_item(item)
                self._send(AllRead())
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # noqa: BLE001 - libraries raise anything on bad bytes
                self._send(AllRead(self._explain(error, self._kind)))

    def _send_item(self, item: Item) -> None:
        match item:
            case Declared(files, size):
                self._send(Declared(_state(files), _state(size)))
            case Member():
                self._send_member(item)
            case Twin(name, first):
                self._send(Twin(name[:LONGEST_NAME], first[:LONGEST_NAME]))
            case Link() | FolderEntry():
                self._send(item)
            case None if time.monotonic() > self._sent_at + self._beat_seconds:
                self._send(StillAtWork())

    def _send_member(self, member: Member) -> None:
        self._send(MemberBegun(member.name[:LONGEST_NAME], _state(member.size)))
        while True:
            try:
                piece = next(member.pieces, None)
            except Exception as error:  # noqa: BLE001 - as above
                return self._send(MemberEnded(self._explain(error)))
            if piece is None:
                return self._send(MemberEnded())
            self._send(Piece(piece))

    def _send(self, message: Message) -> None:
        self._channel.sendall(frame(message))
        self._sent_at = time.monotonic()

    def _explain(self, error: Exception, kind: str = "") -> str:
        if isinstance(error, MemoryError):
            most = self._limits.decode_bytes >> 20
            more = f'decode_bytes = "{2 * most} MiB"'
            what = f"it needs more than the {most} MiB of decode_bytes. {advise(more)}"
        else:
            what = members.explain(error, kind)
        return what[:DETAIL_CHARACTERS].encode(errors="replace").decode() or "it cannot be read"


def _state(number: int) -> int:
    """A number as a message can state it. Raises ValueError for a negative one, as a damaged header may have."""
    if number < 0:
        raise ValueError(number)
    return min(number, MOST)


if __name__ == "__main__":
    main(sys.argv[1:])
