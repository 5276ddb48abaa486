"""Sees every system call by which a process changes files, and if a test wants that also those by which it reads
them, before it happens, and makes it fail if a test wants that.

The kernel asks us (seccomp's user notification, Linux 5.5), so the program under test is the real one,
including SQLite's C code. As a command, this module says whether that can be done here:

    python -m tests.faults.syscalls    exit 0 if it can
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

# of x86-64, by number; the argument that is its path, or None where the first argument is a descriptor
CALLS = {
    1: ("write", None),
    2: ("open", 0),
    18: ("write", None),  # pwrite64
    20: ("write", None),  # writev
    74: ("fsync", None),
    75: ("fsync", None),  # fdatasync
    76: ("truncate", 0),
    77: ("truncate", None),  # ftruncate
    82: ("rename", 1),
    83: ("mkdir", 0),
    86: ("link", 1),
    87: ("unlink", 0),
    88: ("link", 1),  # symlink
    257: ("open", 1),  # openat
    263: ("unlink", 1),  # unlinkat
    264: ("rename", 3),  # renameat
    306: ("syncfs", None),
    316: ("rename", 3),  # renameat2
    437: ("open", 1),  # openat2
}
READS = {
    0: ("read", None),
    4: ("stat", 0),
    5: ("stat", None),  # fstat
    6: ("stat", 0),  # lstat
    17: ("read", None),  # pread64
    217: ("list", None),  # getdents64
    262: ("stat", 1),  # newfstatat
    295: ("read", None),  # preadv
    332: ("stat", 1),  # statx
}
NUMBER = struct.Struct("=I")
SECCOMP, SET_MODE_FILTER, NEW_LISTENER, NO_NEW_PRIVS = 317, 1, 8, 38
ALLOW, USER_NOTIFY = 0x7FFF0000, 0x7FC00000
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06


@cache
def is_supported() -> bool:
    if "COVERAGE_PROCESS_CONFIG" in os.environ:  # of `make coverage`: a process that it measures hangs here
        return False
    return (
        subprocess.run(
            [sys.executable, "-m", "tests.faults.syscalls"], capture_output=True, check=False
        ).returncode
        == 0
    )


class Call(NamedTuple):
    name: str
    path: bytes


class Supervisor:
    """Asks `decide` about each call on a file below `folder`, one at a time: 0 lets it happen;
    any other value is the error with which it fails.

    A program is put under it by `submit(path)` in its own process, as a forked daemon does (tests/forking.py)."""

    def __init__(self, folder: Path, decide: Callable[[Call], int], *, reads: bool = False) -> None:
        """reads: also about the calls by which files are read."""
        self._known = CALLS | READS if reads else CALLS
        self.calls: list[Call] = []
        self.asker = 0  # the thread that makes the present call
        self._folder = os.fsencode(folder) + b"/"
        self._decide = decide
        self.path = folder / "supervisor"
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        if not is_supported():
            import pytest  # the command does without it, which takes longer to import than all the rest

            pytest.skip("the kernel cannot be asked about system calls here")
        self.path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every process under it must have ended."""
        self._thread.join(40)
        self._server.close()
        assert error or not self._thread.is_alive(), "the supervised program has not ended"

    def _supervise(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            connection.sendall(b"".join(map(NUMBER.pack, self._known)))
            connection.shutdown(socket.SHUT_WR)
            listener = socket.recv_fds(connection, 1, 1)[1][0]
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while poll.poll()[0][1] & select.POLLIN:
            notice = bytearray(80)
            with contextlib.suppress(FileNotFoundError):  # it was killed in the meantime
                fcntl.ioctl(listener, RECEIVE, notice)
                number, pid, call, *arguments = struct.unpack("=QI4xi12x6Q", notice)
                fault = self._judge(pid, call, arguments)
                fcntl.ioctl(
                    listener,
                    SEND,
                    bytearray(struct.pack("=QqiI", number, 0, -fault, 0 if fault else CONTINUE)),
                )
        os.close(listener)

    def _judge(self, pid: int, number: int, arguments: list[int]) -> int:
        name, position = self._known[number]
        try:
            path = b"" if position is None else _read_string(pid, arguments[position])
            if not path.startswith(b"/"):  # it is below a folder that is open, or is open itself
                opened = os.readlink(b"/proc/%d/fd/%d" % (pid, arguments[position - 1 if position else 0]))
                path = os.path.join(opened, path) if path else opened
        except OSError:
            return 0
        if not path.startswith(self._folder):
            return 0
        self.calls.append(Call(name, path))
        self.asker = pid
        return self._decide(self.calls[-1])


def _read_string(pid: int, address: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        page = 4096 - address % 4096  # its target may not exist
        text = memory.read(page)
        return (text if b"\0" in text else text + memory.read(4096)).split(b"\0")[0]


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("yes", ctypes.c_ubyte),
        ("no", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def install(numbers: Sequence[int] = tuple(CALLS)) -> int:
    """Let the kernel ask about these calls of this process and its children from now on;
    returns the descriptor to listen on."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, "the system calls' numbers are those of x86-64")
    checks = [
        _Instruction(JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)
    ]
    program = [
        _Instruction(LOAD, 0, 0, 0),
        *checks,
        _Instruction(RETURN, 0, 0, ALLOW),
        _Instruction(RETURN, 0, 0, USER_NOTIFY),
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    filters = _Program(len(program), (_Instruction * len(program))(*program))
    listener = int(libc.syscall(SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(filters)))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses to ask about system calls")
    return listener


def submit(path: str) -> None:
    """Put this process under the supervisor at this path."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rb") as told:
            numbers = [number for (number,) in NUMBER.iter_unpack(told.read())]
        listener = install(numbers)
        socket.send_fds(connection, [b"!"], [listener])
    os.close(listener)


if __name__ == "__main__":
    install()
