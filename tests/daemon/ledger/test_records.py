from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import sqlite3
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.core.errors import LedgerDamaged, LedgerUnusable
from daemon.core.jobs import JobStatus, Outdated, Placed
from daemon.core.messages import Output
from daemon.core.sidecar import KEYS
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from stages.registry import registry
from stages.registry.registry import ORDER
from tests.makers import (
    MODELS,
    VERSION,
    admit,
    complete,
    done,
    failed,
    known_versions,
    make_file,
    make_outputs,
    make_record,
)

pytestmark = pytest.mark.anyio

INBOX = Path("/inbox")
FAILED: dict[str, Any] = {
    "status": JobStatus.FAILED,
    "outputs": {},
    "models": [],
    "bin": "",
    "criteria": b"{}",
}
FAILED |= {"reason": "truncated", "detail": "its end is missing"}


def parsed(record: Record) -> dict[str, Any]:
    return msgspec.json.decode(record.sidecar, type=dict[str, Any])


# Documents


def test_a_sidecar_has_the_published_keys_in_their_published_order() -> None:
    document = parsed(make_record(INBOX, b"sub/a.jpg"))
    assert (
        " ".join(document)
        == "schema id source ocr objects clip caption bin timings models provenance finished_at"
    )
    assert " ".join(document["source"]) == "inbox path bytes digest width height format seen_at"
    assert document["schema"] == "visiond/1"
    assert set(document["ocr"]) == {"lines", "count", "area_ratio"}
    assert set(document["ocr"]["lines"][0]) == {"text", "score", "box"}
    assert set(document["objects"]) == {"detections", "count", "unique", "dispersion"}
    assert set(document["objects"]["detections"][0]) == {"label", "score", "box"}
    assert set(document["clip"]) == {"embedding", "tags"}
    assert set(document["clip"]["embedding"]) == {"dim", "dtype", "base64"}
    assert set(document["clip"]["tags"][0]) == {"label", "score"}
    assert set(document["caption"]) == {"text", "similarity"}
    assert set(document["bin"]) == {"name", "criteria"}
    assert set(document["bin"]["criteria"]["A"]["text_boxes"]) == {"value", "threshold", "passed"}


def test_a_sidecar_contains_the_record() -> None:
    document = parsed(make_record(INBOX, b"sub/a.jpg"))
    assert document["source"] == {
        "inbox": "/inbox",
        "path": "sub/a.jpg",
        "bytes": VERSION.size,
        "digest": "sha256:" + "00" * 32,
        "width": 640,
        "height": 480,
        "format": "JPEG",
        "seen_at": "2001-09-09T01:46:40.000Z",
    }
    assert (document["id"], document["bin"]["name"], document["finished_at"]) == (
        7,
        "A",
        "2033-05-18T03:33:20.000Z",
    )
    assert document["timings"] == dict.fromkeys(registry.ORDER, 0.25)
    assert document["models"] == {"ocr": "ocr-1", "yolo": "yolo-1", "clip": "clip-1", "blip": "blip-1"}
    for stage in registry.ORDER:
        assert registry.decode(stage, msgspec.json.encode(document[KEYS[stage]])) == registry.decode(
            stage, make_outputs()[stage].payload
        )


def test_a_record_is_encoded_once_for_sidecar_and_sinks() -> None:
    record = make_record(INBOX)
    assert record.sidecar is record.sidecar


def test_a_sidecar_is_one_line() -> None:
    encoded = make_record(INBOX, b"two\nlines.jpg").sidecar
    assert encoded.count(b"\n") == 1
    assert encoded.endswith(b"}\n")


def test_a_stage_that_did_not_run_is_left_out() -> None:
    document = parsed(make_record(INBOX, outputs=make_outputs(stages=["ocr"]), models=MODELS[:1]))
    assert {"objects", "clip", "caption"}.isdisjoint(document)
    assert (set(document["timings"]), set(document["models"])) == ({"ocr"}, {"ocr"})


async def test_a_sidecar_stays_the_same_when_plug_ins_are_uninstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_ins = ("zebra", "ape", "bee")  # as they run: an ape needs the zebra's answer, the bee needs both
    monkeypatch.setattr(registry, "ORDER", (*registry.ORDER, *plug_ins))
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path, 0)], [*MODELS, *(Model(name, "1", "") for name in plug_ins)])
        await ledger.admit([make_file()])
        [job] = await ledger.next_jobs(1, ())
        said = {name: Output(b"{}", 0.5) for name in plug_ins}
        [record] = await complete(ledger, done(job, outputs=make_outputs() | said))
        sidecar = record.sidecar
    assert [key for key in msgspec.json.decode(sidecar) if key in plug_ins] == list(plug_ins)
    for installed in ((), ("bee",), ("ape", "zebra")):
        monkeypatch.setattr(registry, "ORDER", (*KEYS, *installed))
        with contextlib.closing(Reader(tmp_path / "ledger.sqlite")) as reader:
            assert [record.sidecar for record in reader.find("1")] == [sidecar]


