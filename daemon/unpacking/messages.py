"""What the process that reads a container sends to its parent: messages of msgpack, each behind its length."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from daemon.core.messages import read_frame

PIECE = 1 << 20  # bytes of a member that are passed on together
ENVELOPE = 64  # bytes of a message around its piece

Count = Annotated[int, msgspec.Meta(ge=0)]


class Sent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message."""


class Declared(Sent, frozen=True):
    """What the container says that it has; it may be wrong. It lets the parent refuse it before it writes anything."""

    files: Count
    bytes: Count = 0


class MemberBegun(Sent, frozen=True):
    """A file in a file begins. size: what the container says."""

    name: bytes
    size: Count


class Piece(Sent, frozen=True):
    """Some bytes of the member."""

    data: bytes


class MemberEnded(Sent, frozen=True):
    """The member is complete or, with a problem, cannot be read."""

    problem: str = ""


class Link(Sent, frozen=True):
    """A symbolic link, device or FIFO, which is left out."""


class FolderEntry(Sent, frozen=True):
    """An entry for a folder, which is only counted."""


class Twin(Sent, frozen=True):
    """Another name, in bytes as those of members are, of a file that came before: a hard link."""

    name: bytes
    first: bytes


class StillAtWork(Sent, frozen=True):
    """Nothing new, but it goes on."""


class AllRead(Sent, frozen=True):
    """The file has no more members or, with a problem, the rest cannot be read."""

    problem: str = ""


Message = Declared | MemberBegun | Piece | MemberEnded | Link | FolderEntry | Twin | StillAtWork | AllRead
_decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


class Torn(Exception):
    """The child ended in the middle, or what it sends makes no sense."""


def read_messages(channel: socket.socket) -> Iterator[Message]:
    """Up to AllRead. Raises Torn, TimeoutError."""
    with channel.makefile("rb") as stream:
        while True:
            try:
                # Hostile bytes may have taken over the child.
                message = _decode(read_frame(stream, PIECE + ENVELOPE))
            except (EOFError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise Torn from error
            yield message
            if isinstance(message, AllRead):
                return
