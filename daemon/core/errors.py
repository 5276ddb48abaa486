"""Errors that concern more than one image, each with its exit status.

Exit statuses are those of sysexits.h, so that systemd and scripts can distinguish them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.system.scarcity import PASSING, cause_of
from daemon.system.signals import SHELL_OFFSET

if TYPE_CHECKING:
    from daemon.core.jobs import JobStatus


class VisiondError(Exception):
    """A sentence for the user: what is wrong and how to fix it."""

    exit_status = os.EX_SOFTWARE


class ConfigError(VisiondError):
    """The configuration is unusable; `problems` lists everything that is wrong with it."""

    exit_status = os.EX_CONFIG

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class InboxMoved(VisiondError):
    """The sidecars to make a ledger from are of inboxes that are not configured."""

    exit_status = os.EX_CONFIG


class AlreadyRunning(VisiondError):
    exit_status = os.EX_TEMPFAIL


class LedgerDamaged(VisiondError):
    exit_status = os.EX_DATAERR


class IdentityDamaged(LedgerDamaged):
    """The file `identity` is unreadable. The ledger itself may be sound."""


class OtherLedger(IdentityDamaged):
    """The file `identity` names another ledger than the one beside it."""


class LedgerUnusable(VisiondError, OSError):
    """The ledger cannot be read or written: permissions, or a full or failing disk. As far as we know it is not damaged."""

    exit_status = os.EX_IOERR


class LedgerTooNew(VisiondError):
    exit_status = os.EX_CONFIG


class ModelsUnusable(VisiondError):
    """A pack of weights is missing, changed or unsuitable."""

    exit_status = os.EX_CONFIG


class HubUnavailable(ModelsUnusable):
    """The model hub is busy. The same command may succeed later."""

    exit_status = os.EX_TEMPFAIL


class WrongArgument(VisiondError):
    """The command line names something that does not exist, or is ambiguous."""

    exit_status = os.EX_USAGE


class NotWritable(VisiondError):
    """A file that a command should write."""

    exit_status = os.EX_CANTCREAT


class KernelsMissing(VisiondError):
    """Some GPU kernels could not be compiled. The stages run all the same."""

    exit_status = os.EX_UNAVAILABLE

    def __init__(self, compiled: int, known: int, problems: Sequence[str]) -> None:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(
            f"{compiled} of {known} GPU kernels are compiled. The first problem: {problems[0]}{more}. The daemon works "
            "without the others, but more slowly. Triton needs a C compiler and Python's headers (on Debian: "
            "apt install gcc python3-dev) and room in the folder of [state] path."
        )


class NotPrinted(VisiondError):
    """Writing to standard output failed."""

    exit_status = os.EX_IOERR


class ReaderGone(VisiondError):
    """The reader of standard output closed it, as `head` does. Nothing is printed about that."""

    exit_status = SHELL_OFFSET + signal.SIGPIPE  # as a shell reports a program that the signal ended


class MissingLibrary(VisiondError):
    """An optional dependency that the command needs."""

    exit_status = os.EX_UNAVAILABLE


class NothingFound(VisiondError):
    """No image in the ledger matches."""

    exit_status = os.EX_NOINPUT


class NotRunning(VisiondError):
    exit_status = os.EX_UNAVAILABLE


class NotAnswering(NotRunning):
    """A daemon took the request but did not answer, or not in time; it may have executed it, or still do so."""

    exit_status = os.EX_TEMPFAIL


class NotPermitted(VisiondError):
    exit_status = os.EX_NOPERM

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} belongs to another user; run this as the daemon's user or as root.")


class SourceChanged(OSError):
    """An image's file or object is not the version any more that has the result."""


class Incomplete(VisiondError):
    """`run --once` has ended before everything was done. outcomes: images by status, PENDING included."""

    def __init__(self, text: str, outcomes: Counter[JobStatus]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class InboxUnreadable(Incomplete):
    """An inbox or a folder in it could not be read, so there may be files that nobody has seen."""

    exit_status = os.EX_IOERR


class ResultsUnwritable(Incomplete):
    """The ledger or results could not be written for a while."""

    exit_status = os.EX_IOERR


class InboxUnwritable(Incomplete):
    """All results are written, but a source could not be moved or deleted."""

    exit_status = os.EX_IOERR


class SinkBehind(Incomplete):
    """Results are written, but some sink does not have all of them."""

    exit_status = os.EX_IOERR


class Unfinished(Incomplete):
    """A signal stopped `run --once` before every image was finished."""

    def __init__(self, text: str, outcomes: Counter[JobStatus], signum: int) -> None:
        super().__init__(text, outcomes)
        self.exit_status = SHELL_OFFSET + signum  # as a shell reports a program that the signal ended


class ResultsLost(VisiondError):
    """The system accepted writes and then failed to write them to the disk."""

    exit_status = os.EX_IOERR


class NoWorkersLeft(VisiondError):
    """Every worker of a segment has failed too often, so nothing can be processed."""

    exit_status = os.EX_UNAVAILABLE


class SearchUnusable(VisiondError):
    """The index of the search cannot be used or made; the message says why."""

    exit_status = os.EX_UNAVAILABLE


class Loss(StrEnum):
    """Why a worker had to be replaced."""

    DIED = "died"
    TIMEOUT = "timeout"  # a batch took too long
    LOAD = "load"  # lost before it was ready
    SHARING = "sharing"  # a worker was lost that shared its GPU
    MEMORY = "memory"  # its GPU had too little memory for it
    WRONG = "wrong"  # its answers to known images were wrong


class Refusal(StrEnum):
    """Why an upload was not taken."""

    REQUEST = "request"  # it could not be understood
    CUT_OFF = "cut"  # it ended before its body did
    INBOX = "inbox"  # no inbox takes uploads, or none of this name
    CHANGED = "changed"  # the file of this name has other bytes
    SIZE = "size"
    FORMAT = "format"
    BUSY = "busy"  # too many uploads at once
    WAITING = "waiting"  # too many images of the inbox wait
    DISK = "disk"  # too little room
    AWAY = "away"  # the inbox cannot be written
    LEDGER = "ledger"  # it cannot be read


class WorkerLost(Exception):
    """A worker was lost. `began`: it had begun the batch, and no other worker can be the cause, so one of the images may be."""

    def __init__(self, name: str, cause: str, *, timed_out: bool = False, began: bool = True) -> None:
        super().__init__(f"{name}: {cause}")
        self.cause = cause
        self.timed_out = timed_out
        self.began = began


def may_pass(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, is a temporary error of the system."""
    cause: BaseException | None = error
    while cause and not (isinstance(cause, OSError) and cause.errno in PASSING):
        cause = cause.__cause__
    return cause is not None


def explain_passing(error: Exception) -> str:
    """What the system refuses at a place that does not expect it; empty if that will not pass."""
    if not isinstance(error, OSError) or error.errno not in PASSING:
        return ""
    return f"{error.filename or 'A call of the system'}: {cause_of(error)}. Try again later."


def exit_status_of(error: BaseException) -> int:
    """Of an error that ends the process. systemd never repeats a start after EX_CONFIG, so what may pass gets EX_IOERR."""
    status: int = getattr(error, "exit_status", os.EX_SOFTWARE)
    return os.EX_IOERR if status == os.EX_CONFIG and may_pass(error) else status


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The single errors of a group, VisiondErrors first."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.extend(leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return iter(sorted(flat, key=lambda error: not isinstance(error, VisiondError)))
