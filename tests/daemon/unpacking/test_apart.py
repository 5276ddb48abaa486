"""One file is unpacked, by the real child process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from daemon.config.ignored import Ignored
from daemon.core.jobs import Version
from daemon.core.messages import LENGTH, frame
from daemon.unpacking.apart import Children, Interrupted, UnpackingStopped, UnpackOutcome, take_apart
from daemon.unpacking.folder import Contents, Most, choose_target
from daemon.unpacking.members import Rules
from daemon.unpacking.messages import AllRead, Piece, Torn, read_messages
from stages.contract.base import Limits
from tests.daemon.unpacking.containers import (
    make_pages,
    make_raw_zip,
    make_sparse_tar,
    make_tar,
    make_video,
    make_zip,
)
from tests.daemon_process import wait_for
from tests.stages.images.layouts import directory, gray, reverse_bits, tiff_file

IGNORED = Ignored([".*"]).hides
MOST = Most(100, 1 << 30, 200)


class Targets(Children):
    """Children that get signals as soon as they are there."""

    signals: tuple[signal.Signals, ...] = ()
    stops = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        super().add(process)
        for number in self.signals:
            process.send_signal(number)
        if self.stops:
            self.stop()


class Bench:
    """A file, and what it becomes."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "file.unpacked"
        self.file = folder / "file"
        self.children = Targets()

    def take(self, kind: str, data: bytes, most: Most = MOST, limits: Limits | None = None) -> UnpackOutcome:
        self.file.write_bytes(data)
        return self.again(kind, most, limits)

    def again(self, kind: str, most: Most = MOST, limits: Limits | None = None) -> UnpackOutcome:
        parent = os.open(self.target.parent, os.O_RDONLY)
        with self.file.open("rb") as file, contextlib.ExitStack() as stack:
            stack.callback(os.close, parent)
            version = Version.of(os.fstat(file.fileno()))
            names = (b"file.unpacked", b"file~1.unpacked")
            target, mark = choose_target(parent, names, version, moved=False, replaces=True)
            contents = Contents(parent, target, version, most, IGNORED, mark)
            stack.enter_context(contextlib.closing(contents))
            outcome = take_apart(file.fileno(), kind, contents, Rules(), limits or Limits(), self.children)
            if outcome.files:
                contents.place(is_whole=not outcome.problem)
            return outcome

    @property
    def names(self) -> list[str]:
        files = (path for path in self.target.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.target)) for path in files if not path.name.startswith("."))

    @property
    def left(self) -> set[str]:
        return {path.name for path in self.target.parent.iterdir()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("kind", "data", "names"),
    [
        ("zip", make_zip({"a.png": b"a", "x/b.png": b"b"}), ["a.png", "x/b.png"]),
        ("tar", make_tar({"a.png": b"a", "x/b.png": b"b"}), ["a.png", "x/b.png"]),
        ("tiff", make_pages("TIFF", 2), ["page-0001.png", "page-0002.png"]),
        ("pdf", make_pages("PDF", 2), ["page-0001.png", "page-0002.png"]),
        ("video", make_video([0, 1]), ["at-000000.000s.jpg", "at-000001.000s.jpg"]),
    ],
)
def test_what_is_in_a_file_is_unpacked_into_a_folder(
    bench: Bench, kind: str, data: bytes, names: list[str]
) -> None:
    assert bench.take(kind, data) == UnpackOutcome(len(names))
    assert bench.names == names
    assert bench.left == {"file", "file.unpacked"}


def test_pages_of_more_than_8_bits_are_read_as_single_pictures_are(bench: Bench) -> None:
    """The second page has a layout that Pillow does not know, and the third one that is not read."""
    values = gray()[..., None] / 255
    pages = [
        directory(values, bits=32, kind=3, how="lzw"),
        directory(1 - values, bits=16, photometric=0),
        directory(values, bits=8, photometric=32844),
    ]
    outcome = bench.take("tiff", tiff_file(pages, "<"))
    assert bench.names == ["page-0001.png", "page-0002.png"]
    for name in bench.names:
        with Image.open(bench.target / name) as page:
            assert abs(np.asarray(page.convert("L")).astype(int) - gray()).max() <= 1
    assert "LogL is not supported" in str(outcome)


