"""The child process that reads one container, with the arguments PARENT_PID CHANNEL_FD FILE_FD KIND RULES LIMITS.

Libraries for archives, documents and videos crash, hang and use too much memory on bad bytes, as those for images do.
So they run in the same kind of process as the disposable decoders: it can open no file, and has limits of memory and
of CPU time for each step. It only sends what it finds; the parent (folder.py) gives names and writes.

It sends frames: a letter, the length as four bytes, and the content.

    N  how many members and bytes to expect     L  a link or device, which is left out
    O  a folder, which is only counted          H  a hard link; the length of its name, it, and the name of the file
    M  a member begins; its size and name       D  some of its bytes
    E  it is complete                           X  it cannot be read; why
    B  nothing new, but it goes on
    F  the file has no more members             P  the rest cannot be read; why
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from daemon.unpacking import members
from daemon.unpacking.members import (
    PIECE,
    WALKERS,
    Declared,
    FolderEntry,
    Item,
    Link,
    Member,
    Rules,
    Twin,
    UnbufferedReader,
)
from stages.contract.base import Limits, advise
from stages.images.decoder import DETAIL_CHARACTERS, confine, seal

HEAD = struct.Struct("!cI")
NUMBER = struct.Struct("!Q")
MOST = NUMBER.unpack(b"\xff" * NUMBER.size)[0]
LONGEST_NAME = 1 << 16  # bytes of a member's name that are sent
LETTERS = b"NLOHMDEXBFP"
BEAT_SECONDS, BEATS = 1.0, 4  # at least so many in decode_seconds


class Frame(NamedTuple):
    letter: bytes
    content: bytes


class Torn(Exception):
    """The child ended in the middle, or what it sends makes no sense."""


def read_frames(channel: socket.socket) -> Iterator[Frame]:
    """Up to F or P. Raises Torn, TimeoutError."""
    with channel.makefile("rb") as stream:
        while True:
            head = stream.read(HEAD.size)
            if len(head) < HEAD.size:
                raise Torn
            letter, length = HEAD.unpack(head)
            if letter not in LETTERS or length > PIECE:  # hostile bytes may have taken over the child
                raise Torn
            content = stream.read(length)
            if len(content) < length:
                raise Torn
            yield Frame(letter, content)
            if letter in b"FP":
                return


def main(arguments: Sequence[str]) -> None:
    parent, channel_fd, file_fd = map(int, arguments[:3])
    kind, rules = arguments[3], msgspec.json.decode(arguments[4], type=Rules)
    limits = msgspec.json.decode(arguments[5], type=Limits)
    confine(parent, limits)
    members.prepare(kind)
    with socket.socket(fileno=channel_fd) as channel, UnbufferedReader(file_fd) as file:
        seal()
        Sending(channel, kind, limits).send_all(WALKERS[kind](file, rules))


class Sending:
    """Sends the members of one container. The parent gives it time for each frame."""

    def __init__(self, channel: socket.socket, kind: str, limits: Limits) -> None:
        self._channel, self._kind, self._limits = channel, kind, limits
        self._sent_at = 0.0

    def send_all(self, items: Iterator[Item]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent no longer reads
            try:
                for item in items:
                    self._send_item(item)
                self._send(b"F")
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # noqa: BLE001 - libraries raise anything on bad bytes
                self._send(b"P", self._explain(error, self._kind))

    def _send_item(self, item: Item) -> None:
        match item:
            case Declared(files, size):
                self._send(b"N", NUMBER.pack(min(files, MOST)) + NUMBER.pack(min(size, MOST)))
            case Member():
                self._send_member(item)
            case Link():
                self._send(b"L")
            case FolderEntry():
                self._send(b"O")
            case Twin(name, first):
                name = name[:LONGEST_NAME]
                self._send(b"H", NUMBER.pack(len(name)) + name + first[:LONGEST_NAME])
            case None if time.monotonic() > self._sent_at + self._beat_seconds:
                self._send(b"B")

    def _send_member(self, member: Member) -> None:
        self._send(b"M", NUMBER.pack(min(member.size, MOST)) + member.name[:LONGEST_NAME])
        while True:
            try:
                piece = next(member.pieces, None)
            except Exception as error:  # noqa: BLE001 - as above
                return self._send(b"X", self._explain(error))
            if piece is None:
                return self._send(b"E")
            self._send(b"D", piece)

    def _send(self, letter: bytes, content: bytes = b"") -> None:
        self._channel.sendall(HEAD.pack(letter, len(content)) + content)
        self._sent_at = time.monotonic()

    @property
    def _beat_seconds(self) -> float:
        return min(BEAT_SECONDS, self._limits.decode_seconds / BEATS)

    def _explain(self, error: Exception, kind: str = "") -> bytes:
        if isinstance(error, MemoryError):
            most = self._limits.decode_bytes >> 20
            more = f'decode_bytes = "{2 * most} MiB"'
            what = f"it needs more than the {most} MiB of decode_bytes. {advise(more)}"
        else:
            what = members.explain(error, kind)
        return what[:DETAIL_CHARACTERS].encode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
