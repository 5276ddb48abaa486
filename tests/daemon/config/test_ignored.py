"""What an inbox ignores."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from daemon.config.ignored import EARLIER, IGNORED, Ignored, describe_added, ignored_by
from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from tests.daemon_process import seeded


def hidden(patterns: list[str], *paths: str) -> list[str]:
    return [path for path in paths if ignored_by(patterns).hides(os.fsencode(path))]


NAS = [
    *("#recycle/a.jpg", "$RECYCLE.BIN/S-1-5/a.jpg", "x/@eaDir/a.jpg/SYNOPHOTO_THUMB_M.jpg", "@Recycle/a.jpg"),
    *(
        "@Recently-Snapshot/a.jpg",
        "#snapshot/a.jpg",
        ".snapshot/a.jpg",
        "~snapshot/a.jpg",
        "__MACOSX/._a.jpg",
    ),
    *(
        ".Trash-1000/files/a.jpg",
        ".Trashes/501/a.jpg",
        "lost+found/#12.jpg",
        "System Volume Information/a.jpg",
    ),
    *(
        "Recycled/a.jpg",
        "Network Trash Folder/a.jpg",
        "Temporary Items/a.jpg",
        "LOST.DIR/1.jpg",
        "FOUND.000/a.jpg",
    ),
    *("@sharebin/a.jpg", "TheVolumeSettingsFolder/a.jpg"),
    *(".DS_Store", "RECYCLER/a.jpg", "recycler/a.jpg", "$Recycle.Bin/a.jpg"),
]
UNFINISHED = [
    *(".a.jpg.Kx81fZ", "a.jpg.part", "a.JPG.PART", "a.jpg.crdownload", "a.jpg.Crdownload", "a.tmp", "A.TMP"),
    *(
        "a.jpg.download/a.jpg",
        "a.opdownload",
        "a.jpg.filepart",
        "a.jpg.!qB",
        "a.jpg.aria2",
        ".~lock.a.jpg",
        "~$a.jpg",
    ),
    *("a.!sync", "a.bts", "a.bc!", "a.jc!", "a.fb!", "a.td", "a.xltd", "a.!bt", "a.ob!", "a.dctmp", "a.ytdl"),
    *("a.jpg.fdmdownload", "a.jpg.p.downloading"),
]
COMPANIONS = [
    *(
        "a.xmp",
        "a.jpg.xmp",
        "A.JPG.XMP",
        "x/IMG_1.AAE",
        "a.nef.pp3",
        "a.cr2.dop",
        "a.nksc",
        "Thumbs.db",
        "x/THUMBS.DB",
    ),
    *("desktop.ini", "Picasa.ini", ".picasa.ini", "a.jpg.json", "a.png.supplemental-metadata.json"),
]
TAKEN = [
    "a.xmp/a.jpg",
    "a.jpg.json/a.jpg",
    "a.json",
    "xmp.jpg",
    "a.thm",  # a JPEG beside a video
    "a.jpg",
    "recycle/a.jpg",
    "snapshot/a.jpg",
    "part.jpg",
    "a.part.jpg",
    "a~1.jpg",
    "#1.jpg",
    "$1.jpg",
    "@a.jpg",
    "FOUND.0000/a.jpg",
    "sharebin/a.jpg",
]


@pytest.mark.parametrize("path", [*NAS, *UNFINISHED])
def test_recycle_bins_snapshots_and_unfinished_files_are_ignored_whatever_else_is(path: str) -> None:
    assert hidden([], path) == hidden(["*.png"], path) == [path]


def test_names_like_theirs_are_not_ignored() -> None:
    assert hidden([], *TAKEN) == []


@pytest.mark.parametrize("path", COMPANIONS)
def test_files_beside_images_are_ignored_but_no_folders_of_such_names(path: str) -> None:
    assert hidden([], path, f"{path}/a.jpg") == [path] + [f"{path}/a.jpg"] * path.startswith(".")
    assert hidden(["!*.xmp", "!*.json"], path) == [path] * (not path.lower().endswith((".xmp", ".json")))


def test_a_hidden_folder_is_ignored_also_if_it_is_named_like_a_file_beside_images() -> None:
    assert hidden([], ".a.xmp/b.jpg", "#recycle/a.xmp/b.jpg") == [".a.xmp/b.jpg", "#recycle/a.xmp/b.jpg"]


@pytest.mark.parametrize(
    ("patterns", "ignored", "taken"),
    [
        (["private/*"], "private/a.jpg private/sub/a.jpg Private/A.JPG", "x/private/a.jpg private2/a.jpg"),
        (["**/private/*"], "private/a.jpg x/private/y/a.jpg", "private"),
        (["/a.jpg"], "a.jpg", "x/a.jpg"),
        (["raw/"], "raw/a.jpg x/raw/a.jpg", "raw"),
        (["raw/**/b.jpg"], "raw/b.jpg raw/x/y/b.jpg", "raw/a.jpg b.jpg"),
        (["raw/**", "!raw/a.jpg"], "raw/b.jpg raw/x/b.jpg", "raw/a.jpg"),
        (["ab**//*.jpg"], "ab/a.jpg", "ab/x/a.jpg abx/a.jpg"),
        (["*.png", "!keep.png"], "a.png x/b.png", "keep.png x/keep.png"),
        (["private/*", "!private/a.jpg"], "private/b.jpg", "private/a.jpg"),
        (["!*.tmp", "!#recycle"], "a.part", "a.tmp #recycle/a.jpg"),
        (["[ab].jpg", "[^x]1.jpg"], "a.jpg y/b.jpg c1.jpg", "c.jpg x1.jpg"),
        (["#1/*", "#2"], "#1/a.jpg #2/a.jpg", "#3/a.jpg"),
        (["Entwu\u0308rfe/*"], "Entwu\u0308rfe/a.jpg Entw\u00fcrfe/a.jpg", "Entwurfe/a.jpg"),
        (["B\u00fccher/*"], "B\u00fccher/a.jpg Bu\u0308cher/a.jpg", "Bucher/a.jpg"),
        (["scan[!0-9]", "raw[^x]old.jpg"], "scans/a.jpg raw-old.jpg", "scan/a.jpg scan1/a.jpg raw/old.jpg"),
        (["img[[:digit:]].jpg", "*.psd "], "img1.jpg x.psd", "imgx.jpg"),
        (["*a*a*a*a*a*a*b"], "aaaaaaab", "a" * 250),
        (["!.*", "!.visiond-*"], ".visiond-1.tmp", ".a.jpg"),
    ],
)
def test_patterns_mean_what_they_mean_in_gitignore(patterns: list[str], ignored: str, taken: str) -> None:
    assert hidden(patterns, *ignored.split(), *taken.split()) == ignored.split()


NAMES = [
    "a",
    "b",
    "ab",
    "a-b",
    "a]b",
    "a^b",
    "a\\b",
    "x.TMP",
    "private",
    "p q",
    "q ",
    "A1.jpg",
    "[z]",
    "#r",
    "é",
    "a\tb",
]
PIECES = [
    *("a", "b", "ab", "private", ".tmp", "1", "é", "z", " ", "\\ ", "-", "^", ":", "]", "\\", "\\["),
    *("*", "*", "**", "***", "?", "/", "/", "/**/", "**/", "/**", "[/]", "[", "[!", "[^"),
    *(
        "[a-c]",
        "[!a]",
        "[^0-9]",
        "[]-]",
        "[\\]]",
        "[a\\-c]",
        "[a-\\c]",
        "[\\^]",
        "[+--]",
        "[A-Z]",
        "[a-[:digit:]]",
    ),
    *(
        "[[:digit:]]",
        "[[:upper:]_]",
        "[![:alpha:]]",
        "[[:punct:]]",
        "[[:space:]]",
        "[[:xdigit:]-]",
        "[[:word:]]",
    ),
]


def test_git_says_the_same_of_random_patterns_and_trees(tmp_path: Path) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not installed: make tools")
    chance = seeded()
    paths = {"/".join(chance.choices(NAMES, k=chance.randint(1, 4))) for _ in range(80)}
    folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    files = paths - folders
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    git = ["git", "-C", str(tmp_path), "-c", "core.ignoreCase=true", "-c", "core.excludesFile="]
    subprocess.run([*git, "init", "--quiet"], check=True)
    command = [*git, "check-ignore", "--no-index", "-z", "--stdin"]
    before: list[str] = []
    for _ in range(400):
        begin, end = chance.choice(["", "", "/", "*"]), chance.choice(["", "", "/", " "])
        pattern = begin + "".join(chance.choices(PIECES, k=chance.randint(1, 4))) + end
        patterns = [*chance.choice([[], ["*", "!a/"], before]), pattern]
        (tmp_path / ".git" / "info" / "exclude").write_text("\n".join(patterns))
        asked = subprocess.run(
            command, input="\0".join(paths | folders), capture_output=True, text=True, check=False
        )
        assert asked.returncode in (0, 1), (asked, patterns)  # 1: it ignores nothing
        try:
            rules = Ignored(patterns)
            before = [*before[-5:], pattern]
        except ValueError as refused:
            if "only ASCII" in str(
                refused
            ):  # in [ ] git compares an accent byte by byte, and may find something
                continue
            # it matches nothing
            rules = Ignored(patterns[:-1])
        ours = {file for file in files if rules.hides(os.fsencode(file))}
        ours |= {folder for folder in folders if rules.hides(os.fsencode(folder), is_folder=True)}
        assert ours == set(filter(None, asked.stdout.split("\0"))), patterns


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "!",
        "/",
        "//",
        "a//b",
        "a//",
        " ",
        "[",
        "[]",
        "./private/*",
        "../x",
        "a\\",
        "x[/]y",
        "[[:word:]]",
        "[éè]",
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="matches nothing"):
        parse({"inbox": [{"ignore": [pattern]}]}, tmp_path)


def test_a_list_that_replaced_the_default_one_is_named_where_that_matters() -> None:
    assert describe_added([]) == describe_added([*EARLIER, "*.png"]) == ""
    assert describe_added(["*.png", *(f"!{pattern}" for pattern in EARLIER)]) == ""
    added = describe_added(["*.png", *EARLIER[1:]])
    assert added.endswith('so .* are ignored too; to make an exception, add "!.*"')
    assert set(EARLIER) <= set(IGNORED)


@pytest.mark.parametrize("name", ["\u212b.ppm", "\ufa19", "\u2126"])
def test_a_name_of_characters_that_have_another_normal_form_is_ignored_as_it_is_written(name: str) -> None:
    assert Ignored([name]).ignores(os.fsencode(name), is_folder=False)
