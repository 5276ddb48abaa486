"""What users meet that nobody thought of: odd numbers, odd names, things in the way, and the same after a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sqlite3
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from daemon.config import parse
from daemon.endings import Judge
from daemon.errors import ConfigError, VisiondError
from daemon.export import export_records, row_of
from daemon.gpus import Gpu
from daemon.jobs import Admitted, Ending, Failure, File, JobStatus, Placed, Version
from daemon.ledger import Ledger
from daemon.messages import Output
from daemon.placement import plan
from daemon.records import Model, Reader, Record
from daemon.sinks import Sink, sidecar_paths
from stages.base import Reason
from stages.binning import Thresholds
from stages.registry import ORDER
from tests.makers import VERSION, admit, complete, done, failed, make_file, make_job, make_outputs, make_record

pytestmark = pytest.mark.anyio


def open_sink(root: Path, bins: str = "none", on_success: str = "keep", **output: Any) -> Sink:
    config = parse({"inbox": [{"path": "inbox", "on_success": on_success}], "output": {"bins": bins} | output}, root)
    return Sink.of(config.inbox[0], config)


def drop(root: Path, path: bytes = b"a.jpg", data: bytes = b"image", **fields: Any) -> Record:
    return make_record(root / "inbox", path, data, **fields)


# Figures beyond what SQLite's integers hold


@pytest.mark.parametrize("field", ["mtime_ns", "inode"])
async def test_a_file_with_figures_beyond_64_bits_is_admitted(ledger: Ledger, inbox: Path, field: str) -> None:
    (inbox / "a.jpg").write_bytes(b"image")
    os.utime(inbox / "a.jpg", (1.4e10, 1.4e10))
    status: Any = os.stat(inbox / "a.jpg")
    if field == "inode":
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        status = SimpleNamespace(**{name: 2**63 + 1 if name == "st_ino" else getattr(status, name) for name in names})
    file = File(1, b"a.jpg", Version.of(status))
    with anyio.fail_after(2):
        assert await ledger.admit([file]) == Admitted(1, 0, 0)


async def test_a_request_with_a_bug_harms_none_of_its_group(ledger: Ledger) -> None:
    with anyio.fail_after(2):
        with pytest.raises(KeyError):
            await ledger.admit([make_file(inbox=99)])
        assert await ledger.admit([make_file()]) == Admitted(1, 0, 0)


# An inbox that was unmounted for a moment


async def test_a_version_that_was_gone_and_is_there_again_is_pending_again(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await ledger.end([Ending(job, JobStatus.GONE, 2e9, 0)])
    reader = Reader(ledger.path)
    known = reader.versions(1, [b"a.jpg"])
    reader.close()
    assert known == set()
    assert await ledger.admit([make_file()]) == Admitted(1, 0, 0)
    assert [job.path for job in await ledger.next_jobs(9, ())] == [b"a.jpg"]


# Publishing that cannot succeed


def test_a_vanished_source_is_no_trouble_before_there_are_bins(tmp_path: Path) -> None:
    record = drop(tmp_path)
    os.unlink(record.location)
    assert open_sink(tmp_path, "copy").publish(record) == Placed(record.id)


@pytest.mark.parametrize("bins", ["link", "copy"])
@pytest.mark.parametrize("blocker", ["bins/A/sub/a.jpg/", "bins/A/sub", "bins/B/sub/a.jpg/", "failed/sub/a.jpg.json/"])
def test_what_stands_in_the_way_in_a_bin_does_not_stop_the_daemon(tmp_path: Path, bins: str, blocker: str) -> None:
    path = tmp_path / blocker
    path.parent.mkdir(parents=True)
    path.mkdir() if blocker.endswith("/") else path.write_bytes(b"")
    record = drop(tmp_path, b"sub/a.jpg")
    open_sink(tmp_path, bins).publish(record)
    assert (tmp_path / "results" / "sub" / "a.jpg.json").read_bytes() == record.sidecar


def test_a_source_that_cannot_be_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = drop(tmp_path)
    rename = os.rename

    def refuse(old: bytes, new: bytes, **folders: int) -> None:
        if old == b"a.jpg":
            raise PermissionError(13, "Permission denied")
        rename(old, new, **folders)

    monkeypatch.setattr(os, "rename", refuse)
    assert open_sink(tmp_path, on_success="delete").publish(record) == Placed(record.id)


# The same again after a crash


def test_a_crash_between_copy_and_delete_leaves_one_file_not_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        sink, record = open_sink(tmp_path, on_success="move", done=elsewhere), drop(tmp_path)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr("daemon.sources.delete", lambda record: (_ for _ in ()).throw(KeyboardInterrupt))
            sink.publish(record)
        sink.publish(record)
        assert os.listdir(elsewhere) == ["a.jpg"]


def test_a_crash_while_a_source_is_deleted_leaves_no_scrap_in_the_inbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, record = open_sink(tmp_path, on_success="delete"), drop(tmp_path)
    unlink = os.unlink

    def die(path: bytes) -> None:
        if b".visiond-" in path:
            raise KeyboardInterrupt
        unlink(path)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "unlink", die)
        sink.publish(record)
    sink.publish(record)
    assert os.listdir(tmp_path / "inbox") == []


# No file of the user's is lost


def test_a_file_that_has_the_second_name_too_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    for name in ("a.jpg", "a~7.jpg"):
        (tmp_path / "done" / name).write_bytes(b"another image")
    open_sink(tmp_path, on_success="move").publish(drop(tmp_path))
    assert sorted(file.read_bytes() for file in (tmp_path / "done").iterdir()) == [b"another image"] * 2 + [b"image"]


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_newer_version_of_the_same_size_and_time_stays(tmp_path: Path, on_success: str) -> None:
    record = drop(tmp_path, data=b"image")
    (tmp_path / "newer").write_bytes(b"IMAGE")
    os.utime(tmp_path / "newer", ns=(record.version.mtime_ns,) * 2)
    os.rename(tmp_path / "newer", tmp_path / "inbox" / "a.jpg")
    open_sink(tmp_path, on_success=on_success).publish(record)
    assert (tmp_path / "inbox" / "a.jpg").read_bytes() == b"IMAGE"


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_newer_version_of_the_same_size_and_time_goes_back_even_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_success: str
) -> None:
    record = drop(tmp_path, data=b"image")
    (tmp_path / "newer").write_bytes(b"IMAGE")
    os.utime(tmp_path / "newer", ns=(record.version.mtime_ns,) * 2)
    rename = os.rename

    def rename_too_late(old: bytes, new: bytes, **folders: int) -> None:
        if (tmp_path / "newer").exists() and old == b"a.jpg":
            rename(tmp_path / "newer", record.location)
        rename(old, new, **folders)

    monkeypatch.setattr(os, "rename", rename_too_late)
    open_sink(tmp_path, on_success=on_success).publish(record)
    assert (tmp_path / "inbox" / "a.jpg").read_bytes() == b"IMAGE"


@pytest.mark.parametrize("on_success", ["delete", "move"])
def test_a_link_laid_in_a_folders_place_at_the_last_moment_costs_no_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_success: str
) -> None:
    sink, record = open_sink(tmp_path, on_success=on_success), drop(tmp_path, b"sub/a.jpg")
    folder, other = tmp_path / "inbox" / "sub", tmp_path / "other"
    shutil.copytree(folder, other)  # a file of the same name, size and time
    rename = os.rename

    def exchange(old: bytes, new: bytes, **folders: int) -> None:
        if os.path.basename(old) == b"a.jpg":
            rename(folder, tmp_path / "aside")
            folder.symlink_to(other)
        rename(old, new, **folders)

    monkeypatch.setattr(os, "rename", exchange)
    sink.publish(record)
    assert (other / "a.jpg").read_bytes() == b"image"
    assert not (tmp_path / "aside" / "a.jpg").exists()


def test_a_failed_image_whose_name_could_be_that_of_anothers_reason_stays_where_it_is(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, on_success="move")
    first = drop(tmp_path, b"b.jpg.json", b"half an image", status=JobStatus.FAILED)
    second = drop(tmp_path, b"b.jpg", b"the other half", id=8, status=JobStatus.FAILED)
    for record in (first, second):
        sink.publish(record)
    assert (tmp_path / "inbox" / "b.jpg.json").read_bytes() == b"half an image"
    assert (tmp_path / "failed" / "b.jpg").read_bytes() == b"the other half"
    assert (tmp_path / "failed" / "b.jpg.json").read_bytes() == second.sidecar


@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o640), (0o6755, 0o755)])
def test_a_copy_has_the_rights_of_its_source_but_lends_nobody_ours(tmp_path: Path, mode: int, kept: int) -> None:
    record = drop(tmp_path)
    os.chmod(record.location, mode)
    open_sink(tmp_path, "copy").publish(record)
    assert stat.S_IMODE((tmp_path / "bins" / "A" / "a.jpg").stat().st_mode) == kept


# Two versions with the same figures


async def test_two_versions_whose_source_was_moved_once_can_both_be_marked(ledger: Ledger) -> None:
    for ctime in (1, 2):
        await ledger.admit([make_file(ctime_ns=ctime)])
        await complete(ledger, *(done(job) for job in await ledger.next_jobs(1, ())))
    await ledger.mark_emitted([Placed(number, b"/done/a.jpg", VERSION._replace(ctime_ns=3)) for number in (1, 2)])
    assert await ledger.owed(0, 9) == []


# Reading


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


async def test_a_failed_images_reason_is_the_same_when_it_is_written_again(ledger: Ledger, inbox: Path) -> None:
    await ledger.register([(inbox, 0)], [Model(stage, f"{stage}-1", "random weights") for stage in ORDER])
    [job] = await admit(ledger, b"a.jpg")
    job.outputs = make_outputs(stages=["ocr"])
    [record] = await complete(ledger, failed(job))
    [again] = await ledger.owed(0, 9)
    assert again.sidecar == record.sidecar


# Export while the daemon goes on


class Growing(Reader):
    counted: dict[str, int]

    def bin_counts(self) -> dict[str, int]:
        return self.counted


@pytest.mark.parametrize("counted", [{"A": 2, "C": 2}, {"C": 2}])
async def test_a_mix_is_exact_though_images_are_added_meanwhile(
    ledger: Ledger, tmp_path: Path, counted: dict[str, int]
) -> None:
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(40)))
    await complete(ledger, *(done(job, variant=3 * (job.id % 2)) for job in jobs))
    reader = Growing(ledger.path)
    reader.counted = counted
    assert export_records(reader, tmp_path / "mix.jsonl", "jsonl", "", {"C": 1.0}, lambda done, total: None) == 2
    reader.close()


def test_tags_are_none_when_clip_did_not_run() -> None:
    assert row_of(make_record(Path("/inbox"), outputs=make_outputs(stages=["ocr"])))["tags"] is None


# Configuration


@pytest.mark.parametrize(
    "document",
    [
        {"pipeline": {"slab_bytes": "inf"}},
        {"inbox": [{"path": "~nobody-of-that-name/in"}]},
        {"pipeline": {"segment": [{"stages": [], "devices": ["cpu"]}]}},
        {"pipeline": {"stages": []}},
        {"inbox": [{"path": "a"}, {"path": "b", "name": "cam"}]},
        {"inbox": [{"path": "bins/A"}], "output": {"bins": "copy"}},
    ],
)
def test_it_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(document, Path("/srv"))


# Opening a ledger


def test_another_programs_database_of_a_high_version_is_not_taken_for_a_newer_ledger(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    connection.executescript("CREATE TABLE photos (id); PRAGMA user_version = 70;")
    connection.close()
    with pytest.raises(ConfigError, match="another program"):
        Ledger(tmp_path / "ledger.sqlite")


def test_a_ledger_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(VisiondError, match=r"ledger\.sqlite cannot be used"):
        Ledger(tmp_path / "ledger.sqlite")


# Smaller ones


@pytest.mark.parametrize("reason", [Reason.EMPTY, Reason.BYTES])
def test_a_marker_file_and_a_large_archive_are_skipped_like_any_other_that_claims_to_be_no_image(reason: Reason) -> None:
    [ending] = Judge(Thresholds()).endings([make_job(b"batch.ready", failure=Failure(reason, ""))])
    assert ending.status is JobStatus.SKIPPED


def test_one_gpu_that_is_too_small_is_not_said_to_have_the_memory() -> None:
    gpus = [Gpu(0, "GPU-0", "small card", 1 << 30, 1 << 30, 0, "8.0", None, ())]
    assert "every device has memory" not in plan(parse({}, Path("/srv")), gpus, {"ocr": 1 << 30}, 8, 128).why


def test_a_sidecars_name_is_cut_between_characters() -> None:
    sidecar_paths(b"/results", ("ä" * 125 + "b.jpg").encode())[0].decode()


# What a reviewer found


def test_a_folder_of_the_daemons_among_the_bins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.done: .* lies in output\.bins_folder"):
        parse({"inbox": [{"on_success": "move"}], "output": {"bins_folder": "out", "done": "out/done"}}, tmp_path)


def test_what_the_user_keeps_among_the_bins_is_left_alone(tmp_path: Path) -> None:
    record = drop(tmp_path)
    mine = tmp_path / "bins" / "holidays" / "a.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    open_sink(tmp_path, "copy").publish(record)
    assert mine.read_bytes() == b"mine"


async def test_rows_of_an_inbox_that_is_no_longer_configured_wait_for_it(tmp_path: Path) -> None:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        (old,) = await ledger.register([(tmp_path / "old", 0)], [])
        await ledger.admit([File(old, b"a.jpg", VERSION)])
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path / "new", 0)], [])
        assert await ledger.next_jobs(10, ()) == []
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path / "old", 0)], [])
        assert [job.path for job in await ledger.next_jobs(10, ())] == [b"a.jpg"]


def test_a_path_too_long_for_the_failed_folder_does_not_stop_the_daemon(tmp_path: Path) -> None:
    record = drop(tmp_path)
    long = b"/".join([b"d" * 250] * 16) + b"/a.jpg"
    record = dataclasses.replace(record, path=long)
    open_sink(tmp_path).publish(record)
    assert [path.read_bytes() for path in (tmp_path / "results").iterdir()] == [record.sidecar]


async def test_what_failed_is_not_tried_again_before_its_file_is_where_it_belongs(ledger: Ledger) -> None:
    (job,) = await admit(ledger, b"a.jpg")
    await ledger.end([failed(job)])
    assert await ledger.retry([job.id]) == 0
    await ledger.mark_emitted([Placed(job.id)])
    assert await ledger.retry([job.id]) == 1


async def test_a_reason_that_is_not_utf_8_is_kept(ledger: Ledger) -> None:
    (job,) = await admit(ledger, b"a.jpg")
    assert await ledger.end([failed(job, detail="name \udcff")]) == {job.id}


def test_a_result_that_cannot_be_read_fails_its_image_alone() -> None:
    job = make_job(outputs=make_outputs(), width=8, height=8)
    job.outputs["ocr"] = Output(b'{"lines":[],"count":0,"area_ratio":null}', 0.0)
    (ending,) = Judge(Thresholds()).endings([job])
    assert (ending.status, ending.failure and ending.failure.reason) == (JobStatus.FAILED, Reason.STAGE)
