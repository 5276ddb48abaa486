"""What can go wrong above the level of one image, named by what is wrong, with the exit status it ends in.

Exit statuses are those of sysexits.h, so that systemd and scripts can tell them apart.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.system.signals import SHELL_OFFSET

if TYPE_CHECKING:
    from daemon.jobs import JobStatus


class VisiondError(Exception):
    """A sentence for the user: what is wrong and how to mend it."""

    exit_status = os.EX_SOFTWARE


class ConfigError(VisiondError):
    """The configuration cannot be used; `problems` lists all that is wrong with it."""

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
    """The file that says which ledger belongs here cannot be read. The ledger itself may be sound."""


class OtherLedger(IdentityDamaged):
    """The file that says which ledger belongs here names another one than the one that is there."""


class LedgerUnusable(VisiondError, OSError):
    """The ledger is whole for all we know, but cannot be read or written: rights, a full or failing disk. It may pass."""

    exit_status = os.EX_IOERR


class LedgerTooNew(VisiondError):
    exit_status = os.EX_CONFIG


class ModelsUnusable(VisiondError):
    """A pack of weights is missing, altered or unfit."""

    exit_status = os.EX_CONFIG


class WrongArgument(VisiondError):
    """The command line names what there is not, or more than one thing."""

    exit_status = os.EX_USAGE


class NotWritable(VisiondError):
    """A file that a command was to write."""

    exit_status = os.EX_CANTCREAT


class NotPrinted(VisiondError):
    """Standard output cannot be written."""

    exit_status = os.EX_IOERR


class ReaderGone(VisiondError):
    """Whoever read standard output has had enough: nobody's fault, and nothing to say of it."""

    exit_status = SHELL_OFFSET + signal.SIGPIPE  # as a shell tells of a program that the signal ended


class MissingLibrary(VisiondError):
    """An optional dependency that the command needs."""

    exit_status = os.EX_UNAVAILABLE


class NothingFound(VisiondError):
    """No image in the ledger answers to what was asked for."""

    exit_status = os.EX_NOINPUT


class NotRunning(VisiondError):
    exit_status = os.EX_UNAVAILABLE


class NotAnswering(NotRunning):
    """A daemon took the request, and it is not known whether it will be done."""

    exit_status = os.EX_TEMPFAIL


class NotPermitted(VisiondError):
    exit_status = os.EX_NOPERM

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} belongs to another user; run this as the daemon's user or as root.")


class Incomplete(VisiondError):
    """`run --once` has ended, but not everything is done. outcomes: how many images ended how, and how many are PENDING."""

    def __init__(self, text: str, outcomes: Counter[JobStatus]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class InboxUnreadable(Incomplete):
    """There may be files in an inbox that nobody has seen."""

    exit_status = os.EX_IOERR


class InboxUnwritable(Incomplete):
    """Results are written, but not every source is where it belongs."""

    exit_status = os.EX_IOERR


class SinkBehind(Incomplete):
    """Results are written, but some sink does not have all of them."""

    exit_status = os.EX_IOERR


class Unfinished(Incomplete):
    """`run --once` was stopped by a signal before every image had its end."""

    def __init__(self, text: str, outcomes: Counter[JobStatus], signum: int) -> None:
        super().__init__(text, outcomes)
        self.exit_status = SHELL_OFFSET + signum  # as a shell reports a program that the signal ended


class ResultsLost(VisiondError):
    """The system could not write to the disk what it had taken for written."""

    exit_status = os.EX_IOERR


class NoWorkersLeft(VisiondError):
    """Every worker of a segment has failed too often: nothing can be processed any more."""

    exit_status = os.EX_UNAVAILABLE


class WorkerLost(Exception):
    """A worker went away. `began`: it had the batch in its hands, and to itself, so one of the images may be the cause."""

    def __init__(self, name: str, cause: str, *, timed_out: bool = False, began: bool = True) -> None:
        super().__init__(f"{name}: {cause}")
        self.cause = cause
        self.timed_out = timed_out
        self.began = began
