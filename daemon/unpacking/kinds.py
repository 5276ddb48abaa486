"""Which files are unpacked, by their names."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from daemon.errors import MissingLibrary

FOLDER = b".unpacked"  # ends the name of the folder with what was in a file
SUFFIXES: dict[str, tuple[bytes, ...]] = {
    "zip": (b".zip", b".cbz"),
    "tar": (b".tar", b".tar.gz", b".tgz", b".tar.bz2", b".tbz2", b".tar.xz", b".txz"),
    "tiff": (b".tif", b".tiff"),
    "pdf": (b".pdf",),
    "video": (b".mp4", b".m4v", b".mov", b".mkv", b".webm", b".avi", b".mpg", b".mpeg", b".wmv"),
}
ARCHIVES = ("zip", "tar")
LIBRARIES = {"pdf": "pypdfium2", "video": "av"}  # of the extra `documents`


def kind_of(path: bytes, wanted: Collection[str]) -> str:
    """The kind of a file, if it is one of those that are wanted; else "". An archive that was in an archive stays as it
    is: otherwise a file of some kilobytes could become as many files as it likes."""
    name = path.lower()
    is_inside = any(part.endswith(FOLDER) for part in path.split(b"/")[:-1])
    return next(
        (
            kind
            for kind, suffixes in SUFFIXES.items()
            if kind in wanted and name.endswith(suffixes) and not (is_inside and kind in ARCHIVES)
        ),
        "",
    )


def check_libraries(wanted: Collection[str]) -> None:
    """Raises MissingLibrary."""
    for kind, library in LIBRARIES.items():
        if kind in wanted and find_spec(library) is None:
            raise MissingLibrary(
                f'[[inbox]] unpack = ["{kind}"] needs {library}, which the extra documents has: '
                "pip install 'visiond[documents]'."
            )
