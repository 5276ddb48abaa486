"""What is written, under which names, and what a kill at any moment leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon.config.ignored import Ignored
from daemon.core.files import sync_file_system
from daemon.core.jobs import Version
from daemon.unpacking import folder
from daemon.unpacking.folder import Contents, Mark, Most, NoRoom, TooMuch, choose_target, mark_of
from daemon.unpacking.paths import MARK, plain_path, remove

IGNORED = Ignored([".*", "__MACOSX"]).hides
MOST = Most(100, 1 << 30, 200)
NAMES = (b"a.zip.unpacked", b"a~1.zip.unpacked")
FIRST, SECOND = Version(1, 10, 100, 1000), Version(2, 10, 200, 2000)


class Killed(BaseException):
    pass


class Beside:
    """A folder with a container, which is unpacked there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)

    def choose(self, version: Version, **options: Any) -> tuple[bytes, Mark | None]:
        return choose_target(self.fd, NAMES, version, **{"moved": False, "replaces": True} | options)

    def unpack(
        self, files: Mapping[str, bytes | None], version: Version = FIRST, most: Most = MOST, **options: Any
    ) -> Contents:
        """None: a member that cannot be read."""
        target, mark = self.choose(version, **options)
        with contextlib.closing(Contents(self.fd, target, version, most, IGNORED, mark)) as contents:
            for name, data in files.items():
                contents.begin(name.encode(), len(data or b""))
                contents.write(data or b"")
                contents.finish("" if data is not None else "it is damaged")
            contents.place(is_whole=not contents.missing)
        return contents

    def names(self, target: bytes = NAMES[0]) -> list[str]:
        root = self.path / os.fsdecode(target)
        return sorted(str(path.relative_to(root)) for path in root.rglob("[!.]*") if path.is_file())

    @property
    def entries(self) -> set[str]:
        return set(os.listdir(self.path))


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    place = Beside(tmp_path)
    yield place
    os.close(place.fd)


def test_names_never_lead_out_of_the_folder(beside: Beside) -> None:
    names = ["../../up.png", "/etc/abs.png", "a/../b.png", "c\\d.png", "e\nf.png"]
    assert beside.unpack(dict.fromkeys(names, b"x")).files == 5
    assert beside.names() == ["a/b.png", "c/d.png", "e_f.png", "etc/abs.png", "up.png"]
    assert beside.entries == {"a.zip.unpacked"}


def test_names_that_cannot_be_used_are_left_out_and_named(beside: Beside) -> None:
    names = ["..", "x" * 256, "a.png", "./a.png"]
    contents = beside.unpack(dict.fromkeys(names, b"x"))
    assert (contents.files, contents.missing) == (2, 2)
    assert contents.left_out[0] == "..: its name cannot be used, or another file has it"
    assert beside.names() == ["a.png", "a~2.png"]
    contents = Contents(beside.fd, NAMES[1], FIRST, MOST._replace(path_bytes=1000), IGNORED)
    for name in (b"y" * 255, b"y" * 255 + b"/b.png"):  # whose folder would get too long a name
        contents.begin(name)
        contents.finish()
    assert (contents.files, contents.missing) == (1, 1)
    contents.close()


def test_a_file_and_a_folder_of_one_name_are_both_unpacked_and_the_second_gets_another_name(
    beside: Beside,
) -> None:
    """As e.ppm of a folder e.ppm, and before it; nothing depends on which of them is damaged."""
    names = ["e.ppm", "e.ppm/f.ppm", "e.ppm/sub/f.ppm", "e~2.ppm", "x/g.ppm", "x", "e.ppm/f.ppm/h.ppm"]
    for damaged in (None, 0, 1):
        contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
        for number, name in enumerate(names):
            contents.begin(name.encode())
            contents.write(b"x")
            contents.finish("it is damaged" if number == damaged else "")
        contents.place(is_whole=True)
        places = [
            "e.ppm",
            "e~2.ppm/f.ppm",
            "e~2.ppm/sub/f.ppm",
            "e~2~2.ppm",
            "x/g.ppm",
            "x~2",
            "e~2.ppm/f~2.ppm/h.ppm",
        ]
        assert beside.names() == sorted(set(places) - ({places[damaged]} if damaged is not None else set()))
        contents.close()
        shutil.rmtree(beside.path / "a.zip.unpacked")


