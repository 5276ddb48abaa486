"""The order in which files are written, flushed and named, as the kernel sees it. After kill -9,
data that was never flushed is still there, so no other test can notice a missing flush."""

from __future__ import annotations

import os
from pathlib import Path

from tests.daemon_process import Place, picture
from tests.faults.syscalls import Call, Supervisor


def finished(folder: Path) -> Place:
    place = Place(folder)
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    return place


def make_folder(place: Place) -> Path:
    """A place whose flushes are seen."""
    folder = place.folder / "out"
    folder.mkdir()
    return folder


def watch(place: Place, *command: str | Path) -> list[Call]:
    """Every system call of a command that must succeed."""
    with Supervisor(place.folder, lambda call: 0) as supervisor:
        run = place.command(*command, supervisor=supervisor.path)
    assert run.returncode == 0, run.stderr
    return supervisor.calls


def places_of(calls: list[Call], name: str, file: str | Path) -> list[int]:
    """The positions at which a file was written, flushed or named."""
    return [number for number, call in enumerate(calls) if call == Call(name, os.fsencode(file))]


def assert_flushed(calls: list[Call], file: str | Path) -> int:
    """Everything written to the file was flushed afterwards; returns the position."""
    written, flushed = places_of(calls, "write", file), places_of(calls, "fsync", file)
    assert written, f"nothing was written to {file}"
    assert flushed, f"{file} was never flushed"
    assert flushed[-1] > written[-1], f"{file} was written to after its last flush"
    return flushed[-1]


def assert_whole_and_durable(calls: list[Call], file: Path) -> None:
    """Written under another name, flushed, named, and the name flushed."""
    flushed = assert_flushed(calls, file.with_name(f".{file.name}.partial"))
    named = places_of(calls, "rename", file)
    assert len(named) == 1
    assert named[0] > flushed
    assert places_of(calls, "fsync", file.parent)[-1:] > named


def test_an_export_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_command_ends(
    tmp_path: Path,
) -> None:
    place = finished(tmp_path)
    file = make_folder(place) / "all.csv"
    assert_whole_and_durable(watch(place, "export", file), file)


def test_a_folder_of_an_export_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_command_ends(
    tmp_path: Path,
) -> None:
    place = finished(tmp_path)
    folder = make_folder(place) / "coco"
    calls = watch(place, "export", "--format", "coco", folder)
    [named] = places_of(calls, "rename", folder)
    assert "syncfs" in [call.name for call in calls[:named]]
    assert places_of(calls, "fsync", folder.parent)[-1] > named


def test_a_backup_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_command_ends(
    tmp_path: Path,
) -> None:
    place = finished(tmp_path)
    file = make_folder(place) / "backup.sqlite"
    assert_whole_and_durable(watch(place, "backup", file), file)


def test_a_repaired_sidecar_is_on_the_disk_before_the_command_ends(tmp_path: Path) -> None:
    place = finished(tmp_path)
    sidecar = place.site.results / "00001.ppm.json"
    sidecar.unlink()
    calls = watch(place, "repair")
    named = places_of(calls, "rename", sidecar)
    assert named
    assert [call.name for call in calls[named[-1] :]].count("syncfs") == 1


def test_the_identity_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    place = finished(tmp_path)
    identity = tmp_path / "state" / "identity"
    identity.write_bytes(b"damaged")
    assert_whole_and_durable(watch(place, "repair"), identity)


def test_a_result_is_on_the_ledgers_disk_before_its_sidecar_has_its_name(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    log, sidecar = f"{place.site.ledger}-wal", os.fsencode(place.site.results / "a.ppm.json")
    held: list[int] = []

    def look(call: Call) -> int:
        if call == Call("rename", sidecar):
            held.extend(status for (status,) in place.rows("SELECT status FROM image"))
        return 0

    with Supervisor(tmp_path, look) as supervisor:
        assert place.run_once(supervisor=supervisor.path).returncode == 0
    assert held == [1], "it is DONE in the ledger"
    assert_flushed(supervisor.calls[: supervisor.calls.index(Call("rename", sidecar))], log)


def test_sidecars_and_sources_are_on_the_disk_before_their_images_count_as_published(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "on_success": "delete"}]})
    place.drop("a.ppm", picture(1))
    marks: list[int] = []

    def look(call: Call) -> int:
        if call.name == "syncfs":
            marks.extend(emitted for (emitted,) in place.rows("SELECT emitted FROM image"))
        return 0

    with Supervisor(tmp_path, look) as supervisor:
        assert place.run_once(supervisor=supervisor.path).returncode == 0
    assert marks == [0], "one flush, and its image does not count as published before"
    place.assert_kept(DONE=1)
    flushed = [call.name for call in supervisor.calls].index("syncfs")
    changes = [
        number
        for number, call in enumerate(supervisor.calls)
        if call.name in ("rename", "unlink")
        and call.path.startswith((os.fsencode(place.site.results), os.fsencode(place.inbox())))
    ]
    assert len(changes) >= 3, "the sidecar is named; the source set aside and removed"
    assert changes[-1] < flushed


def test_the_jsonl_output_is_on_the_disk_before_the_ledger_says_that_it_has_its_records(
    tmp_path: Path,
) -> None:
    output = {"results": "out/results", "sinks": ["jsonl"]}
    place, file = Place(tmp_path, {"output": output}), tmp_path / "out" / "results.jsonl"
    place.drop_many(range(3))
    calls = watch(place, "run", "--once")
    assert len(file.read_text().splitlines()) == 3
    flushed = assert_flushed(calls, file)
    named = places_of(calls, "fsync", file.parent)[-1]
    committed = places_of(calls, "fsync", f"{place.site.ledger}-wal")[-1]
    assert flushed < named < committed


def test_files_of_a_sink_are_on_the_disk_before_they_have_their_names_and_these_before_the_ledger_says_so(
    tmp_path: Path,
) -> None:
    output = {"results": "out/results", "sinks": ["captions"]}
    place, folder = Place(tmp_path, {"output": output}), tmp_path / "out" / "results.captions"
    place.drop_many(range(3))
    calls = watch(place, "run", "--once")
    renamed = [places_of(calls, "rename", folder / f"{number:05d}.txt") for number in range(3)]
    assert [len(places) for places in renamed] == [1, 1, 1]
    first, last = min(renamed)[0], max(renamed)[0]
    written = [
        n
        for n, call in enumerate(calls)
        if call.name == "write" and call.path.startswith(os.fsencode(folder))
    ]
    flushed = [number for number, call in enumerate(calls) if call.name == "syncfs"]
    committed = places_of(calls, "fsync", f"{place.site.ledger}-wal")[-1]
    assert len(written) == 3
    assert any(written[-1] < flush < first for flush in flushed)
    assert any(last < flush < committed for flush in flushed)
    assert places_of(calls, "fsync", place.folder / "state" / "files.sqlite")[-1] < first
