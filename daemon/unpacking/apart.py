"""Unpacks one file: starts the child, and writes what it sends. Runs in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from math import inf

import msgspec

from daemon.core.hints import quantity
from daemon.core.jobs import Failure
from daemon.unpacking.folder import Contents, TooMuch
from daemon.unpacking.members import Rules
from daemon.unpacking.messages import (
    AllRead,
    Declared,
    FolderEntry,
    Link,
    MemberBegun,
    MemberEnded,
    Piece,
    Torn,
    Twin,
    read_messages,
)
from stages.contract.base import Limits, Reason, advise
from stages.contract.processes import describe_end, environment, python
from stages.images.sandbox import START_SECONDS, WALL_PER_CPU_SECOND, allow_cpu_seconds

MODULE = "daemon.unpacking.child"
DEATH_SECONDS = 2.0
WALL_PER_NICE_SECOND = 3 * WALL_PER_CPU_SECOND  # of the child, which has a lower priority
# Of the kernel, which was out of memory or could not read a page, or of a user.
OF_OTHERS = (signal.SIGKILL, signal.SIGBUS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class UnpackingStopped(Exception):
    """The daemon ends."""


class Interrupted(Exception):
    """The child was killed, or could not start: the file may not be to blame. The message says more."""


class UnpackOutcome(msgspec.Struct, frozen=True):
    """files: in the folder. links: left out. problem: why not everything is there; else empty."""

    files: int
    links: int = 0
    problem: str = ""

    def describe(self, folder: bytes) -> Failure:
        """Why the container itself has no result. folder: where its members are."""
        files = f"{quantity(self.files, 'file')} in {os.fsdecode(os.path.basename(folder))}"
        links = f"; links and devices left out: {self.links:,}" if self.links else ""
        if not self.problem:
            return Failure(Reason.UNPACKED, f"{files if self.files else 'it is empty'}{links}")
        what = files if self.files else "nothing was unpacked"
        between = "; " if self.files or links else ": "
        return Failure(Reason.CONTAINER, f"{what}{links}{between}{self.problem}")


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

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self.running.add(process)
        if self.is_stopped:
            process.kill()


def take_apart(
    fd: int, kind: str, contents: Contents, rules: Rules, limits: Limits, children: Children
) -> UnpackOutcome:
    """Write what is in a file; the caller then gives it its place. Raises Stopped, Interrupted, NoRoom, OSError."""
    try:
        problem = _fill(contents, fd, kind, rules, limits, children)
    except TooMuch as error:
        contents.files = 0
        return UnpackOutcome(0, 0, str(error))
    if contents.missing:
        count = quantity(contents.missing, "other member" if contents.links else "member")
        more = contents.missing - len(contents.left_out)
        named = [*contents.left_out, *([f"and {more:,} more"] if more else [])]
        problem = "; ".join(filter(None, (problem, f"{count} left out: {'; '.join(named)}")))
    return UnpackOutcome(contents.files, contents.links, problem)


def _fill(contents: Contents, fd: int, kind: str, rules: Rules, limits: Limits, children: Children) -> str:
    """Write all members; returns why some are missing, if the file is to blame. Raises Stopped, Interrupted,
    TooMuch, NoRoom, OSError."""
    contents.compare_with(os.fstat(fd).st_size)
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
                env=environment({"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}),
            )
        children.add(process)
        try:
            wall_seconds = START_SECONDS + limits.decode_seconds * WALL_PER_NICE_SECOND
            ours.settimeout(wall_seconds)
            return _write_messages(contents, ours, process.pid, limits, children)
        except TimeoutError as error:  # without SIGXCPU: it had not enough of the processor
            why = f"a part of it took longer than {wall_seconds:g} s, as the machine is busy or a disk hangs"
            raise Interrupted(f"{why}. {_advise_more(limits)}") from error
        except (Torn, ConnectionError) as error:
            if children.is_stopped:
                raise UnpackingStopped from error
            status = _wait(process)
            if status == os.EX_IOERR:
                os.read(fd, 1)  # of its disk: it is refused again, unless that has passed
            return _explain_end(status, limits)
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that fails
                process.wait(DEATH_SECONDS)
            children.running.discard(process)
            contents.finish_open()


def _write_messages(
    contents: Contents, channel: socket.socket, pid: int, limits: Limits, children: Children
) -> str:
    allow_cpu_seconds(pid, START_SECONDS + limits.decode_seconds)
    for message in read_messages(channel):
        allow_cpu_seconds(pid, inf)  # while this process writes, which a slow disk may make long
        children.progressed_at = time.monotonic()
        match message:
            case Declared(files, size):
                contents.expect(files, size)
            case MemberBegun(name, size):
                contents.begin(name, size)
            case Piece(data):
                contents.write(data)
            case MemberEnded(problem):
                contents.finish(problem)
            case Link():
                contents.pass_over()
            case FolderEntry():
                contents.pass_folder()
            case Twin(name, first):
                contents.repeat(name, first)
            case AllRead(problem):
                return problem
        allow_cpu_seconds(pid, limits.decode_seconds)
    return ""


def _explain_slow(limits: Limits) -> str:
    seconds = limits.decode_seconds
    return f"one part of it took longer than decode_seconds = {seconds:g}. {_advise_more(limits)}"


def _advise_more(limits: Limits) -> str:
    return advise(f"decode_seconds = {2 * limits.decode_seconds:g}")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit status."""
    try:
        return process.wait(DEATH_SECONDS)
    except subprocess.TimeoutExpired:  # it has sent nonsense
        return -signal.SIGABRT


def _explain_end(status: int, limits: Limits) -> str:
    """Raises Interrupted."""
    if status == -signal.SIGXCPU:
        return _explain_slow(limits)
    problem = f"the process that reads it {describe_end(status, 'was killed by')}"
    if status > 0 or -status in OF_OTHERS:
        raise Interrupted(problem)
    return problem
