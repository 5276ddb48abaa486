"""The sink yolo: each image once, with the labels of its last answer, and classes that keep their numbers."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
from PIL import Image

from daemon.config.loading import parse
from daemon.core.errors import NotWritable
from daemon.core.messages import Output
from daemon.exports.yolo import VALIDATED, read_classes
from daemon.ledger.record import Record
from daemon.results.files import put_files
from daemon.results.yolo import YoloSink
from daemon.system.mounts import FolderAway
from tests.daemon.exports import reading
from tests.makers import make_outputs, make_record

pytestmark = pytest.mark.anyio


def make_sink(folder: Path) -> YoloSink:
    return YoloSink(parse({"inbox": [{"path": "images"}]}, folder))


def make(folder: Path, name: str, *labels: str, data: bytes = b"\xff\xd9", **fields: Any) -> Record:
    found = [{"label": label, "score": 0.9, "box": [64, 48, 128, 96]} for label in labels]
    payload = {"detections": found, "count": len(labels), "unique": len(labels), "dispersion": 0.0}
    outputs = make_outputs() | {"yolo": Output(json.dumps(payload).encode(), 0.1)}
    return make_record(folder / "images", name.encode(), data, outputs=outputs, **fields)


def read(folder: Path) -> dict[str, list[str]]:
    """By the path in the inbox of each image, the names of its objects."""
    top, found = folder / "results.yolo", {}
    names = [*read_classes((top / "data.yaml").read_text())]
    for label in (top / "labels").rglob("*.txt"):
        place = label.relative_to(top / "labels").with_suffix("")
        [image] = (top / "images").glob(f"{place}.*")
        rows = [line.split() for line in label.read_text().splitlines()]
        assert all(row[1:] == ["0.150000", "0.150000", "0.100000", "0.100000"] for row in rows)
        found[image.resolve().relative_to(folder / "images").as_posix()] = [
            names[int(row[0])] for row in rows
        ]
    assert len(found) == len([*(top / "images").rglob("*.*")]) == len([*(top / "labels").rglob("*.*")])
    return found


async def test_classes_keep_their_numbers_and_images_get_new_labels(tmp_path: Path) -> None:
    await make_sink(tmp_path).append(
        [make(tmp_path, "a.jpg", "cat"), make(tmp_path, "a.png", "dog", "cat", id=8)]
    )
    again = [make(tmp_path, "a.jpg", "bird", "dog"), make(tmp_path, "labels/b.jpg", id=9)]
    for records in (again, again):  # the second time as after a crash
        await make_sink(tmp_path).append(records)
        assert read(tmp_path) == {"a.jpg": ["bird", "dog"], "a.png": ["dog", "cat"], "labels/b.jpg": []}
    assert read_classes((tmp_path / "results.yolo" / "data.yaml").read_text()) == {
        "cat": 0,
        "dog": 1,
        "bird": 2,
    }


async def test_a_later_version_replaces_the_earlier_one_also_on_the_other_side(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.append([make(tmp_path, "a.jpg", "cat", data=b"phone", digest=bytes([VALIDATED]) * 32)])
    [copy] = (tmp_path / "results.yolo" / "images" / "train").rglob("*.jpg")
    assert not copy.is_symlink(), "ultralytics may write it anew"
    await sink.append([make(tmp_path, "a.jpg", "dog", id=8, format="PNG", digest=bytes(32))])
    assert read(tmp_path) == {"a.jpg": ["dog"]}
    assert [each.parts[-3] for each in (tmp_path / "results.yolo" / "images").rglob("*.png")] == ["val"]


async def test_an_image_whose_file_is_gone_or_in_a_store_is_not_in_it(tmp_path: Path) -> None:
    sink, record = make_sink(tmp_path), make(tmp_path, "a.jpg", "cat")
    away = make(tmp_path, "b.jpg", "ant", location=b"s3://bucket/b.jpg", id=8)
    await sink.append([away, record])
    assert read(tmp_path) == {"a.jpg": ["cat"]}
    (tmp_path / "images" / "a.jpg").unlink()
    await sink.append([record, make(tmp_path, "c.jpg", "dog", id=9)])
    assert read(tmp_path) == {"c.jpg": ["dog"]}


async def test_while_the_mount_of_an_inbox_is_missing_its_images_wait(tmp_path: Path) -> None:
    sink, record = make_sink(tmp_path), make(tmp_path, "a.jpg", "cat")
    await sink.append([record])
    (tmp_path / "images").rename(tmp_path / "unmounted")
    (tmp_path / "images").mkdir()
    with pytest.raises(FolderAway, match=r"a\.jpg cannot be linked: nothing has been deleted from"):
        await sink.append([record])
    (tmp_path / "images").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "images")
    await sink.append([record])
    assert read(tmp_path) == {"a.jpg": ["cat"]}


async def test_if_it_is_not_known_which_class_has_which_number_nothing_is_written(tmp_path: Path) -> None:
    sink, record = make_sink(tmp_path), make(tmp_path, "a.jpg", "cat")
    assert sink.problem() == ""
    await sink.append([record])
    file = tmp_path / "results.yolo" / "data.yaml"
    for damage in (file.unlink, lambda: file.write_text("names: [cat"), lambda: file.write_text("")):
        damage()
        assert "is missing or damaged" in sink.problem()
        with pytest.raises(NotWritable, match="away: the sink makes a new one"):
            await sink.append([record])


async def test_data_yaml_has_a_class_before_labels_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, record = make_sink(tmp_path), make(tmp_path, "a.jpg", "cat")

    def put_one(known: Any, files: Any) -> None:
        if len(files) > 1:
            raise OSError("killed")
        put_files(known, files)

    monkeypatch.setattr("daemon.results.yolo.put_files", put_one)
    with pytest.raises(OSError, match="killed"):
        await sink.append([record])
    assert read_classes((tmp_path / "results.yolo" / "data.yaml").read_text()) == {"cat": 0}
    monkeypatch.undo()
    await make_sink(tmp_path).append([record])
    assert read(tmp_path) == {"a.jpg": ["cat"]}


@pytest.mark.skipif(not find_spec("ultralytics"), reason="ultralytics is not installed: make setup")
async def test_ultralytics_reads_it_but_for_an_image_that_is_deleted_later(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (640, 480)).save(buffer, "PNG")
    same: dict[str, Any] = {"data": buffer.getvalue(), "format": "PNG"}
    records = [make(tmp_path, f"{n}.png", *["cat", "dog"][: n % 3], id=n, **same) for n in range(1, 7)]
    await make_sink(tmp_path).append(records)
    (tmp_path / "images" / "6.png").unlink()
    command = [sys.executable, reading.__file__, "yolo", str(tmp_path / "results.yolo")]
    rows = json.loads((await anyio.run_process(command)).stdout)["rows"]
    assert sorted(len(row) for _, row in rows) == [0, 1, 1, 2, 2]
    assert {label for _, row in rows for label, *_ in row} == {"cat", "dog"}