@pytest.mark.parametrize("how", ["none", "lzw"])
@pytest.mark.parametrize("bits", [1, 8, 16])
def test_pages_of_a_big_endian_bigtiff_or_with_reversed_bits_have_their_pixels(
    bench: Bench, bits: int, how: str
) -> None:
    values = (gray()[..., None] > 127) * 1.0
    page = directory(values, bits=bits, how=how)
    big = directory(values, bits=bits, how=how, order=">")
    for data in (tiff_file([reverse_bits(page)] * 2, "<"), tiff_file([big, big], ">", big=True)):
        assert bench.take("tiff", data) == UnpackOutcome(2)
        for name in bench.names:
            with Image.open(bench.target / name) as shown:
                assert np.array_equal(np.asarray(shown.convert("L")), 255 * values[..., 0])


SPY = """
import os, sys
from daemon.unpacking import child, members

class Refusal:
    def find_spec(self, name, path=None, target=None):
        os._exit(77)

def seal(honest=child.seal):
    honest()
    sys.meta_path.insert(0, Refusal())

def walk(file, rules):
    try:
        {deed}
    except OSError as error:
        raise members.Unusable(error.strerror)
    raise members.Unusable("it was possible")
    yield

child.seal = seal
if {deed!r} != "pass":
    members.WALKERS["zip"] = walk
child.main(sys.argv[1:])
"""


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the child run `deed` after its seal, and end if it imports anything then."""

    def install(deed: str) -> None:
        folder = tmp_path / ".spy"
        folder.mkdir()
        (folder / "spying_child.py").write_text(SPY.format(deed=deed))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr("daemon.unpacking.apart.MODULE", "spying_child")

    return install


@pytest.mark.parametrize("deed", ["open('/etc/passwd')", "os.stat('/etc/passwd')", "os.fork()"])
def test_the_process_that_unpacks_is_sealed(bench: Bench, spy: Callable[[str], None], deed: str) -> None:
    spy(deed)
    outcome = bench.take("zip", make_zip({"a.png": b"a"}))
    assert outcome.problem == "Operation not permitted"


def test_nothing_is_imported_after_the_seal(bench: Bench, spy: Callable[[str], None]) -> None:
    spy("pass")
    names = ["写真/ソ.jpg".encode("cp932")]
    bz2, xz = (make_tar({"a.png": b"a"}, mode=f"w:{kind}") for kind in ("bz2", "xz"))
    cases = [("zip", make_raw_zip(names)), ("tar", bz2), ("tar", xz), ("tar", make_tar({"a": b"a"}))]
    cases += [(kind.lower(), make_pages(kind, 2)) for kind in ("TIFF", "PDF")]
    cases += [
        ("video", make_video([0])),
        *((kind, b"nothing of the kind") for kind in ("zip", "tar", "pdf", "video")),
    ]
    for kind, data in cases:
        assert "status 77" not in bench.take(kind, data).problem


def test_a_hard_link_in_a_tar_is_an_image_like_its_file(bench: Bench) -> None:
    data = make_tar({"./b.jpg": b"b"}, twins={"./a.jpg": "./b.jpg", "./sub/c.jpg": "./b.jpg"})
    assert bench.take("tar", data) == UnpackOutcome(3)
    assert bench.names == ["a.jpg", "b.jpg", "sub/c.jpg"]


def test_a_video_that_was_cut_says_so(bench: Bench) -> None:
    data = make_video([0, 1, 2])
    assert "incomplete" in bench.take("video", data[: len(data) // 2]).problem
    assert "incomplete" in bench.take("video", b"\0\0\0\x20ftypisom" + bytes(40)).problem


def test_links_and_devices_are_not_made_but_counted(bench: Bench) -> None:
    data = make_tar({"a.png": b"a"}, links={"b.png": "/etc/passwd", "c.png": ""})
    assert bench.take("tar", data) == UnpackOutcome(1, links=2)
    assert bench.names == ["a.png"]


@pytest.mark.parametrize("kind", ["zip", "tar", "pdf", "video"])
def test_a_file_that_is_not_what_its_name_says_fails_and_leaves_nothing(bench: Bench, kind: str) -> None:
    outcome = bench.take(kind, b"nothing of the kind")
    assert outcome.files == 0
    assert outcome.problem
    assert "not permitted" not in outcome.problem
    assert bench.left == {"file"}


def test_one_damaged_member_does_not_affect_the_others(bench: Bench) -> None:
    data = bytearray(make_zip({"a.png": b"a" * 100, "b.png": b"b" * 100}))
    data[36] ^= 0xFF  # in the bytes of the first
    outcome = bench.take("zip", bytes(data))
    assert outcome.files == 1
    assert "1 member left out: a.png" in outcome.problem
    assert bench.names == ["b.png"]


def test_each_member_that_is_left_out_is_in_one_count_and_the_first_are_named(bench: Bench) -> None:
    twins = {f"{number}.png": "nowhere.png" for number in range(5)}
    detail = bench.take("tar", make_tar({"a.png": b"a"}, {"l": "a.png"}, twins=twins)).describe(b"x").detail
    assert detail.startswith(
        "1 file in x; links and devices left out: 1; 5 other members left out: 0.png: it "
    )
    assert detail.endswith("; and 2 more")
    assert detail.count("nowhere.png") == 3


def test_a_tar_with_a_negative_size_is_damaged(bench: Bench) -> None:
    data = bytearray(make_tar({"a.png": b""}, mode="w"))
    data[124:136] = b"\xff" * 11 + b"\xfb"  # -5 bytes
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * ord(" "))  # its checksum
    assert bench.take("tar", bytes(data)).problem.startswith("it is damaged or incomplete, or not a tar")


def test_a_tar_that_is_cut_gives_what_is_whole(bench: Bench) -> None:
    whole = make_tar({f"{number}.png": os.urandom(20_000) for number in range(4)})
    outcome = bench.take("tar", whole[: len(whole) // 2])
    assert 0 < outcome.files < 4
    assert outcome.problem
    assert len(bench.names) == outcome.files


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("zip", make_zip({f"{number}": bytes(500_000) for number in range(5)}), "most_bytes = 10485760"),
        ("tar", make_sparse_tar(1 << 32), f"most_bytes = {1 << 32}"),
        ("tar", make_tar({f"{number}": b"" for number in range(5)}), "most_files = 40"),
        ("tar", make_tar({"d/" * 50 + f"{number}/a.png": b"" for number in range(9)}), "most_files = 40"),
        ("video", make_video([0, 100_000]), "most_files = 40"),
    ],
)
def test_nothing_of_a_bomb_is_unpacked(bench: Bench, kind: str, data: bytes, said: str) -> None:
    outcome = bench.take(kind, data, Most(4 if said.startswith("most_files") else 10, 1 << 20, 200))
    assert said in outcome.problem
    assert outcome.files == 0
    assert bench.left == {"file"}


@pytest.mark.parametrize(
    "make",
    [lambda: make_sparse_tar(6 << 30), lambda: make_tar({"a.png": bytes(70 << 20)}, mode="w:xz")],
    ids=["sparse", "xz"],
)
def test_a_tar_becomes_only_so_many_times_its_size(bench: Bench, make: Callable[[], bytes]) -> None:
    outcome = bench.take("tar", make(), Most(100, 1 << 40, 200))
    assert int(outcome.problem.partition("set most_ratio = ")[2].split()[0]) >= 11_000
    assert bench.left == {"file"}


def test_a_page_that_needs_too_much_memory_says_so(bench: Bench) -> None:
    huge = make_pages("PDF", 1).replace(b"[ 0 0 60.0 40.0 ]", b"[ 0 0 3000 3000 ]")
    outcome = bench.take("pdf", huge, limits=Limits(decode_bytes=512 << 20))
    assert outcome.files == 0
    assert outcome.problem


def test_images_come_before_what_is_still_packed(bench: Bench) -> None:
    class Watched(Targets):
        def add(self, process: subprocess.Popen[bytes]) -> None:
            super().add(process)
            ours = os.getpriority(os.PRIO_PROCESS, 0)
            wait_for(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) > ours, "a lower priority")

    bench.children = Watched()
    assert bench.take("zip", make_zip({"a.png": b"a"})).files == 1


def test_a_stop_ends_the_child_and_leaves_nothing(bench: Bench) -> None:
    bench.children.signals = (signal.SIGSTOP,)  # so that it is in the middle, however fast it is
    bench.children.stops = True
    with pytest.raises(UnpackingStopped):
        bench.take("zip", make_zip({"a.png": b"a"}))
    assert not bench.children.running
    assert bench.left == {"file"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGBUS])
def test_a_child_that_was_killed_is_not_the_files_fault(bench: Bench, number: signal.Signals) -> None:
    bench.children.signals = (number,)
    with pytest.raises(Interrupted, match=number.name):
        bench.take("zip", make_zip({"a.png": b"a"}))
    assert bench.left == {"file"}


def test_a_child_that_gets_no_processor_is_not_the_files_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.unpacking.apart.START_SECONDS", 0.1)
    bench.children.signals = (signal.SIGSTOP,)
    with pytest.raises(Interrupted, match=r"set decode_seconds = 0\.2"):
        bench.take("zip", make_zip({"a.png": b"a"}), limits=Limits(decode_seconds=0.1))
    assert bench.left == {"file"}


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_file_that_the_disk_does_not_deliver_is_not_damaged(bench: Bench, kind: str) -> None:
    bench.file.mkdir()  # the system refuses to read a folder
    fd = os.open(bench.file, os.O_RDONLY)
    parent = os.open(bench.file.parent, os.O_RDONLY)
    contents = Contents(parent, b"file.unpacked", Version(1, 1, 1, 1), MOST, IGNORED)
    with pytest.raises(IsADirectoryError), contextlib.closing(contents):
        take_apart(fd, kind, contents, Rules(), Limits(), bench.children)
    os.close(fd)
    os.close(parent)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGXCPU, "set decode_seconds = 40"), (signal.SIGSEGV, "was killed by SIGSEGV")],
)
def test_a_child_that_hangs_or_crashes_is_the_files_fault(
    bench: Bench, number: signal.Signals, said: str
) -> None:
    bench.children.signals = (number,)
    outcome = bench.take("zip", make_zip({"a.png": b"a"}))
    assert said in outcome.problem
    assert bench.left == {"file"}


def test_a_large_member_needs_no_memory(bench: Bench, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zeros", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("zeros.png", "w", force_zip64=True) as member:
            for _ in range(150):
                member.write(bytes(1 << 20))
    data = (tmp_path / "zeros").read_bytes()
    (tmp_path / "zeros").unlink()
    assert bench.take("zip", data, limits=Limits(decode_bytes=128 << 20)) == UnpackOutcome(1)
    assert (bench.target / "zeros.png").stat().st_size == 150 << 20


@pytest.mark.parametrize(
    "sent",
    [
        frame(Piece(bytes(9))),
        frame(("Unknown",)),
        frame(("MemberBegun", b"a", -1)),
        frame(Piece(b"12"))[:-1],
        LENGTH.pack(9)[:-1],
    ],
)
def test_a_child_that_sends_nonsense_is_not_believed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile bytes may have taken it over; its parent must not need memory for what it announces."""
    monkeypatch.setattr("daemon.unpacking.messages.PIECE", 8)
    monkeypatch.setattr("daemon.unpacking.messages.ENVELOPE", 8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent + frame(AllRead()))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Torn):
            list(read_messages(ours))


def test_a_child_that_sends_lists_in_lists_is_not_believed() -> None:
    body = b"\x92\xa4Link" + b"\x91" * 5000 + b"\xc0"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(len(body)) + body)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Torn):
            list(read_messages(ours))
