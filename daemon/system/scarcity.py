"""Errors of the system that are no file's fault and may pass: too few descriptors, a mount that has gone away."""

from __future__ import annotations

import errno
import os

RAISE = "raise its limit (LimitNOFILE= in the unit, ulimit -Hn)"
SCARCE = {  # descriptors, which are lacking for now: no file's fault
    errno.EMFILE: "the daemon may open no more files at once (EMFILE); " + RAISE,
    errno.ENFILE: "the machine may open no more files at once (ENFILE); raise fs.file-max with sysctl",
}


# What the system says of a mount that has gone away, of a disk that was pulled, or where memory is short for now: no file's
# fault, and it may pass.
AWAY = frozenset(
    (
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENODEV, errno.ENOMEDIUM, errno.EREMOTEIO, errno.ENOMEM),
    )
)


def cause_of(error: OSError) -> str:
    """Why the system refused something; where descriptors are lacking, with what to do."""
    return SCARCE.get(error.errno or 0) or error.strerror or str(error)


def find_scarcity() -> int | None:
    """The error that opening a file meets now, where descriptors are lacking: SQLite says that it could not, but not why."""
    try:
        os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        return error.errno if error.errno in SCARCE else None
    return None
