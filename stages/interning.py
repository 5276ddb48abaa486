"""pathlib interns each part of a path. The first releases of Python 3.12, of which Ubuntu 24.04 has one, never free an interned
string (https://github.com/python/cpython/issues/113993). There, a daemon would keep the names of all files that it ever saw:
190 bytes for an image."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

IMMORTAL = 1 << 30  # at least this many references: what Python says of an object that it never frees


class _Sys:
    """The module sys without interning."""

    intern = staticmethod(str)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def is_for_ever() -> bool:
    """Whether this Python never frees an interned string."""
    return sys.getrefcount(sys.intern("".join(("visiond ", "probe")))) >= IMMORTAL


def leave_out_of_paths() -> None:
    """Let pathlib intern nothing. Only sharing is lost: paths are as before."""
    vars(pathlib)["sys"] = _Sys()
