"""One file is taken apart, by the real child process."""

from __future__ import annotations

import os
import re
import signal
import threading
import zipfile
from pathlib import Path

import pytest

from daemon.jobs import Version
from daemon.unpacking import apart
from daemon.unpacking.apart import Children, Gone, Outcome, Stopped, take_apart
from daemon.unpacking.folder import Most
from daemon.unpacking.members import Rules
from stages.base import Limits
from tests.daemon.unpacking.containers import make_pages, make_tar, make_video, make_zip
from tests.daemon_process import wait_for

IGNORED = re.compile(rb"\..*")
MOST = Most(100, 1 << 30, 200)


class Bench:
    """A file, and what it becomes."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "file.unpacked"
        self.file = folder / "file"
        self.children = Children()

    def take(self, kind: str, data: bytes, most: Most = MOST, limits: Limits | None = None) -> Outcome:
        self.file.write_bytes(data)
        return self.again(kind, most, limits)

    def again(self, kind: str, most: Most = MOST, limits: Limits | None = None) -> Outcome:
        with self.file.open("rb") as file:
            version = Version.of(os.fstat(file.fileno()))
            given = (Rules(), limits or Limits(), most, IGNORED, self.children)
            return take_apart(file.fileno(), kind, os.fsencode(self.target), version, *given)

    @property
    def names(self) -> list[str]:
        files = (path for path in self.target.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.target)) for path in files if not path.name.startswith("."))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "names"),
    [
        ("zip", make_zip({"a.png": b"a", "x/b.png": b"b"}), ["a.png", "x/b.png"]),
        ("tar", make_tar({"a.png": b"a", "x/b.png": b"b"}), ["a.png", "x/b.png"]),
        ("tiff", make_pages("TIFF", 3), ["page-0002.png", "page-0003.png"]),
        ("pdf", make_pages("PDF", 2), ["page-0001.png", "page-0002.png"]),
    ],
)
def test_what_is_in_a_file_comes_into_a_folder(
    bench: Bench, kind: str, data: bytes, names: list[str]
) -> None:
    assert bench.take(kind, data) == Outcome(len(names))
    assert bench.names == names


def test_a_video_becomes_a_frame_for_each_second(bench: Bench) -> None:
    assert bench.take("video", make_video(3)) == Outcome(3)
    assert bench.names == ["at-000000.000s.jpg", "at-000001.000s.jpg", "at-000002.000s.jpg"]


def test_names_never_lead_out_of_the_folder(bench: Bench) -> None:
    files = {"../../up.png": b"1", "/etc/abs.png": b"2", "a/../b.png": b"3", "c\\d.png": b"4"}
    assert bench.take("zip", make_zip(files)) == Outcome(4)
    assert bench.names == ["a/b.png", "c/d.png", "etc/abs.png", "up.png"]
    assert {path.name for path in bench.target.parent.iterdir()} == {"file", "file.unpacked"}


def test_links_are_not_made(bench: Bench) -> None:
    assert bench.take("tar", make_tar({"a.png": b"a"}, links={"b.png": "/etc/passwd"})) == Outcome(1)
    assert bench.names == ["a.png"]


def test_ignored_names_are_left_out_without_a_word(bench: Bench) -> None:
    files = {"__MACOSX/._a.png": b"", ".hidden/a.png": b"", "a.png": b"a"}
    assert bench.take("zip", make_zip(files)) == Outcome(1)


@pytest.mark.parametrize("kind", ["zip", "tar", "pdf", "video"])
def test_a_file_that_is_none_of_its_kind_says_so_and_leaves_nothing(bench: Bench, kind: str) -> None:
    outcome = bench.take(kind, b"nothing of the kind")
    assert outcome.files == 0
    assert outcome.problem
    assert "not permitted" not in outcome.problem
    assert list(bench.target.parent.iterdir()) == [bench.file]


def test_one_damaged_member_costs_no_other(bench: Bench) -> None:
    data = bytearray(make_zip({"a.png": b"a" * 100, "b.png": b"b" * 100}))
    data[36] ^= 0xFF  # in the bytes of the first
    outcome = bench.take("zip", bytes(data))
    assert outcome.files == 1
    assert "1 left out: a.png" in outcome.problem
    assert bench.names == ["b.png"]


def test_a_tar_that_is_cut_gives_what_is_whole(bench: Bench) -> None:
    whole = make_tar({f"{number}.png": os.urandom(20_000) for number in range(4)})
    outcome = bench.take("tar", whole[: len(whole) // 2])
    assert 0 < outcome.files < 4
    assert outcome.problem
    assert len(bench.names) == outcome.files


@pytest.mark.parametrize(
    ("most", "said"),
    [(Most(3, 1 << 30, 200), "set files = 30"), (Most(100, 1 << 20, 200), "set bytes = 10485760")],
)
def test_a_bomb_is_refused(bench: Bench, most: Most, said: str) -> None:
    outcome = bench.take("zip", make_zip({f"{number}": bytes(500_000) for number in range(5)}), most)
    assert said in outcome.problem
    assert outcome.files <= 3


def test_an_encrypted_archive_says_so(bench: Bench) -> None:
    data = bytearray(make_zip({"a.png": b"a"}))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    assert "encrypted" in bench.take("zip", bytes(data)).problem


def test_a_child_that_needs_too_much_memory_is_the_files_fault(bench: Bench) -> None:
    huge = make_pages("PDF", 1).replace(b"[ 0 0 60.0 40.0 ]", b"[ 0 0 9000 9000 ]")
    outcome = bench.take("pdf", huge, limits=Limits(decode_bytes=512 << 20))
    assert outcome.files == 0
    assert outcome.problem


def test_a_folder_of_the_same_version_is_not_made_again(bench: Bench) -> None:
    bench.take("zip", make_zip({"a.png": b"a"}))
    (bench.target / "a.png").unlink()  # moved by on_success, say
    assert bench.again("zip") == Outcome(1)
    assert bench.names == []


def test_a_newer_version_takes_the_folders_place(bench: Bench) -> None:
    bench.take("zip", make_zip({"a.png": b"a", "b.png": b"b"}))
    assert bench.take("zip", make_zip({"b.png": b"2"})) == Outcome(1)
    assert bench.names == ["b.png"]
    assert (bench.target / "b.png").read_bytes() == b"2"


def test_a_folder_of_somebody_else_is_left_alone(bench: Bench) -> None:
    bench.target.mkdir()
    (bench.target / "mine.png").write_bytes(b"mine")
    assert "is in the way" in bench.take("zip", make_zip({"a.png": b"a"})).problem
    assert bench.names == ["mine.png"]


def test_a_file_that_changes_meanwhile_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(*given: object) -> str:
        bench.file.write_bytes(b"another")
        return fill(*given)  # type: ignore[arg-type]

    fill = apart._fill
    monkeypatch.setattr(apart, "_fill", change)
    with pytest.raises(Gone):
        bench.take("zip", make_zip({"a.png": b"a"}))
    assert list(bench.target.parent.iterdir()) == [bench.file]


def test_a_stop_ends_the_child_and_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        wait_for(lambda: bench.children.running, "a child")
        [child] = bench.children.running
        child.send_signal(signal.SIGSTOP)  # in the middle, however fast it is
        bench.children.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        bench.take("zip", make_zip({"a.png": b"a"}))
    thread.join()
    assert not bench.children.running
    assert list(bench.target.parent.iterdir()) == [bench.file]


def test_a_zip_of_a_gigabyte_of_zeros_needs_no_memory_for_them(bench: Bench, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zeros", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("zeros.png", "w", force_zip64=True) as member:
            for _ in range(300):
                member.write(bytes(1 << 20))
    outcome = bench.take("zip", (tmp_path / "zeros").read_bytes(), limits=Limits(decode_bytes=256 << 20))
    assert outcome == Outcome(1)
    assert (bench.target / "zeros.png").stat().st_size == 300 << 20
