r"""Which files and folders an inbox ignores. Patterns mean what they mean in .gitignore, except that the case of letters
does not matter, and that # begins no comment.

They are translated here, as fnmatch knows no folders, and pathspec neither [[:digit:]] nor [\]]."""

from __future__ import annotations

import itertools
import os
import re
import string
import unicodedata
from collections.abc import Iterable

COMPANIONS = (  # files beside images, which are never images themselves
    # settings of photo programs and cameras
    "*.xmp", "*.aae", "*.pp2", "*.pp3", "*.dop", "*.cos", "*.on1", "*.nksc", "*.vrd", "*.dr4", "*.exv", "*.mie", "*.ctg",
    "*.*.json",  # results of visiond, such as a.jpg.json, and what Google has beside photographs
    # what systems and programs keep in each folder
    "Thumbs.db", "ehthumbs.db", "desktop.ini", "Picasa.ini", "ZbThumbnail.info",
)  # fmt: skip
IGNORED = (  # by default
    *COMPANIONS, *(f"!{name}/" for name in COMPANIONS),  # but not folders of these names: images may be in them
    ".*", "*~", "~$*", "*.tmp", "*.temp", "*.swp",
    # unfinished downloads and uploads
    "*.part", "*.partial", "*.crdownload", "*.download", "*.opdownload", "*.filepart", "*.aria2",
    "*.!qB", "*.!ut", "*.!bt", "*.!sync", "*.bts", "*.bc!", "*.jc!", "*.fb!", "*.ob!",
    "*.td", "*.xltd", "*.downloading", "*.fdmdownload", "*.dctmp", "*.ytdl",
    # recycle bins, snapshots and previews of systems and NAS
    "#recycle", "@Recycle", "$RECYCLE.BIN", "RECYCLER", "Recycled", "@sharebin", "Network Trash Folder",
    "Temporary Items", "TheVolumeSettingsFolder", "System Volume Information",
    "LOST.DIR", "FOUND.[0-9][0-9][0-9]",  # what a check of a file system has found
    "#snapshot", "@Recently-Snapshot", "~snapshot", "@eaDir", "@tmp", "__MACOSX", "lost+found",
)  # fmt: skip
EARLIER = (  # the default ones before 0.2, which `ignore` replaced
    ".*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.crdownload", "*.download", "*.swp", "*.filepart",
)  # fmt: skip
OWN = ".visiond-*"  # temporary and other files of the daemon
_FOLDER = b"\0"  # stands behind the path of a folder, as no path contains it
_LETTER = rb"[^/\0]"
# Of an expression: a star, and the character behind it.
_HEAD = re.compile(rb"\.\*(?:\\.|[a-z0-9])?", re.DOTALL)
_CLASS = re.compile(rb"\[:([^]]*):]")
_CLASSES = {  # as git has them
    b"alnum": string.ascii_letters + string.digits,
    b"alpha": string.ascii_letters,
    b"blank": " \t",
    b"cntrl": "".join(map(chr, (*range(1, 32), 127))),
    b"digit": string.digits,
    b"graph": string.ascii_letters + string.digits + string.punctuation,
    b"lower": string.ascii_lowercase,
    b"print": string.ascii_letters + string.digits + string.punctuation + " ",
    b"punct": string.punctuation,
    b"space": " \t\n\r",
    b"upper": string.ascii_uppercase,
    b"xdigit": string.hexdigits,
}


class Ignored:
    """The last pattern that fits decides; the daemon's own files are always ignored. What is in an ignored folder is ignored
    too."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError for one that matches nothing."""
        rules = [rule for pattern in (*patterns, OWN) for rule in _translate(pattern)]
        # From the last to the first: whether it is about a name alone; whether it ignores; one pattern for all in a row.
        self._groups: list[tuple[bool, bool, re.Pattern[bytes]]] = [
            (is_name, ignores, re.compile(_join(text for _, _, text in group), re.DOTALL))
            for (is_name, ignores), group in itertools.groupby(reversed(rules), lambda rule: rule[:2])
        ]

    def ignores(self, path: bytes, *, is_folder: bool) -> bool:
        """Whether an entry of an inbox is ignored. path: in the inbox; the folders that it is in are not ignored."""
        path = path.lower() + _FOLDER * is_folder  # lower only the letters of ASCII
        for is_name, ignores, pattern in self._groups:
            if pattern.fullmatch(path, path.rfind(b"/") + 1 if is_name else 0):
                return ignores
        return False

    def hides(self, path: bytes, *, is_folder: bool = False) -> bool:
        """Whether an entry, or a folder that it is in, is ignored."""
        ends = [found.start() for found in re.finditer(b"/", path)]
        in_folder = any(self.ignores(path[:end], is_folder=True) for end in ends)
        return in_folder or self.ignores(path, is_folder=is_folder)


