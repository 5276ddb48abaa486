"""Sinks that write a file for each image: each image has one file, with its last answer, and takes none of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anyio
import pytest

from daemon.config.loading import find_shared_folders, parse
from daemon.config.output import FILE_SINKS
from daemon.config.state import SINK_FILES
from daemon.core.errors import ConfigError, NotWritable
from daemon.core.jobs import JobStatus
from daemon.core.messages import Output
from daemon.exports.datasets import name_images
from daemon.exports.pages import PAGES
from daemon.ledger.record import Record
from daemon.results.files import FILES, FileSink
from daemon.results.sinks import SINKS
from tests.makers import make_outputs, make_record

pytestmark = pytest.mark.anyio

NAMES = [b"a.jpg", b"a.png", b"a.png.jpg", b"a.txt/b.jpg", b"A.jpg", b"sub/a.jpg", b"n" * 251 + b".jpg"]
NAMES += [("ü" * 125 + ".jpg").encode(), b"\xff.jpg", b"x.jpg.xmp/c.jpg", b"x.jpg", b"x.xmp/c.jpg"]
NAMES += [b"/".join([b"d" * 200] * 21), b"bell\x07 <&>.jpg"]

# Killed while the transaction is open: what it has noted is on the disk in part, and a journal says how to undo it.
HALF_NOTED = """
import os, sqlite3, sys
owners = sqlite3.connect(sys.argv[1])
owners.execute("PRAGMA cache_size = 1")
owners.executemany("INSERT INTO file VALUES ('captions', ?, ?)", [(b"%d" % n, b"of another image") for n in range(9999)])
os.kill(os.getpid(), 9)
"""


def make_sink(folder: Path, sink: str, *inboxes: str) -> FileSink:
    (folder / "state").mkdir(exist_ok=True)
    tables = [{"path": f"in{name}", "name": name} for name in inboxes or ("",)]
    return FileSink(sink, parse({"inbox": tables}, folder))


def make(
    folder: Path, path: bytes, caption: str, name: str = "", *, inbox_number: int = 1, **fields: Any
) -> Record:
    """name: of its inbox."""
    payload = json.dumps({"text": caption, "similarity": 0.3, "truncated": False}).encode()
    outputs = make_outputs() | {"blip": Output(payload, 0.25)}
    return make_record(folder / f"in{name}", path, outputs=outputs, inbox=inbox_number, **fields)


def make_all(folder: Path, word: str = "picture", names: Sequence[bytes] = NAMES) -> list[Record]:
    return [make(folder, name, f"{word} {number}", id=number) for number, name in enumerate(names, 1)]


def texts_in(folder: Path) -> list[str]:
    """Of all files, also those that a crash would leave."""
    return sorted(path.read_text("utf-8") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("sink", sorted(FILE_SINKS))
async def test_each_image_has_one_file_with_its_last_answer_whatever_it_is_called(
    tmp_path: Path, sink: str
) -> None:
    for records in (make_all(tmp_path), make_all(tmp_path, "again")[::-1]):
        # The second sink stands for the next start.
        await make_sink(tmp_path, sink).append(records)
        expected = [FILES[sink].make(image) for image in name_images(records, {}, [])]
        assert texts_in(tmp_path / f"results.{sink}") == sorted(expected)
        assert len({*expected}) == len(NAMES) or sink in ("hocr", "alto")


async def test_files_are_named_as_those_of_an_export(tmp_path: Path) -> None:
    records = make_all(tmp_path, names=[b"sub/a.jpg"])
    for sink in FILE_SINKS:
        await make_sink(tmp_path, sink).append(records)
        FILES[sink].write(tmp_path / f"export.{sink}", name_images(records, {}, []))
        found, exported = (
            {file.relative_to(top).as_posix(): file.read_text() for file in top.rglob("*.*")}
            for top in (tmp_path / f"results.{sink}", tmp_path / f"export.{sink}")
        )
        assert found == exported
        assert len(found) == 1


async def test_of_two_images_with_one_name_the_first_keeps_it_and_the_other_has_its_own_suffix(
    tmp_path: Path,
) -> None:
    first, second = make_all(tmp_path, names=[b"a.jpg", b"a.png"])
    await make_sink(tmp_path, "captions").append([first, second])
    for record in (second, first, second):
        await make_sink(tmp_path, "captions").append([record])
    folder = tmp_path / "results.captions"
    assert (folder / "a.txt").read_text() == "picture 1\n"
    assert (folder / "a.png.txt").read_text() == "picture 2\n"


async def test_inboxes_have_folders_of_their_own(tmp_path: Path) -> None:
    records = [make(tmp_path, b"a.jpg", name, name, inbox_number=ord(name)) for name in "xy"]
    await make_sink(tmp_path, "captions", "x", "y").append(records)
    found = {file.parent.name: file.read_text() for file in (tmp_path / "results.captions").rglob("*.txt")}
    assert found == {"x": "x\n", "y": "y\n"}


async def test_the_last_of_several_records_of_an_image_counts(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "captions")
    await sink.append([make(tmp_path, b"a.jpg", "one"), make(tmp_path, b"a.jpg", "two", id=9)])
    assert texts_in(tmp_path / "results.captions") == ["two\n"]


async def test_an_image_that_has_no_caption_any_more_has_no_file_either(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "captions")
    long = b"/".join([b"d" * 200] * 21)
    await sink.append([make(tmp_path, name, "one") for name in (b"a.jpg", long)])
    assert len(texts_in(tmp_path / "results.captions")) == 2
    await sink.append([make(tmp_path, name, "") for name in (b"a.jpg", long)])
    assert texts_in(tmp_path / "results.captions") == []


async def test_an_image_without_a_caption_takes_no_name_from_another_one(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "captions")
    await sink.append([make(tmp_path, b"a.jpg", ""), make(tmp_path, b"a.png", "two")])
    assert os.listdir(tmp_path / "results.captions") == ["a.txt"]
    await sink.append([make(tmp_path, b"a.png", ""), make(tmp_path, b"a.gif", "three")])
    await sink.append([make(tmp_path, b"a.png", "two again")])  # what an image had is kept for it
    assert sorted(os.listdir(tmp_path / "results.captions")) == ["a.gif.txt", "a.txt"]
    assert texts_in(tmp_path / "results.captions") == ["three\n", "two again\n"]


async def test_a_version_that_failed_leaves_the_file_as_it_leaves_the_sidecar(tmp_path: Path) -> None:
    sink, record = make_sink(tmp_path, "captions"), make(tmp_path, b"a.jpg", "one")
    await sink.append([record])
    await sink.append([replace(record, id=9, status=JobStatus.FAILED)])
    assert texts_in(tmp_path / "results.captions") == ["one\n"]


async def test_what_cannot_be_written_raises_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "captions")
    assert sink.problem() == ""
    (tmp_path / "results.captions").write_text("a file")
    with pytest.raises(NotADirectoryError):
        await sink.append([make(tmp_path, b"a.jpg", "one")])
    assert "results.captions is a file; remove it" in sink.problem()
    (tmp_path / "results.captions").unlink()
    (tmp_path / "state" / SINK_FILES).write_text("this is no database" * 100)
    with pytest.raises(NotWritable, match=f"{SINK_FILES} cannot be used: file is not a database"):
        await sink.append([make(tmp_path, b"a.jpg", "one")])
    assert not (tmp_path / "results.captions").exists()


async def test_names_are_noted_before_files_have_them(tmp_path: Path) -> None:
    """Otherwise, after a crash, another image could take the name."""
    (tmp_path / "results.captions" / "a.txt").mkdir(parents=True)
    (tmp_path / "results.captions" / f"~{'0' * 64}.txt").mkdir()
    await make_sink(tmp_path, "captions").append([make(tmp_path, b"a.jpg", "one")])
    with sqlite3.connect(tmp_path / "state" / SINK_FILES) as owners:
        assert owners.execute("SELECT * FROM file").fetchall() == [("captions", b"a.txt", b"a.jpg")]
    owners.close()


@pytest.mark.parametrize("kind", ["a first look", "a first record"])
async def test_names_that_a_killed_daemon_has_half_noted_are_undone(tmp_path: Path, kind: str) -> None:
    await make_sink(tmp_path, "captions").append([make(tmp_path, b"a.jpg", "one")])
    await anyio.run_process(
        [sys.executable, "-c", HALF_NOTED, str(tmp_path / "state" / SINK_FILES)], check=False
    )
    assert (tmp_path / "state" / f"{SINK_FILES}-journal").stat().st_size
    sink = make_sink(tmp_path, "captions")
    if kind == "a first look":
        assert sink.problem() == ""
    await sink.append([make(tmp_path, b"1.png", "two")])
    assert sorted(os.listdir(tmp_path / "results.captions")) == ["1.txt", "a.txt"]


async def test_if_it_is_not_known_whose_the_files_are_none_of_them_is_replaced(tmp_path: Path) -> None:
    first, second = make_all(tmp_path, names=[b"a.jpg", b"a.png"])
    other = make(tmp_path, b"a.jpg", "of another daemon", "x")
    await make_sink(tmp_path, "captions", "x").append([other])
    (tmp_path / "state" / SINK_FILES).unlink()
    named = replace(first, inbox_path=os.fsencode(tmp_path / "iny"))
    await make_sink(tmp_path, "captions", "y").append([named])
    await make_sink(tmp_path, "captions", "x", "y").append([other])
    (tmp_path / "state" / SINK_FILES).unlink()
    folder = tmp_path / "results.captions"
    expected = f"{folder} has files, and .*{SINK_FILES} does not say of which images"
    assert re.match(expected, make_sink(tmp_path, "captions").problem())
    with pytest.raises(NotWritable, match=expected):
        await make_sink(tmp_path, "captions").append([second])
    assert texts_in(folder) == ["of another daemon\n", "picture 1\n"]
    shutil.move(folder, tmp_path / "earlier")
    await make_sink(tmp_path, "captions").append([second])
    assert (folder / "a.txt").read_text() == "picture 2\n"


async def test_when_what_was_in_the_way_is_gone_an_image_still_has_one_file(tmp_path: Path) -> None:
    for sink in FILE_SINKS:
        folder = tmp_path / f"results.{sink}"
        [record] = make_all(tmp_path, names=[b"a.jpg"])
        obstacle = folder / f"a{'' if FILES[sink].replaces else '.jpg'}{FILES[sink].suffix}"
        obstacle.mkdir(parents=True)
        await make_sink(tmp_path, sink).append([record])
        obstacle.rmdir()
        await make_sink(tmp_path, sink).append([record])
        assert [*folder.iterdir()] == [obstacle]


@pytest.mark.skipif(not shutil.which("exiftool"), reason="exiftool is not installed: make tools")
@pytest.mark.parametrize("sink", ["xmp", "xmp-adobe"])
async def test_exiftool_reads_the_caption_of_each_image(tmp_path: Path, sink: str) -> None:
    names = [name for name in NAMES if name.isascii() and len(name) < 250]
    await make_sink(tmp_path, sink).append(make_all(tmp_path, names=names))
    asked = ["exiftool", "-json", "-XMP-dc:all", "-r", "-ext", "xmp", str(tmp_path / f"results.{sink}")]
    found = json.loads((await anyio.run_process(asked)).stdout)
    assert sorted(each["Description"] for each in found) == sorted(
        f"picture {number}" for number in range(1, len(names) + 1)
    )


@pytest.mark.parametrize("sink", ["hocr", "alto", "xmp"])
async def test_files_are_xml(tmp_path: Path, sink: str) -> None:
    await make_sink(tmp_path, sink).append(make_all(tmp_path))
    files = [file for file in (tmp_path / f"results.{sink}").rglob("*") if file.is_file()]
    assert [ElementTree.parse(file).getroot().tag != "" for file in files] == [True] * len(NAMES)


@pytest.mark.parametrize("taken", ["state", "inbox"])
def test_nothing_else_may_be_in_the_folder_of_such_a_sink(tmp_path: Path, taken: str) -> None:
    inside: dict[str, Any] = {"path": "results.xmp/more"}
    tables = {taken: inside if taken == "state" else [inside]}
    parse(tables, tmp_path)
    with pytest.raises(
        ConfigError, match=r'results\.xmp, the folder of output\.sinks "xmp"; choose another place'
    ):
        parse(tables | {"output": {"sinks": ["xmp"]}}, tmp_path)


def test_the_folder_of_such_a_sink_is_no_inbox_through_a_link(tmp_path: Path) -> None:
    """Files beside images, such as a.jpg.xmp, may be a person's."""
    (tmp_path / "in").mkdir()
    (tmp_path / "results.xmp").symlink_to("in")
    without, config = (
        parse({"inbox": [{"path": "in"}], "output": {"sinks": sinks}}, tmp_path) for sinks in ([], ["xmp"])
    )
    assert find_shared_folders(without) == []
    [problem] = find_shared_folders(config)
    assert problem.startswith(f'output.sinks "xmp": {tmp_path}/results.xmp is ')


