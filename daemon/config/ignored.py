"""Which files and folders an inbox ignores. Patterns mean what they mean in .gitignore, except that the case of letters
does not matter, and that # begins no comment."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import unicodedata
from collections.abc import Iterable

IGNORED = (  # by default
    *(".*", "*~", "~$*", "*.tmp", "*.temp", "*.swp"),
    # unfinished downloads and uploads
    *(
        "*.part",
        "*.partial",
        "*.crdownload",
        "*.download",
        "*.opdownload",
        "*.filepart",
        "*.aria2",
        "*.!qB",
        "*.!ut",
    ),
    # recycle bins, snapshots and previews of systems and NAS
    *(
        "#recycle",
        "@Recycle",
        "$RECYCLE.BIN",
        "RECYCLER",
        "System Volume Information",
    ),
    *("#snapshot", "@Recently-Snapshot", "~snapshot", "@eaDir", "@tmp", "__MACOSX", "lost+found"),
)
EARLIER = (  # the default ones before 0.2, which `ignore` replaced
    *(
        ".*",
        "*~",
        "*.tmp",
        "*.temp",
        "*.part",
        "*.partial",
        "*.crdownload",
        "*.download",
        "*.swp",
        "*.filepart",
    ),
)
OWN = ".visiond-*"  # temporary and other files of the daemon
_FOLDER = b"(?P<ps_d>/)"  # the end of a folder, as translated


class Ignored:
    """The last pattern that fits decides; the daemon's own files are always ignored. What is in an ignored folder is ignored
    too."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError for one that matches nothing."""
        rules = [rule for pattern in (*patterns, OWN) for rule in _translate(pattern)]
        # From the last to the first: whether it is about a name alone; whether it ignores; one pattern for all in a row.
        self._groups: list[tuple[bool, bool, re.Pattern[bytes]]] = [
            (is_name, ignores, re.compile(b"|".join(b"(?:%b)" % text for _, _, text in group), re.DOTALL))
            for (is_name, ignores), group in itertools.groupby(reversed(rules), lambda rule: rule[:2])
        ]

    def ignores(self, path: bytes, *, is_folder: bool) -> bool:
        """Whether an entry of an inbox is ignored. path: in the inbox; the folders that it is in are not ignored."""
        path = path.lower()  # of ASCII letters
        for is_name, ignores, pattern in self._groups:
            subject = path[path.rfind(b"/") + 1 :] if is_name else path
            if pattern.fullmatch(subject) or (
                is_folder and not is_name and pattern.fullmatch(subject + b"/")
            ):
                return ignores
        return False

    def hides(self, path: bytes, *, is_folder: bool = False) -> bool:
        """Whether an entry, or a folder that it is in, is ignored."""
        ends = [at for at, byte in enumerate(path) if byte == ord("/")]
        in_folder = any(self.ignores(path[:end], is_folder=True) for end in ends)
        return in_folder or self.ignores(path, is_folder=is_folder)


def ignored_by(patterns: Iterable[str]) -> Ignored:
    """What an inbox with these patterns of its own ignores."""
    return Ignored((*IGNORED, *patterns))


def describe_added(patterns: Iterable[str]) -> str:
    """What an inbox with these patterns of its own ignores too, and did not before 0.2; empty if nothing."""
    named = {pattern.removeprefix("!") for pattern in patterns}
    added = [pattern for pattern in EARLIER if pattern not in named] if named else []
    if not added:
        return ""
    return (
        f"its ignore adds to the default list (before 0.2 it replaced it), so {', '.join(added)} are ignored too; "
        f'to make an exception, add "!{added[-1]}"'
    )


def check_patterns(patterns: list[str]) -> list[str]:
    """Raises ValueError for one that matches nothing."""
    Ignored(patterns)
    return patterns


def _translate(pattern: str) -> list[tuple[bool, bool, bytes]]:
    """Whether it is about a name alone, whether it ignores, and a regular expression; two if its accents can be written in
    two ways. Raises ValueError."""
    bare = pattern.removeprefix("!")
    if {".", ".."} & set(bare.split("/")):
        raise ValueError(f'"{pattern}" matches nothing: write it relative to the inbox, without . and ..')
    forms = {os.fsencode(unicodedata.normalize(form, bare)).lower() for form in ("NFC", "NFD")}
    if bare and not set(bare) & set("/[\\"):
        return [(True, bare == pattern, os.fsencode(fnmatch.translate(os.fsdecode(form)))) for form in forms]
    paths = [_translate_path(form) for form in forms]
    if not all(paths):
        raise ValueError(f'"{pattern}" matches nothing: correct it or remove it')
    return [(False, bare == pattern, path) for path in paths]


def _translate_path(pattern: bytes) -> bytes:
    """A regular expression; empty for a pattern that matches nothing. Folders end with a slash."""
    # Only here: that takes as long as the rest of this package.
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    bare = pattern.rstrip(b"/")
    if bare.split(b"/")[-1] == b"**":  # all that is in a folder, and not the folder itself
        pattern = bare + b"/*" + pattern[len(bare) :]
    if pattern[:1] in (b"#", b"!"):
        pattern = b"\\" + pattern
    try:
        translated = GitIgnoreSpecPattern.pattern_to_regex(pattern)[0] or b""
        re.compile(translated)
    except (ValueError, re.error):
        return b""
    if translated in (b".", _FOLDER):  # any entry, or any folder
        translated = b".+" + translated.strip(b".")
    return translated.replace(_FOLDER, b"/")