def test_a_hard_link_is_a_copy_of_the_file_wherever_that_went(beside: Beside) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
    for name, data in ((b"e.ppm", b"1"), (b"e.ppm/f.ppm", b"2"), (b"e.ppm", b"3")):
        contents.begin(name)
        contents.write(data)
        contents.finish()
    contents.repeat(b"a.ppm", b"e.ppm")
    contents.repeat(b"b.ppm", b"e.ppm/f.ppm")
    contents.place(is_whole=True)
    folder = beside.path / "a.zip.unpacked"
    assert [(folder / name).read_bytes() for name in ("a.ppm", "b.ppm")] == [b"3", b"2"]


def test_folders_are_not_nested_without_end() -> None:
    assert plain_path(b"a/" * 99 + b"b.png", 1000) == b"a/" * 99 + b"b.png"
    assert plain_path(b"a/" * 100 + b"b.png", 1000) == b""


def test_a_mark_that_somebody_else_wrote_is_none(beside: Beside) -> None:
    (beside.path / "a.zip.unpacked").mkdir()
    for content in (b"", b"[" * 100_000, b'{"x":' * 5000):
        (beside.path / "a.zip.unpacked" / os.fsdecode(MARK)).write_bytes(content)
        assert beside.choose(FIRST) == (NAMES[1], None)


def test_a_link_that_somebody_puts_on_the_way_is_not_followed(beside: Beside, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
    [inside] = [path for path in tmp_path.iterdir() if path != outside]
    (inside / "x").symlink_to(outside)
    contents.begin(b"x/a.png")
    contents.finish()
    contents.close()
    assert contents.files == 0
    assert not list(outside.iterdir())


def test_ignored_names_are_left_out_without_a_message(beside: Beside) -> None:
    contents = beside.unpack({"__MACOSX/._a.png": b"", ".hidden/a.png": b"", "a.png": b"a"})
    assert (contents.files, contents.missing) == (1, 0)
    assert beside.names() == ["a.png"]


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (
            Most(3, 1 << 30, 200),
            "more than 3 files, folders and links. To allow it, set most_files = 30",
        ),
        (
            Most(9, 1000, 200),
            "more than 1,000 bytes. To allow it, set most_bytes = 10000",
        ),
    ],
)
def test_limits_leave_nothing(beside: Beside, most: Most, said: str) -> None:
    with pytest.raises(TooMuch, match=re.escape(said)):
        beside.unpack({f"{number}": bytes(300) for number in range(4)}, most=most)
    assert beside.entries == set()


def test_what_a_container_says_is_checked_before_anything_is_written(beside: Beside) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(5, 1000, 200), IGNORED)
    with pytest.raises(TooMuch, match="files"):
        contents.expect(6, 0)
    with pytest.raises(TooMuch, match="bytes"):
        contents.expect(1, 1001)
    with pytest.raises(TooMuch, match="bytes"):
        contents.begin(b"hole.png", 1001)
    contents.close()


def test_links_and_ignored_members_count_towards_the_limit(beside: Beside) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(3, 1000, 200), IGNORED)
    contents.pass_over()
    contents.begin(b".hidden")
    contents.finish()
    contents.pass_over()
    with pytest.raises(TooMuch):
        contents.pass_over()
    contents.close()


@pytest.mark.parametrize("refused", [b"b:1.png", b"x:"])
def test_a_name_that_the_file_system_refuses_costs_no_other_file(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, refused: bytes
) -> None:
    """As exFAT and SMB refuse a colon."""

    def refuse(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: bytes, *arguments: Any, **options: Any) -> Any:
            if path == refused:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return call(path, *arguments, **options)

        return called

    monkeypatch.setattr(os, "open", refuse(os.open))
    monkeypatch.setattr(os, "mkdir", refuse(os.mkdir))
    contents = beside.unpack(dict.fromkeys(["a.png", "b:1.png", "c.png", "x:/d.png"], b"x"))
    assert (contents.files, contents.missing) == (3, 1)
    assert "its name cannot be used" in contents.left_out[0]