def test_every_format_with_a_file_for_each_image_is_a_sink() -> None:
    assert {*PAGES, "label-studio"} == FILE_SINKS == FILES.keys()


async def test_the_labeling_configuration_offers_each_label_of_the_tasks(tmp_path: Path) -> None:
    make_sink(tmp_path, "label-studio")
    config = parse({"inbox": [{"path": "in"}], "output": {"sinks": ["label-studio"]}}, tmp_path)
    file = tmp_path / "results.label-studio.xml"

    async def offered(*labels: str) -> list[str | None]:
        found = [{"label": label, "score": 0.9, "box": [0, 0, 1, 1]} for label in labels]
        payload = {"detections": found, "count": len(found), "unique": len(found), "dispersion": 0.0}
        outputs = make_outputs() | {"yolo": Output(json.dumps(payload).encode(), 0.1)}
        record = make_record(tmp_path / "in", "".join(labels).encode(), outputs=outputs)
        await SINKS["label-studio"](config).append([record])  # as after another start
        return [each.get("value") for each in ElementTree.parse(file).iter("Label")]

    assert await offered("a <b>") == ["a <b>"]
    assert await offered("dog", "cat") == ["a <b>", "dog", "cat"]
    assert await offered("cat") == ["a <b>", "dog", "cat"]
    tasks = texts_in(tmp_path / "results.label-studio")
    assert len(tasks) == 3

    file.write_text("<View><Image/><Style><p/></Style></View>")
    with pytest.raises(NotWritable, match="move it away"):
        await offered("bird")
    assert texts_in(tmp_path / "results.label-studio") == tasks
