"""System errors that no file causes and that may pass: too few descriptors, a mount that is gone, a full disk."""

from __future__ import annotations

import errno
import os
import socket

RAISE = "raise its limit (LimitNOFILE= in the unit, ulimit -Hn)"
SCARCE = {  # too few file descriptors
    errno.EMFILE: "the daemon cannot open more files (EMFILE); " + RAISE,
    errno.ENFILE: "the machine cannot open more files (ENFILE); raise fs.file-max with sysctl",
}


# A mount that is gone, a disk that was removed, or too little memory.
AWAY = frozenset((
    errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENODEV, errno.ENOMEDIUM, errno.EREMOTEIO, errno.ENOMEM,
))  # fmt: skip

# What stops a start but no configuration can change. An address may be missing (EADDRNOTAVAIL) while a machine boots, and
# in use while another program ends. A read-only file system is not among these: in a systemd unit that is how a folder
# shows that it is missing in ReadWritePaths=.
PASSING = frozenset(
    (
        *SCARCE,
        *AWAY,
        *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EAGAIN, errno.EBUSY),
        *(errno.ENOBUFS, errno.ENOLCK, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
        socket.EAI_AGAIN,  # the resolver does not answer
    )
)


def cause_of(error: OSError) -> str:
    """Why a call failed; for too few descriptors with the fix."""
    return SCARCE.get(error.errno or 0) or error.strerror or str(error)


def find_scarcity() -> int | None:
    """The error number if there are too few descriptors now. SQLite reports that it cannot open a file, but not why."""
    try:
        os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        return error.errno if error.errno in SCARCE else None
    return None
