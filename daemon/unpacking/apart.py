"""Takes one file apart: starts the child, and writes what it sends. Runs in a thread."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass, field

import msgspec

from daemon.jobs import Version
from daemon.unpacking.child import Torn, read_frames
from daemon.unpacking.folder import Contents, Most, TooMuch, mark_of
from daemon.unpacking.members import Rules
from stages.base import Limits
from stages.decoding.decoder import START_SECONDS, WALL_PER_CPU_SECOND
from stages.processes import describe_end, environment, python

MODULE = "daemon.unpacking.child"
DEATH_SECONDS = 10.0


class Gone(Exception):
    """The file changed while it was read."""


class Stopped(Exception):
    """The daemon ends."""


class Outcome(msgspec.Struct, frozen=True):
    """files: in the folder. problem: why not everything is there; else empty."""

    files: int
    problem: str = ""


@dataclass
class Children:
    """The processes that run, so that they can be ended from another thread."""

    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    is_stopped: bool = False
    progressed_at: float = 0.0  # monotonic

    def stop(self) -> None:
        self.is_stopped = True
        for process in list(self.running):
            process.kill()


def take_apart(
    fd: int,
    kind: str,
    contents_at: bytes,
    version: Version,
    rules: Rules,
    limits: Limits,
    most: Most,
    ignored: re.Pattern[bytes],
    children: Children,
) -> Outcome:
    """contents_at: the folder to make. Raises Gone, Stopped, and OSError if the disk is full or fails."""
    mark = mark_of(contents_at)
    if mark and mark.version == version and mark.is_whole:  # by a daemon that was killed
        return Outcome(mark.files)
    if mark is None and os.path.lexists(contents_at):
        name = os.path.basename(contents_at).decode(errors="replace")
        return Outcome(0, f"{name} is in the way; move or rename it")
    contents = Contents(contents_at, version, most, ignored)
    try:
        problem = _fill(contents, fd, kind, rules, limits, children)
        if children.is_stopped:
            raise Stopped
        if not version.is_of(os.fstat(fd), moved=True):
            raise Gone
        if contents.files:
            contents.place(is_whole=not (problem or contents.missing))
    finally:
        contents.drop()
    if contents.missing:
        left_out = f"{contents.missing:,} left out: {'; '.join(contents.left_out)}"
        problem = f"{problem}; {left_out}" if problem else left_out
    return Outcome(contents.files, problem)


def _fill(contents: Contents, fd: int, kind: str, rules: Rules, limits: Limits, children: Children) -> str:
    """Write all members; returns why some are missing, if the file is to blame."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            handed = (theirs.fileno(), fd)
            settings = (msgspec.json.encode(rules).decode(), msgspec.json.encode(limits).decode())
            os.lseek(fd, 0, os.SEEK_SET)
            process = subprocess.Popen(
                python("-m", MODULE, str(os.getpid()), *map(str, handed), kind, *settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=handed,
                env=environment({"MALLOC_ARENA_MAX": "1"}),
            )
        children.running.add(process)
        try:
            ours.settimeout(START_SECONDS + limits.decode_seconds * WALL_PER_CPU_SECOND)
            return _write_frames(contents, ours, children)
        except TooMuch as error:
            return str(error)
        except TimeoutError:
            return f"one part of it took longer than decode_seconds = {limits.decode_seconds:g} allow"
        except (Torn, ConnectionError):
            process.wait(DEATH_SECONDS)
            return _explain_end(process.returncode, kind)
        finally:
            process.kill()
            process.wait(DEATH_SECONDS)
            children.running.discard(process)


def _write_frames(contents: Contents, channel: socket.socket, children: Children) -> str:
    for letter, content in read_frames(channel):
        children.progressed_at = time.monotonic()
        match letter:
            case b"M":
                contents.begin(content)
            case b"D":
                contents.write(content)
            case b"E" | b"X":
                contents.finish(content.decode(errors="replace"))
            case b"P":
                return content.decode(errors="replace") or "it cannot be read"
    return ""


def _explain_end(status: int | None, kind: str) -> str:
    return f"the process that reads it was {describe_end(status)}"