def _join(expressions: Iterable[bytes]) -> bytes:
    """One for any of them. Those that begin with a star and the same character share these: for dozens of endings such as .xmp,
    the name is gone through once."""
    tails: dict[bytes, list[bytes]] = {}
    for expression in expressions:
        found = _HEAD.match(expression)
        head = found[0] if found else b""
        tails.setdefault(head, []).append(expression.removeprefix(head))
    return b"|".join(b"%b(?:%b)" % (head, b"|".join(each)) for head, each in tails.items())


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
    kept = pattern.rstrip(" ")
    if kept != pattern and (len(kept) - len(kept.rstrip("\\"))) % 2:
        kept += " "  # \ before it
    bare = kept.removeprefix("!")
    if {".", ".."} & set(bare.split("/")):
        raise ValueError(f'"{pattern}" matches nothing: write it relative to the inbox, without . and ..')
    path = bare.removesuffix("/")
    is_name = "/" not in path
    end = _FOLDER + b"?" * (path == bare)
    try:
        glob = path.removeprefix("/")
        if not glob or "\0" in glob:
            raise ValueError("correct it or remove it")
        # Also as it is written: some characters are in neither form.
        forms = {glob, *(unicodedata.normalize(form, glob) for form in ("NFC", "NFD"))}
        return [
            (is_name, bare == kept, _translate_glob(os.fsencode(form), b"." if is_name else b"[^/]") + end)
            for form in forms
        ]
    except ValueError as error:
        raise ValueError(f'"{pattern}" matches nothing: {error}') from error


def _translate_glob(glob: bytes, starred: bytes) -> bytes:
    """A regular expression for git's wildmatch, of the letters in lower case. starred: what a star can stand for, once. Raises
    ValueError for a glob that matches nothing."""
    # git compares the part without wildcards by itself, so that ** behind it is at the start of what is left.
    plain = len(re.split(rb"[*?[\\]", glob, maxsplit=1)[0])
    parts: list[bytes] = []
    at, star = 0, -1
    while at < len(glob):
        letter, behind = glob[at : at + 1], at + 1
        if letter == b"*":
            behind = len(glob) - len(glob[at:].lstrip(b"*"))
            follows = glob[behind : behind + 1]
            if behind - at > 1 and (at == plain or glob[at - 1 : at] == b"/") and follows in (b"", b"/"):
                parts.append(b"(?:.*/)?" if follows else b".*")
                behind, star = behind + 1, -1
                # Behind a part of a name, a slash may follow: for git, ab**//c is ab/c too.
                is_inside = at == plain and glob[at - 1 : at] not in (b"", b"/")
                if is_inside and glob[behind : behind + 1] == b"/" and behind + 1 < len(glob):
                    parts.append(b"/")
                    behind += 1
            else:
                if star >= 0:  # the first place is enough for what is behind it; to try all takes hours
                    parts[star] = b"(?>%b*?" % starred
                    parts.append(b")")
                star = len(parts)
                parts.append(starred + b"*")
        elif letter == b"?":
            parts.append(_LETTER)
        elif letter == b"[":
            part, behind = _translate_set(glob, behind)
            parts.append(part)
        else:
            letter, behind = _read_character(glob, at)
            parts.append(re.escape(letter.lower()))
        at = behind
    return b"".join(parts)


def _read_character(glob: bytes, at: int) -> tuple[bytes, int]:
    """A character that stands for itself, perhaps behind a backslash, and where it ends. Raises ValueError."""
    at += glob[at] == ord("\\")
    letter = glob[at : at + 1]
    if not letter:
        raise ValueError("it ends with a backslash; remove that")
    if letter == b"/" and (glob[at - 1 : at] in (b"", b"/") or at + 1 == len(glob)):
        raise ValueError("write one slash between two names")
    return letter, at + 1


def _translate_set(glob: bytes, at: int) -> tuple[bytes, int]:
    """A regular expression for a set of characters, such as [!a-c[:digit:]], and where it ends. at: behind the [. Raises
    ValueError."""
    negated = glob[at : at + 1] in (b"!", b"^")
    first = at = at + negated
    members: set[int] = set()
    previous = 0  # what a range begins with
    try:
        while at == first or glob[at] != ord("]"):
            if named := _CLASS.match(glob, at):
                members.update(_CLASSES[named[1]].encode())
                at, previous = named.end(), 0
                continue
            is_range = bool(previous) and glob[at] == ord("-") and glob[at + 1] != ord("]")
            at += is_range
            at += glob[at] == ord("\\")
            members.update(range(previous if is_range else glob[at], glob[at] + 1))
            at, previous = at + 1, 0 if is_range else glob[at]
    except IndexError:
        raise ValueError('its [ has no ]; write [[] for the character "["') from None
    except KeyError as error:
        raise ValueError(
            f"[:{os.fsdecode(error.args[0])}:] is none of the classes {os.fsdecode(b', '.join(_CLASSES))}"
        ) from None
    if not glob[first:at].isascii():
        raise ValueError("only ASCII characters can be in [ ]; write a pattern for each of the others")
    folded, neither = set(bytes(members).lower()), {0, ord("/")}
    members = folded | neither if negated else folded - neither
    if not members:
        raise ValueError(
            f"{os.fsdecode(glob[first - 1 - negated : at + 1])} is no character; correct it or remove it"
        )
    return b"[%b%b]" % (b"^" * negated, re.escape(bytes(sorted(members)))), at + 1