def test_a_failed_image_has_its_reason_in_place_of_results() -> None:
    document = parsed(make_record(INBOX, **FAILED))
    assert " ".join(document) == "schema id source status reason detail attempts finished_at"
    assert (document["status"], document["reason"], document["attempts"]) == ("FAILED", "truncated", 1)


def test_an_image_that_was_never_read_has_no_digest_and_no_size() -> None:
    document = parsed(make_record(INBOX, status=JobStatus.PENDING, digest=b"", width=0, finished_at=None))
    assert set(document["source"]) == {"inbox", "path", "bytes", "seen_at"}
    assert (document["status"], document["finished_at"]) == ("PENDING", None)


def test_a_path_that_is_not_utf8_is_readable_and_exact() -> None:
    source = parsed(make_record(INBOX, b"caf\xe9.jpg"))["source"]
    assert source["path"] == "caf�.jpg"
    assert base64.b64decode(source["path_base64"]) == b"caf\xe9.jpg"
    assert "path_base64" not in parsed(make_record(INBOX, "café�.jpg".encode()))["source"]


def test_the_notices_of_the_models_are_printed_once() -> None:
    models = [dataclasses.replace(model, notice="random weights") for model in MODELS[:2]] + MODELS[2:]
    assert parsed(make_record(INBOX, models=models))["notice"] == "random weights"
    assert "notice" not in parsed(make_record(INBOX))


def test_there_is_no_nan_in_a_sidecar() -> None:
    outputs = make_outputs() | {
        "blip": Output(msgspec.json.encode({"text": "", "similarity": float("nan")}), 0.0)
    }
    record = make_record(INBOX, outputs=outputs)
    assert b"NaN" not in record.sidecar
    assert parsed(record)["caption"]["similarity"] is None


# Reading a ledger


def open_reader(ledger: Ledger) -> Reader:
    return Reader(ledger.path)


def test_a_ledger_that_is_not_there_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path / "ledger.sqlite")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(LedgerDamaged, match=r"ledger.sqlite cannot be used: file is not a database"):
        Reader(tmp_path / "ledger.sqlite")


async def test_a_reader_cannot_write(ledger: Ledger) -> None:
    reader = open_reader(ledger)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._rows("blame", 1, 1)
    reader.close()


async def test_a_reader_sees_what_the_daemon_writes_meanwhile(ledger: Ledger, inbox: Path) -> None:
    reader = open_reader(ledger)
    assert reader.counts() == dict.fromkeys(JobStatus, 0)
    jobs = await admit(ledger, b"1.jpg", b"2.jpg", b"3.jpg")
    await complete(ledger, done(jobs[0], variant=3), done(jobs[1], variant=0))
    assert reader.counts() == {**dict.fromkeys(JobStatus, 0), JobStatus.DONE: 2, JobStatus.PENDING: 1}
    assert reader.bin_counts() == {"A": 1, "C": 1}
    assert reader.inboxes() == {1: os.fsencode(inbox)}
    reader.close()


async def test_every_version_of_a_file_is_known(ledger: Ledger) -> None:
    files = [make_file(b"a.jpg"), make_file(b"a.jpg", size=9), make_file(b"b\xff.jpg")]
    for file in files:
        await ledger.admit([file])
        await complete(ledger, *(done(job) for job in await ledger.next_jobs(9, ())))
    reader = open_reader(ledger)
    paths = [b"a.jpg", b"b\xff.jpg", *(b"%d.jpg" % number for number in range(500))]
    assert known_versions(reader, paths) == {(file.path, *file.version) for file in files}
    assert known_versions(reader, paths, inbox=2) == known_versions(reader, []) == set()
    reader.close()


async def test_an_image_is_found_by_number_by_relative_and_by_absolute_path(
    ledger: Ledger, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job] = await admit(ledger, b"sub/\xff.jpg")
    reader = open_reader(ledger)
    name = os.fsdecode(b"sub/\xff.jpg")
    monkeypatch.chdir(inbox.parent)
    for given in (str(job.id), name, str(inbox / name), f"inbox/{name}", f"./inbox/../inbox/{name}"):
        [record] = reader.find(given)
        assert (record.id, record.path) == (job.id, b"sub/\xff.jpg")
    assert reader.find("sub") == reader.find("2") == []
    reader.close()


