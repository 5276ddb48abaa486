"""Confines a child that reads users' files: limits on memory, CPU time and files, and, by seccomp(2), the few system calls
that it needs. All others fail with EPERM.

The child can then not open, create, remove or look up a file, make a socket, start a program or a process,
reach another process, or change its own limits. Landlock forbids files and connections once more, also on machines
whose numbers of system calls are not listed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import os
import resource
import signal
import struct
import time
from math import ceil, inf
from pathlib import Path

from stages.contract.base import Limits
from stages.contract.processes import die_with

START_SECONDS = 30.0  # of a child
WALL_PER_CPU_SECOND = 2.0  # a child may wait for the processor as long as it runs on it
DETAIL_CHARACTERS = 300  # of what a library says of a file
OPEN_FILES = 32
CPU_CLOCK = 2  # of a process, in the number of its clock (linux/posix-timers.h)
# What Pillow and Python import only for some files.
LATE = ("copy", "colorsys", "encodings.latin_1", "encodings.utf_16", "encodings.ascii", "encodings.cp437")

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
# Opcodes of classic BPF.
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, MACHINE_AT = 0, 4  # bytes into struct seccomp_data
FIRST_AT, SECOND_AT = 16, 24  # the low half of an argument
CLONE_THREAD = 0x10000
X32 = 0x40000000  # from here on, the numbers of x86-64's second set of system calls

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # from linux/audit.h
# What the interpreter, its allocator and the image libraries' threads need: numbers on x86-64 and on 64-bit ARM.
KEPT = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80),
    "recvfrom": (45, 207), "sendto": (44, 206), "ppoll": (271, 73), "poll": (7, 73),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sysinfo": (99, 179), "getpid": (39, 172), "gettid": (186, 178),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "getrlimit": (97, 163), "getrusage": (98, 165),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "restart_syscall": (219, 128),
    "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
# Allowed for some arguments only: the position of the argument, the test that it must pass, and the operands of the test.
KEPT_IN_PART = {
    # clone: threads, but no process, which would outlive this one.
    (56, 220): (FIRST_AT, JUMP_IF_ANY_BIT, (CLONE_THREAD,)),
    # fcntl, without F_SETOWN.
    (72, 25): (
        SECOND_AT,
        JUMP_IF_EQUAL,
        (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC),
    ),
}
# clone3's flags are in memory, which a filter cannot read; with ENOSYS the C library uses clone.
CLONE3 = (435, 435)

CREATE_RULESET, RESTRICT_SELF = 444, 446  # of Landlock, on every machine
ALL_FILES = (1 << 13, 1 << 14, 1 << 15, 1 << 15, 1 << 16)  # accesses that versions 1, 2, … know, plus one
ALL_NETWORK, ALL_SCOPES = 0b11, 0b11  # TCP from version 4 on; foreign sockets and signals from version 6 on


def confine(parent: int, limits: Limits) -> None:
    """Give up what decoding does not need, and die with the parent."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # The parent decides; a terminal signals the whole group.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a read-only /proc
        # Out of memory, the kernel should kill this process first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    die_with(parent)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower_limit(resource.RLIMIT_AS, limits.decode_bytes)


def seal() -> None:
    """From here on the libraries' warnings are dropped, no file can be written and,
    if the kernel supports it, none opened. So what the libraries import only when they need it is imported before."""
    for module in LATE:
        importlib.import_module(module)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    lower_limit(resource.RLIMIT_FSIZE, 0)
    forbid_files()
    keep_system_calls()


def lower_limit(which: int, most: int) -> None:
    """Set a resource limit for good, unless a lower one is in force."""
    _, hard = resource.getrlimit(which)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (limit, limit))


def allow_cpu_seconds(pid: int, seconds: float) -> None:
    """Make the kernel send SIGXCPU to a child when it has used this much more CPU time (the kernel counts whole
    seconds). The child itself may not do this. math.inf: as much as it wants."""
    with contextlib.suppress(OSError):  # it has died
        _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
        most = hard
        if seconds != inf:
            used = time.clock_gettime(~pid << 3 | CPU_CLOCK)
            most = ceil(used + seconds) if hard == resource.RLIM_INFINITY else min(ceil(used + seconds), hard)
        resource.prlimit(pid, resource.RLIMIT_CPU, (most, hard))


def keep_system_calls() -> None:
    """Give up all system calls except KEPT for good, if the kernel can. Needs PR_SET_NO_NEW_PRIVS and a single thread."""
    machine = os.uname().machine
    if machine not in MACHINES:
        return
    program = b"".join(
        struct.pack("HBBI", *step)
        for step in compile_filter(MACHINES[machine], list(MACHINES).index(machine))
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def forbid_files() -> None:
    """Give up every access to files and the network that Landlock knows, if the kernel has it. What is open stays so.
    Needs PR_SET_NO_NEW_PRIVS."""
    system_call = ctypes.CDLL(None).syscall
    version = system_call(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    files = ALL_FILES[min(version, len(ALL_FILES)) - 1] - 1
    network, scopes = ALL_NETWORK if version >= 4 else 0, ALL_SCOPES if version >= 6 else 0
    rules = struct.pack("QQQ", files, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = system_call(CREATE_RULESET, rules, len(rules), 0)
    if ruleset >= 0:
        system_call(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def compile_filter(machine: int, column: int) -> list[tuple[int, int, int, int]]:
    """Instructions of classic BPF: code, instructions to skip if true, if false, and the operand."""
    steps = [
        (LOAD, 0, 0, MACHINE_AT),
        (JUMP_IF_EQUAL, 1, 0, machine),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
        (JUMP_IF_EQUAL, 0, 1, CLONE3[column]),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for numbers, (argument, test, operands) in KEPT_IN_PART.items():
        steps += [(JUMP_IF_EQUAL, 0, 2 + 2 * len(operands), numbers[column]), (LOAD, 0, 0, argument)]
        for operand in operands:
            steps += [(test, 0, 1, operand), (RETURN, 0, 0, ALLOW)]
        steps.append((RETURN, 0, 0, REFUSE))
    for number in sorted({numbers[column] for numbers in KEPT.values()}):
        steps += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return [*steps, (RETURN, 0, 0, REFUSE)]
