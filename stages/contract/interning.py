"""pathlib interns each part of a path. Python 3.12.0 to 3.12.6 never free an interned string
(https://github.com/python/cpython/issues/113993), so a daemon would keep the name of every file that it has seen: 190 bytes for
each image. This also changes pathlib in a program that uses visiond as a library."""

from __future__ import annotations

import pathlib
import sys
from typing import Any


class _Sys:
    """Stands in for the module sys, but interns nothing."""

    intern = staticmethod(str)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def never_frees() -> bool:
    """Whether this Python never frees an interned string."""
    return (3, 12, 0) <= tuple(sys.version_info[:3]) <= (3, 12, 6)


def stop_in_pathlib() -> None:
    """Stop pathlib from interning. Paths work as before, but equal parts are no longer one string in memory."""
    vars(pathlib)["sys"] = _Sys()