async def test_the_newest_version_of_a_file_is_the_one_that_is_found(ledger: Ledger) -> None:
    for size in (1, 2, 3):
        await ledger.admit([make_file(size=size)])
    reader = open_reader(ledger)
    [record] = reader.find("a.jpg")
    assert (record.version.size, record.status) == (3, JobStatus.PENDING)
    reader.close()


@pytest.mark.parametrize("name", ["Müll/Größe é.jpg", "Größe é.jpg"])
async def test_a_name_is_found_however_its_accents_are_written(ledger: Ledger, name: str) -> None:
    await admit(
        ledger, *(unicodedata.normalize(form, "Müll/Größe é.jpg").encode() for form in ("NFC", "NFD"))
    )
    with contextlib.closing(Reader(ledger.path)) as reader:
        found = [
            [record.id for record in reader.find(unicodedata.normalize(f, name))] for f in ("NFC", "NFD")
        ]
        assert found == [[1], [2]]  # the one that is written so
    await admit(ledger, unicodedata.normalize("NFD", "š.jpg").encode())
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert [record.id for record in reader.find("š.jpg")] == [3]


async def test_a_file_named_like_a_number_is_found_when_no_image_has_that_number(ledger: Ledger) -> None:
    await admit(ledger, b"2026")
    reader = open_reader(ledger)
    [record] = reader.find("2026")
    assert record.path == b"2026"
    reader.close()


async def test_an_image_is_found_by_the_end_of_its_path_and_by_a_link_to_it(
    ledger: Ledger, inbox: Path
) -> None:
    [job] = await admit(ledger, b"2026/11/a.jpg")
    (inbox / "2026" / "11").mkdir(parents=True)
    (inbox / "2026" / "11" / "a.jpg").touch()
    (inbox.parent / "link.jpg").symlink_to(inbox / "2026" / "11" / "a.jpg")
    reader = open_reader(ledger)
    for name in ("a.jpg", "11/a.jpg", str(inbox.parent / "link.jpg")):
        assert [record.id for record in reader.find(name)] == [job.id], name
    assert reader.find("1/a.jpg") == []
    reader.close()


async def test_a_link_in_an_inbox_is_found_by_its_own_path_and_not_its_target(
    ledger: Ledger, inbox: Path
) -> None:
    (inbox / "a.jpg").touch()
    (inbox / "link.jpg").symlink_to(inbox / "a.jpg")
    await ledger.admit([make_file(b"a.jpg"), make_file(b"link.jpg", regular=False)])
    reader = open_reader(ledger)
    assert [record.path for record in reader.find(str(inbox / "link.jpg"))] == [b"link.jpg"]
    reader.close()


async def test_a_name_that_several_inboxes_know_finds_them_all_and_a_whole_path_the_one(
    ledger: Ledger, inbox: Path
) -> None:
    other = inbox.parent / "other"
    assert await ledger.register([(inbox, 0), (other, 0)], MODELS) == [1, 2]
    await ledger.admit(
        [make_file(b"a.jpg"), make_file(b"a.jpg", inbox=2), make_file(b"a.jpg", inbox=2, size=9)]
    )
    reader = open_reader(ledger)
    assert [parsed(record)["source"]["inbox"] for record in reader.find("a.jpg")] == [str(inbox), str(other)]
    [record] = reader.find(str(other / "a.jpg"))
    assert (record.inbox, record.version.size) == (2, 9)
    reader.close()


async def test_a_failure_counts_until_a_newer_version_of_its_file_is_known(ledger: Ledger) -> None:
    await complete(ledger, *(failed(job) for job in await admit(ledger, b"a.jpg", b"b.jpg")))
    reader = open_reader(ledger)
    assert (reader.counts()[JobStatus.FAILED], reader.failed_ids()) == (2, [1, 2])
    admitted = await ledger.admit([make_file(b"a.jpg", size=9), make_file(b"c.jpg")])
    assert admitted.failures_replaced == 1
    assert (reader.counts()[JobStatus.FAILED], reader.failed_ids()) == (1, [2])
    assert [record.path for record in reader.newest(JobStatus.FAILED, 9)] == [b"b.jpg"]
    await ledger.mark_emitted([Placed(1), Placed(2)])
    # Versions that were replaced cannot be retried.
    assert await ledger.put_back(JobStatus.FAILED, [1, 2]) == 1
    reader.close()