def test_a_file_is_closed_once_even_if_its_disk_then_refuses_its_bytes(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does for a quota. By the second time the number may be that of another thread's file."""
    contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
    contents.begin(b"a.png")
    closed: list[int] = []
    close = os.close

    def refuse(fd: int) -> None:
        closed.append(fd)
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", refuse)
        with pytest.raises(OSError, match="quota"):
            contents.finish()
    contents.close()
    assert len(closed) == 1


def test_a_disk_that_is_nearly_full_is_left_alone(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(3, 1 << 60, 200), IGNORED)
    with pytest.raises(NoRoom):
        contents.expect(1, 1 << 50)
    contents.close()
    monkeypatch.setattr(folder, "KEPT_SHARE", 1)
    monkeypatch.setattr(folder, "ROOM_BYTES", 1 << 60)
    with pytest.raises(NoRoom) as trouble:
        beside.unpack({"a.png": b"a"})
    assert not trouble.value.is_new
    assert beside.entries == set()


def test_a_member_that_did_not_end_is_dropped(beside: Beside) -> None:
    with contextlib.closing(Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)) as contents:
        contents.begin(b"a.png")
        contents.write(b"a")
        contents.finish()
        contents.begin(b"b.png")
        contents.write(b"the first half")
        contents.finish_open()
        contents.place(is_whole=False)
    assert beside.names() == ["a.png"]
    assert contents.left_out == ["b.png: it is not complete"]


def test_another_attempt_adds_only_what_is_missing(beside: Beside) -> None:
    """The files of the first attempt may have been moved since: they must not come again."""
    beside.unpack({"a.png": b"a", "x/b.png": None, "c.png": b"c"})
    (beside.path / "a.zip.unpacked/a.png").unlink()
    assert beside.unpack({"a.png": b"a", "x/b.png": b"b", "c.png": b"c"}).files == 3
    assert beside.names() == ["c.png", "x/b.png"]
    assert mark_of(beside.fd, NAMES[0]) == Mark(FIRST, 3)


def test_a_newer_version_takes_the_folders_place(beside: Beside) -> None:
    beside.unpack({"a.png": b"a", "b.png": b"b"})
    beside.unpack({"b.png": b"2"}, SECOND)
    assert beside.names() == ["b.png"]
    assert (beside.path / "a.zip.unpacked/b.png").read_bytes() == b"2"
    assert beside.entries == {"a.zip.unpacked"}


def test_files_that_wait_to_be_moved_are_not_replaced_by_a_newer_version(beside: Beside) -> None:
    """The first archive has been deleted: they are the only copy."""
    beside.unpack({"a.png": b"a"}, replaces=False)
    beside.unpack({"a.png": b"2"}, SECOND, replaces=False)
    assert beside.names() == ["a.png"]
    assert beside.names(NAMES[1]) == ["a.png"]
    assert (beside.path / "a.zip.unpacked/a.png").read_bytes() == b"a"
    assert beside.choose(FIRST)[0] == NAMES[0]
    assert beside.choose(SECOND)[0] == NAMES[1]


def test_a_folder_that_is_empty_again_is_used_again(beside: Beside) -> None:
    beside.unpack({"a.png": b"a"}, replaces=False)
    (beside.path / "a.zip.unpacked/a.png").unlink()
    beside.unpack({"a.png": b"2"}, SECOND, replaces=False)
    assert beside.entries == {"a.zip.unpacked"}


def test_a_folder_of_somebody_else_is_left_alone(beside: Beside) -> None:
    (beside.path / "a.zip.unpacked").mkdir()
    (beside.path / "a.zip.unpacked/mine.png").write_bytes(b"mine")
    beside.unpack({"a.png": b"a"})
    assert beside.names() == ["mine.png"]
    assert beside.names(NAMES[1]) == ["a.png"]


def test_a_file_that_the_daemon_has_moved_since_is_known_again(beside: Beside) -> None:
    beside.unpack({"a.png": b"a"})
    moved = FIRST._replace(inode=9, ctime_ns=9)
    assert beside.choose(moved, moved=True)[1] == Mark(FIRST, 1)
    assert beside.choose(moved)[1] is None


