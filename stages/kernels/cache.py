"""The folder of compiled kernels: what has been compiled there, and who is compiling. Imports no torch.

Triton writes each compiled kernel there, under a digest of everything that it was compiled from. It has no
locks: processes that need the same kernel at the same time all compile it. So one process compiles everything
for all workers of a host (daemon/workers/compiler.py), and holds the folder's lock for as long as it does.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from stages.contract.base import StageSpec

OLDEST_GPU = (8, 0)  # Ampere; for older ones Triton needs minutes to compile a kernel
LONGEST_WAIT_SECONDS = 600.0  # then workers stop waiting, and compile for themselves
POLL_SECONDS = 0.02
LIBRARIES = ("triton", "torch")  # torch decides the version of Triton, whatever its package is called


def mark_of(folder: Path, spec: StageSpec, capability: str) -> Path:
    """The file whose existence means that all kernels of a stage have been compiled into a folder, for GPUs of
    a compute capability ("9.0"). It has another name when the code, Triton or the weights change."""
    # Without its batch size, which follows the memory that is free at a start: no kernel depends on it.
    settings = [spec.dtype, sorted(spec.options.items())]
    made_from = [spec.name, spec.backend, spec.fingerprint, settings, capability, digest_code()]
    return folder / f"visiond-{spec.name}-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}"


@functools.cache
def digest_code() -> str:
    """A digest of the code that decides how kernels are compiled: all of the stages, and the libraries."""
    digest = hashlib.sha256(repr([find_version(library) for library in LIBRARIES]).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def find_version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def can_compile_for(capability: str) -> bool:
    """Whether this Triton compiles kernels for GPUs of a compute capability."""
    return find_spec("triton") is not None and tuple(map(int, capability.split("."))) >= OLDEST_GPU


def try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until the last process that has it closes it; None if another
    process compiles there. Without locks in the file system, nobody waits. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass
    return fd


def wait_for_compiler(folder: str) -> None:
    """Wait until no process compiles kernels into a folder. Gives up after LONGEST_WAIT_SECONDS."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # nobody has compiled anything yet
        return
    try:
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while not _is_free(fd) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        os.close(fd)


def _is_free(fd: int) -> bool:
    """Whether no process compiles. A file system without locks counts as free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
