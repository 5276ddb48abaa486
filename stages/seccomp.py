"""Which system calls a decoder's child keeps, by seccomp(2); all others fail with EPERM.

With these no file can be opened, made or removed, no socket be had, no program be started and no other process be touched.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
NUMBER_AT, MACHINE_AT = 0, 4  # bytes into struct seccomp_data
X32 = 0x40000000  # from here on, the numbers of x86-64's second set of system calls

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as linux/audit.h calls them
# What the interpreter, its allocator and the image libraries' threads need: numbers on x86-64 and on 64-bit ARM.
KEPT = {
    **{
        "read": (0, 63),
        "write": (1, 64),
        "close": (3, 57),
        "fcntl": (72, 25),
        "lseek": (8, 62),
        "fstat": (5, 80),
        "newfstatat": (262, 79),
    },
    **{"recvfrom": (45, 207), "sendto": (44, 206), "ppoll": (271, 73), "poll": (7, 73)},
    **{
        "mmap": (9, 222),
        "munmap": (11, 215),
        "mprotect": (10, 226),
        "mremap": (25, 216),
        "madvise": (28, 233),
        "brk": (12, 214),
    },
    **{"futex": (202, 98), "clone": (56, 220), "clone3": (435, 435), "set_robust_list": (273, 99), "rseq": (334, 293)},
    **{
        "sched_yield": (24, 124),
        "sched_getaffinity": (204, 123),
        "sysinfo": (99, 179),
        "getpid": (39, 172),
        "gettid": (186, 178),
    },
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132)},
    **{"getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261), "getrusage": (98, 165)},
    **{"clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "restart_syscall": (219, 128)},
    **{"getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94)},
}


def keep_system_calls() -> None:
    """Give up all but KEPT, for good, where the kernel lets us. Needs PR_SET_NO_NEW_PRIVS, and no thread beside this one."""
    machine = os.uname().machine
    if machine not in MACHINES:
        return
    program = b"".join(struct.pack("HBBI", *step) for step in compile_filter(MACHINES[machine], list(MACHINES).index(machine)))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def compile_filter(machine: int, column: int) -> list[tuple[int, int, int, int]]:
    """Instructions of classic BPF: code, steps to skip if true, if false, and the operand."""
    numbers = sorted({pair[column] for pair in KEPT.values()})
    count = len(numbers)
    return [
        (LOAD, 0, 0, MACHINE_AT),
        (JUMP_IF_EQUAL, 0, count + 2, machine),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_AT_LEAST, count, 0, X32),
        *((JUMP_IF_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