def test_a_folder_is_on_the_disk_before_its_mark_and_its_mark_before_its_name(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, set[str]]] = []

    def note(fd: int) -> None:
        seen.append((os.fsdecode(MARK) in os.listdir(fd), beside.entries & {"a.zip.unpacked"}))
        sync_file_system(fd)

    monkeypatch.setattr(folder, "sync_file_system", note)
    beside.unpack({"a.png": b"a"})
    assert seen == [(False, set()), (True, set())]


@pytest.mark.parametrize("case", ["new", "more", "newer"])
def test_a_kill_at_any_step_leaves_what_the_next_attempt_completes(
    beside: Beside, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each call of the system in turn, until it comes through. Files that the first attempt delivered are
    taken away at once, as a quick daemon would: none may come a second time."""
    taken: list[str] = []

    def take() -> None:
        for name in beside.names() if (beside.path / "a.zip.unpacked").exists() else []:
            taken.append(name)
            (beside.path / "a.zip.unpacked" / name).unlink()

    def attempt(step: int) -> bool:
        """Whether it came through."""
        calls = iter(range(10_000))

        def dying(real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(calls) == step:
                    raise Killed
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patches:
            for name in ("rename", "mkdir", "fsync"):
                patches.setattr(os, name, dying(getattr(os, name)))
            patches.setattr(folder, "sync_file_system", dying(sync_file_system))
            patches.setattr(folder, "remove", dying(remove))
            patches.setattr(Contents, "close", lambda self: None)  # a killed process cleans up nothing
            try:
                files: dict[str, bytes | None] = {"a.png": b"a", "x/b.png": b"b", "y/c.png": b"c"}
                version = SECOND if case == "newer" else FIRST
                if not (mark := beside.choose(version)[1]) or not mark.is_whole:
                    beside.unpack(files, version)
            except Killed:
                return False
        return True

    if case != "new":
        beside.unpack({"a.png": b"a", "x/b.png": None, "y/c.png": None})
        take()
    if case == "newer":
        taken.clear()
    step = 0
    while not attempt(step):
        take()
        step += 1
    take()
    assert step > 5
    assert sorted(taken) == ["a.png", "x/b.png", "y/c.png"]
    attempt(-1)
    assert beside.entries == {"a.zip.unpacked"}


def test_two_members_of_one_name_are_both_unpacked_and_under_the_same_names_each_time(beside: Beside) -> None:
    """At the first attempt, the first one is damaged."""
    for first in (b"1", None, b"1"):
        contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
        for data in (first, b"2", b"3"):
            contents.begin(b"x/a.png")
            contents.write(data or b"")
            contents.finish("" if data else "it is damaged")
        assert contents._paths == {b"x/a.png", b"x/a~2.png", b"x/a~3.png"} - (
            set() if first else {b"x/a.png"}
        )
        contents.close()


def test_what_macos_packs_beside_files_is_left_out_whatever_is_ignored(beside: Beside) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, MOST, Ignored([]).hides)
    for name in (b"__MACOSX/x/._a.jpg", b"x/._a.jpg", b"x/a.jpg"):
        contents.begin(name)
        contents.finish()
    assert (contents.files, contents.missing) == (1, 0)
    contents.close()


def test_folders_count_as_files_and_as_room(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, said in ((Most(50, 1 << 30, 200), "files, folders"), (Most(100, 100_000, 200), "bytes")):
        contents = Contents(beside.fd, NAMES[0], FIRST, most, IGNORED)
        with pytest.raises(TooMuch, match=said):
            contents.begin(b"d/" * 60 + b"a.png")
        contents.close()
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(5, 1 << 30, 200), IGNORED)
    for _ in range(5):
        contents.pass_folder()
    with pytest.raises(TooMuch):
        contents.pass_folder()
    contents.close()


def test_long_names_have_a_limit(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_NAME_BYTES", 100)
    with pytest.raises(TooMuch, match="names of its files"):
        beside.unpack({f"{'x' * 40}{number}": b"" for number in range(3)})


def test_what_is_many_times_as_large_as_its_container_is_refused(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "ANY_RATIO_BYTES", 1000)
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(9, 1 << 40, 200, 10), IGNORED)
    contents.compare_with(500)
    contents.begin(b"a.png", 5000)
    with pytest.raises(TooMuch, match=r"10 times its own bytes\. To allow it, set most_ratio = 100"):
        contents.write(bytes(5001))
    contents.compare_with(10)
    with pytest.raises(TooMuch, match="To allow it, set most_ratio = 300 under"):
        contents.expect(1, 3000)
    contents.close()


@pytest.mark.parametrize("by", ["bytes", "size", "folders", "files"])
def test_the_disk_is_looked_at_while_a_container_is_unpacked(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, Most(900, 1 << 40, 2000), IGNORED)
    monkeypatch.setattr(folder, "ROOM_BYTES", 1 << 60)
    monkeypatch.setattr(folder, "KEPT_SHARE", 1)

    def unpack() -> None:
        for number in range(4 if by == "folders" else 0):
            contents.begin(b"%d/" % number + b"d/" * 80 + b"a.png")
        for number in range(300 if by == "files" else 0):  # without a byte
            contents.begin(b"%d.png" % number)
        contents.begin(b"a.png", 1 << 30 if by == "size" else 0)
        contents.write(bytes(2 << 20 if by == "bytes" else 0))

    with pytest.raises(NoRoom):
        unpack()
    contents.close()


def test_a_hard_link_becomes_a_file_of_its_own(beside: Beside) -> None:
    contents = Contents(beside.fd, NAMES[0], FIRST, MOST, IGNORED)
    for data in (b"1", b"2"):
        contents.begin(b"x/a.png")
        contents.write(data)
        contents.finish()
    contents.repeat(b"b.png", b"./x/a.png")
    contents.repeat(b"c.png", b"elsewhere.png")
    contents.repeat(b"d.png", b".hidden/a.png")
    contents.repeat(b".hidden/b.png", b".hidden/a.png")
    assert (contents.files, contents.links) == (3, 1)
    assert contents.left_out == [
        "c.png: it is a link to elsewhere.png, which is not in it",
        "d.png: it is a link to .hidden/a.png, which the inbox ignores; pack it without that one",
    ]
    contents.place(is_whole=True)
    assert (
        beside.path / "a.zip.unpacked/b.png"
    ).read_bytes() == b"2"  # a tar's later file replaces the earlier one
    assert (beside.path / "a.zip.unpacked/b.png").stat().st_nlink == 1


def test_a_backslash_is_a_separator_but_not_as_half_a_letter() -> None:
    assert plain_path("フォルダ\\ソ.png".encode(), 200) == "フォルダ/ソ.png".encode()
    assert plain_path("ソ.png".encode("cp932"), 200) == "ソ.png".encode("cp932")


def test_the_name_of_a_folder_and_what_was_added_to_one_are_on_the_disk(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, added, fsync = [], [], os.fsync

    def note_name(fd: int) -> None:
        named.append((os.fstat(fd).st_ino == beside.path.stat().st_ino, "a.zip.unpacked" in beside.entries))
        fsync(fd)

    def note_added(fd: int) -> None:
        target = beside.path / "a.zip.unpacked"
        if target.exists() and os.fstat(fd).st_ino == target.stat().st_ino:
            added.append(beside.names())
        sync_file_system(fd)

    beside.unpack({"a.png": b"a", "b.png": None})
    monkeypatch.setattr(os, "fsync", note_name)
    monkeypatch.setattr(folder, "sync_file_system", note_added)
    beside.unpack({"a.png": b"a", "b.png": b"b"})
    assert named[-1] == (True, True)
    assert added == [["a.png", "b.png"]]


def test_a_link_to_a_file_of_an_earlier_attempt_is_a_file_like_it(beside: Beside) -> None:
    beside.unpack({"a.png": b"one", "b.png": None})
    target, mark = beside.choose(FIRST)
    with contextlib.closing(Contents(beside.fd, target, FIRST, MOST, IGNORED, mark)) as contents:
        contents.begin(b"a.png", 3)
        contents.write(b"one")
        contents.finish()
        contents.repeat(b"c.png", b"a.png")
        contents.place(is_whole=True)
    assert contents.missing == 0
    assert (beside.path / os.fsdecode(target) / "c.png").read_bytes() == b"one"