async def test_files_are_listed_by_their_newest_version_newest_first(ledger: Ledger) -> None:
    await admit(ledger, b"a.jpg", b"b.jpg", b"c.jpg")
    await ledger.admit([make_file(b"a.jpg", size=9)])
    reader = open_reader(ledger)
    assert [(record.id, record.path) for record in reader.newest(None, 9)] == [
        (4, b"a.jpg"),
        (3, b"c.jpg"),
        (2, b"b.jpg"),
    ]
    assert [record.id for record in reader.newest(JobStatus.PENDING, 2)] == [4, 3]
    assert list(reader.newest(JobStatus.GONE, 9)) == []
    reader.close()


async def test_a_moved_image_lies_where_it_was_moved_and_is_found_there(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job))
    await ledger.mark_emitted([Placed(job.id, b"/done/a.jpg", VERSION._replace(ctime_ns=9))])
    reader = open_reader(ledger)
    [record] = reader.find("a.jpg")
    assert (record.location, record.version.ctime_ns) == (b"/done/a.jpg", 9)
    assert reader.find("/done/a.jpg") == [record]
    reader.close()


async def test_finished_images_come_oldest_first_whatever_the_chunk(ledger: Ledger) -> None:
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(7)))
    await complete(ledger, *(done(job, variant=3 * (job.id % 2)) for job in jobs[:5]), failed(jobs[5]))
    reader = open_reader(ledger)
    for chunk in (1, 2, 5, 100):
        assert [record.id for record in reader.finished(chunk=chunk)] == [1, 2, 3, 4, 5]
        assert [record.id for record in reader.finished(["C"], chunk)] == [2, 4]
    assert list(reader.finished(["B"])) == []
    assert [record.id for record in reader.finished(["B", "C"])] == [2, 4]
    assert reader.failed_ids() == [6]
    reader.close()


async def test_a_record_names_the_models_that_made_it(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    outputs = make_outputs(stages=["ocr", "clip"])
    await complete(ledger, done(job, outputs=outputs))
    reader = open_reader(ledger)
    [record] = reader.finished()
    assert record.models == [Model("ocr", "ocr-1", ""), Model("clip", "clip-1", "")]
    assert record.outputs == outputs
    reader.close()


def test_a_file_that_cannot_be_opened_as_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnusable, match="cannot be used"):
        Reader(tmp_path)


async def test_a_failed_images_reason_is_the_same_when_it_is_written_again(
    ledger: Ledger, inbox: Path
) -> None:
    await ledger.register([(inbox, 0)], [Model(stage, f"{stage}-1", "random weights") for stage in ORDER])
    [job] = await admit(ledger, b"a.jpg")
    [record] = await complete(ledger, failed(job, outputs=make_outputs(stages=["ocr"])))
    [again] = await ledger.owed(0, 9)
    assert again.sidecar == record.sidecar


@pytest.mark.parametrize("folder", ["really?", "#1", "100%41"])
def test_a_ledger_is_found_in_a_folder_of_any_name(tmp_path: Path, folder: str) -> None:
    Ledger(tmp_path / folder / "ledger.sqlite").close()
    Reader(tmp_path / folder / "ledger.sqlite").close()


@pytest.mark.parametrize("name", ["²", "9" * 30])
async def test_a_file_named_by_odd_digits_is_found(ledger: Ledger, name: str) -> None:
    await admit(ledger, name.encode())
    reader = Reader(ledger.path)
    [found] = reader.find(name)
    reader.close()
    assert found.path == name.encode()


@pytest.mark.parametrize("ending", [done, failed])
async def test_rows_have_the_same_checksum_when_read_as_when_written(ledger: Ledger, ending: Any) -> None:
    [job] = await admit(ledger, b"a.jpg")
    [record] = await complete(ledger, ending(job))
    [again] = await ledger.owed(0, 9)
    assert (again.damage, again.checksum) == ("", record.checksum)


CHANGES = {
    "result": [
        "payload = CAST('{}' AS BLOB)",
        "seconds = 0.5",
        "payload = '{}'",
        "content = 999",
        "model = 99",
    ],
    "content": ["format = 'GIF'", "width = 641", "height = 1", "digest = zeroblob(32)", "width = 'a'"],
    "image": [
        "bin = 'Z'",
        "criteria = NULL",
        "digest = zeroblob(32)",
        "models = '[2,1,3,4]'",
        "size = 99",
        "seen_at = 7",
    ],
    "image ": ["path = CAST('b' AS BLOB)", "finished_at = 7", "finished_at = 1e300", "checksum = 0"],
}


