"""Each file in an inbox, whatever it is, ends in the expected state, and no good image next to it fails.

The stages are fakes, so only what a header shows is found here; what decoding finds is in
tests/stages/images/test_decoder.py.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stages.contract.base import Reason
from tests.checker import Verdict
from tests.daemon_process import Place, picture
from tests.inputs import BAD, CATALOGUE, ODD, Input, jpeg, png

COPIES = 3  # of each input, at different places among the good images
GOOD = 200
PIXELS = {"options": {"reads_pixels": True}}  # of a fake stage

NAMES = {
    "newline": b"new\nline.jpg",
    "quotes": b"quote'\"`$(true).jpg",
    "escape code": b"\x1b[31mred\x1b[0m.jpg",
    "right-to-left override": "\u202egpj.exe".encode(),
    "invalid UTF-8": b"latin-\xe9\xff.jpg",
    "255 bytes": b"x" * 251 + b".jpg",
    "254 bytes, umlauts": "ä".encode() * 125 + b".jpg",
    "upper case": b"CASE.JPG",
    "lower case": b"case.jpg",
    "same stem": b"case.png",
    "no suffix": b"image",
    "spaces": b"  spaces  .jpg ",
    "looks like a sidecar": b"a.json",
    "folder like a sidecar": b"b.jpg.json/c.jpg",
    "beside it": b"b.jpg",
    "deep": b"/".join([b"folder"] * 40) + b"/deep.jpg",
    "same name elsewhere": b"folder/case.jpg",
    "dash": b"-rf",
    "backslash": b"back\\slash.jpg",
}


def name_of(item: Input, copy: int) -> str:
    return f"{item.name.replace('/', '-')} {copy}.jpg"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Verdict]:
    """Every input of the catalogue a few times over, good images, odd names and things that are not files,
    in one run."""
    place = mix(tmp_path_factory.mktemp("mixed"), COPIES, GOOD, random.Random(1), PIXELS)
    assert place.run_once().returncode == 1
    return place, place.judge()


def mix(
    folder: Path,
    copies: int,
    good: int,
    chance: random.Random,
    clip: Mapping[str, Any],
    draw: Callable[[int], bytes] = picture,
) -> Place:
    """clip: the settings of a stage that reads pixels, so that everything is decoded. draw: a good image by its number."""
    place = Place(folder, {"pipeline": {"slab_bytes": 8 << 20, "max_attempts": 1}, "stages": {"clip": clip}})
    drops = [
        (name_of(item, copy).encode(), data)
        for item in CATALOGUE
        for data in [item.make()]
        for copy in range(copies)
    ]
    drops += [(b"good-%04d.ppm" % number, draw(number)) for number in range(good)]
    drops += [(path, picture(10**6 + number)) for number, path in enumerate(NAMES.values())]
    chance.shuffle(drops)
    for path, data in drops:
        place.drop(path, data)
    drop_what_is_no_image(place)
    place.drop("good-last.jpg", jpeg())
    return place


def drop_what_is_no_image(place: Place) -> None:
    place.drop("notes.txt", b"just a note")
    place.drop("catalog.db", b"\xd0\xcf\x11\xe0" + bytes(100))
    for ignored in (".hidden.jpg", "upload.jpg.part", "~tmp.tmp", ".folder/a.jpg"):
        target = place.inbox() / ignored
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(jpeg())
    outside = place.folder / "outside.jpg"
    outside.write_bytes(jpeg())
    for name, target in (("out.jpg", outside), ("loop.jpg", Path("loop.jpg")), ("folder-link", place.folder)):
        (place.inbox() / name).symlink_to(target)
    os.mkfifo(place.inbox() / "fifo.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(place.inbox() / "socket.jpg"))
    for path in ("out.jpg", "loop.jpg", "folder-link", "fifo.jpg", "socket.jpg"):
        place.expect(path)
    with (place.inbox() / "sparse.jpg").open("wb") as sparse:
        os.truncate(sparse.fileno(), 100 << 30)
    place.expect("sparse.jpg")  # too large to digest


def test_the_checker_finds_the_promise_kept(mixed: tuple[Place, Verdict]) -> None:
    assert mixed[1].problems == []


def test_every_good_image_is_done(mixed: tuple[Place, Verdict]) -> None:
    done = {path for _, path in mixed[1].results}
    assert len([path for path in done if path.startswith(b"good-")]) == GOOD + 1


@pytest.mark.parametrize("item", BAD, ids=lambda item: item.name)
def test_a_bad_input_fails_with_its_reason(item: Input, mixed: tuple[Place, Verdict]) -> None:
    failed = mixed[1].reasons("FAILED")
    assert {failed.get(name_of(item, copy).encode()) for copy in range(COPIES)} == {item.reason}


@pytest.mark.parametrize("item", ODD, ids=lambda item: item.name)
def test_an_odd_input_is_done(item: Input, mixed: tuple[Place, Verdict]) -> None:
    assert all(("", name_of(item, copy).encode()) in mixed[1].results for copy in range(COPIES))


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_name_is_done_and_has_its_own_sidecar(name: str, mixed: tuple[Place, Verdict]) -> None:
    assert ("", NAMES[name]) in mixed[1].results


def test_files_that_do_not_claim_to_be_images_and_irregular_files_are_skipped(
    mixed: tuple[Place, Verdict],
) -> None:
    not_regular = dict.fromkeys(
        (b"out.jpg", b"loop.jpg", b"folder-link", b"fifo.jpg", b"socket.jpg"), Reason.NOT_REGULAR.value
    )
    not_images = dict.fromkeys((b"notes.txt", b"catalog.db"), Reason.NOT_AN_IMAGE.value)
    assert mixed[1].reasons("SKIPPED") == not_regular | not_images


def test_a_sparse_file_of_100_gigabytes_fails_before_it_is_read(mixed: tuple[Place, Verdict]) -> None:
    assert mixed[1].reasons("FAILED")[b"sparse.jpg"] == Reason.BYTES


def test_files_of_any_time_are_done_and_are_the_same_files_at_the_next_start(tmp_path: Path) -> None:
    """Nanoseconds since 1970 have more than 64 bits from 2262 on."""
    place = Place(
        tmp_path, {"output": {"bins": "copy"}, "inbox": [{"settle_seconds": 0.1, "unpack": ["tiff"]}]}
    )
    years = {
        "1901": -(2**31),
        "1969": -1,
        "1970": 0,
        "2262": 2**63 // 10**9 + 1,
        "2400": 13_569_465_600,
        "2446": 15_032_385_535,
    }
    for number, (name, seconds) in enumerate(years.items()):
        os.utime(place.drop(f"{name}.ppm", picture(number)), (seconds, seconds))
    for done in (len(years), 0):
        run = place.run_once()
        assert (run.returncode, run.stdout.partition(",")[0]) == (0, f"{done} done"), run.stderr
    place.configure({"inbox": [{"path": "inbox", "settle_seconds": 0.1, "on_success": "move"}]})
    assert place.command("redo", "--all").returncode == 0
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=len(years))


def test_a_file_that_cannot_be_read_fails_and_is_not_tried_again(tmp_path: Path, humble: list[str]) -> None:
    place = Place(tmp_path)
    place.drop("closed.png", png()).chmod(0)
    assert place.run_once(prefix=humble).returncode == 1
    assert place.rows("SELECT status, reason, attempts FROM image") == [(2, "unreadable", 1)]


@pytest.mark.parametrize(("on_success", "retries"), [("keep", False), ("keep", True), ("move", True)])
def test_a_file_whose_permissions_were_fixed_is_done(
    tmp_path: Path, humble: list[str], on_success: str, retries: bool
) -> None:
    """A file in the inbox without further action; one in the failed folder,
    or one that was not seen again yet, by `visiond retry`."""
    place = Place(tmp_path, {"inbox": [{"on_success": on_success, "settle_seconds": 0.1}]})
    file = place.drop("closed.png", png())
    file.chmod(0)
    assert place.run_once(prefix=humble).returncode == 1
    (file if on_success == "keep" else place.site.failed / file.name).chmod(0o644)
    if retries:
        assert place.command("retry", "--all").stdout == "1 image pending again\n"
    assert place.run_once(prefix=humble).returncode == 0
    assert place.rows("SELECT status FROM image ORDER BY id DESC LIMIT 1") == [(1,)]
    assert list(place.site.failed.rglob("*")) == []
