"""The child process that takes one file apart, with the arguments PARENT_PID CHANNEL_FD FILE_FD KIND RULES LIMITS.

Libraries for archives, documents and videos crash, hang and use too much memory on bad bytes, as those for images do.
So they run in the same kind of process as the disposable decoders: it can open no file, and has limits of memory and
of CPU time for each member. It only sends what it finds; the parent (folder.py) gives names and writes.

It sends frames: a letter, the length as four bytes, and the content.

    M  a member begins; its name        D  some of its bytes
    E  it is complete                   X  it cannot be read; why
    F  the file has no more members     P  the rest cannot be read; why
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec

from daemon.unpacking import members
from daemon.unpacking.members import WALKERS, Member, Rules, Unusable
from stages.base import ImageError, Limits
from stages.decoding.decoder import DETAIL_CHARACTERS, allow_cpu_seconds, confine, seal

HEAD = struct.Struct("!cI")


class Frame(NamedTuple):
    letter: bytes
    content: bytes


class Torn(Exception):
    """The child ended in the middle."""


def read_frames(channel: socket.socket) -> Iterator[Frame]:
    """Up to F or P. Raises Torn, TimeoutError."""
    with channel.makefile("rb") as stream:
        while True:
            head = stream.read(HEAD.size)
            if len(head) < HEAD.size:
                raise Torn
            letter, length = HEAD.unpack(head)
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
    with socket.socket(fileno=channel_fd) as channel, members.open_plain(file_fd) as file:
        seal()
        send_members(channel, file, kind, rules, limits)


def send_members(channel: socket.socket, file: BinaryIO, kind: str, rules: Rules, limits: Limits) -> None:
    def send(letter: bytes, content: bytes = b"") -> None:
        channel.sendall(HEAD.pack(letter, len(content)) + content)

    def send_member(member: Member) -> None:
        send(b"M", member.name)
        while True:
            try:
                piece = next(member.pieces, None)
            except Exception as error:  # noqa: BLE001 - libraries raise anything on bad bytes
                return send(b"X", explain(error))
            if piece is None:
                return send(b"E")
            send(b"D", piece)

    allow_cpu_seconds(limits.decode_seconds)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has had enough
        try:
            for member in WALKERS[kind](file, rules):
                allow_cpu_seconds(limits.decode_seconds)
                send_member(member)
            send(b"F")
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            send(b"P", explain(error))


def explain(error: Exception) -> bytes:
    what = (
        str(error)
        if isinstance(error, Unusable | ImageError | OSError | SyntaxError | ValueError)
        else repr(error)
    )
    return what[:DETAIL_CHARACTERS].encode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