@pytest.mark.parametrize(
    ("table", "change"), [(table, change) for table, changes in CHANGES.items() for change in changes]
)
async def test_a_change_of_anything_that_a_sidecar_shows_is_found_as_damage(
    ledger: Ledger, table: str, change: str
) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job))
    where = "model = 1" if table == "result" else "true"
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {change} WHERE {where}")
    with contextlib.closing(Reader(ledger.path)) as reader:
        [record] = reader.newest(None, 9)
        assert record.damage
        with pytest.raises(LedgerDamaged, match="`visiond repair`"):
            reader.check()


@pytest.mark.parametrize(
    "change", ["reason = 'header'", "detail = 'x'", "attempts = 9", "digest = zeroblob(32)"]
)
async def test_a_change_of_the_reason_of_a_failure_is_found_as_damage(ledger: Ledger, change: str) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, failed(job))
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute(f"UPDATE image SET {change}")
    [record] = await ledger.owed(0, 9)
    assert record.damage == "its row"


async def test_a_check_ends_early_when_it_is_stopped(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, done(job))
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("UPDATE result SET seconds = 0.5")
    with contextlib.closing(Reader(ledger.path)) as reader:
        reader.check(lambda: False)


NEW = [Model(model.stage, f"{model.stage}-2", "") for model in MODELS]


@pytest.mark.parametrize(
    ("present", "outdated", "with_every_stage"),
    [
        (MODELS, 0, 0),
        ([*MODELS[:3], NEW[3]], 2, 2),
        (MODELS[:3], 2, 2),
        ([*MODELS, Model("quality", "1", "")], 0, 2),
    ],
)
async def test_files_with_results_of_models_that_are_not_current_are_counted(
    ledger: Ledger, inbox: Path, present: list[Model], outdated: int, with_every_stage: int
) -> None:
    jobs = await admit(ledger, b"a.jpg", b"b.jpg", b"c.jpg", b"d.jpg")
    await complete(ledger, *map(done, jobs[:3]), failed(jobs[3]))
    await ledger.admit([make_file(b"c.jpg", inode=9)])  # which replaces one of them
    await ledger.register([(inbox, 0)], present)
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert reader.count_outdated([os.fsencode(inbox)], every_stage=False) == Outdated(outdated)
        assert reader.count_outdated([os.fsencode(inbox)], every_stage=True) == Outdated(with_every_stage)


@pytest.mark.parametrize("damage", ["'[1,2,3,4'", "'7'", "CAST(x'5B312CFF5D' AS TEXT)"])
async def test_a_damaged_list_of_models_ends_the_count_of_outdated_files(
    ledger: Ledger, inbox: Path, damage: str
) -> None:
    await complete(ledger, *map(done, await admit(ledger, b"a.jpg", b"b.jpg")))
    await ledger.register([(inbox, 0)], NEW)
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute(f"UPDATE image SET models = {damage} WHERE id = 2")
    with contextlib.closing(Reader(ledger.path)) as reader:
        found = reader.count_outdated([os.fsencode(inbox)], every_stage=True)
    assert found.at_least
    assert found.files <= 1


async def test_of_many_results_of_earlier_models_only_some_are_counted(ledger: Ledger, inbox: Path) -> None:
    await complete(ledger, *map(done, await admit(ledger, b"a.jpg", b"b.jpg", b"c.jpg")))
    await ledger.register([(inbox, 0)], NEW)
    await complete(ledger, *map(done, await admit(ledger, b"d.jpg")))
    with contextlib.closing(Reader(ledger.path)) as reader:
        found = [reader.count_outdated([os.fsencode(inbox)], every_stage=True, most=most) for most in (2, 4)]
    assert found == [Outdated(2, at_least=True), Outdated(3)]


def test_a_file_is_that_of_its_image_by_size_and_time_and_by_size_alone_where_the_daemon_has_moved_it(
    tmp_path: Path,
) -> None:
    record = make_record(tmp_path, b"a.jpg", b"picture")
    done = tmp_path / "done" / "a.jpg"
    moved = dataclasses.replace(record, location=os.fsencode(done))
    assert (record.has_file(), moved.has_file()) == (True, False)
    done.parent.mkdir()
    (tmp_path / "a.jpg").rename(done)
    assert (record.has_file(), moved.has_file()) == (False, True)
    os.utime(done, (1e9, 1e9))
    os.link(done, tmp_path / "a.jpg")
    assert (record.has_file(), moved.has_file()) == (False, True)
    done.write_bytes(b"another picture")
    assert not moved.has_file()
