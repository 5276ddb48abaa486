"""Damaged ledgers: lost, emptied, swapped, damaged in one bit, or with numbers that no image has."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.core.errors import LedgerDamaged
from daemon.maintenance.comparing import check_ledger
from tests.daemon_process import Daemon, Place, picture, seeded, to_toml, wait_for
from tests.faults.damage import flip_results, sidecars, stored_results

NAMES = ("", "-wal", "-shm")


def worked(folder: Path, images: int = 3) -> Place:
    place = Place(folder)
    place.drop_many(range(images))
    assert place.run_once().returncode == 0
    return place


def empty(place: Place) -> None:
    place.site.ledger.write_bytes(b"")


def remove(place: Place) -> None:
    for name in NAMES:
        Path(f"{place.site.ledger}{name}").unlink(missing_ok=True)


def move_away(place: Place) -> None:
    place.site.ledger.parent.rename(place.folder / "elsewhere")


def keep_only_its_head(place: Place) -> None:
    """As SQLite leaves a file whose -wal was lost before the first checkpoint."""
    remove(place)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


def cut(place: Place) -> None:
    os.truncate(place.site.ledger, place.site.ledger.stat().st_size - 4096)


def change(place: Place, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(statement)


def owing_damaged_results(folder: Path) -> tuple[Place, dict[str, bytes]]:
    """A place with four damaged results that must be published again, and their sidecars."""
    place = worked(folder, 4)
    before = sidecars(place)
    flip_results(place, seeded(), 4)
    change(place, "UPDATE image SET emitted = 0")
    return place, before


@pytest.mark.parametrize("lose", [empty, remove, keep_only_its_head, cut])
def test_a_ledger_that_was_lost_is_not_taken_for_a_new_one(
    tmp_path: Path, lose: Callable[[Place], None]
) -> None:
    place = worked(tmp_path)
    before = sidecars(place)
    lose(place)
    for command in ("run --once", "status", "verify"):
        refused = place.command(*command.split())
        assert refused.returncode == os.EX_DATAERR, command
        assert "`visiond repair`" in refused.stderr
    assert "error" in place.command("check", "--quick").stdout
    assert place.command("repair").returncode == 0
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)
    assert sidecars(place) == before


def test_removing_the_file_that_the_refusal_names_allows_a_new_ledger(tmp_path: Path) -> None:
    place = worked(tmp_path)
    remove(place)
    refusal = json.loads(place.run_once().stderr.splitlines()[-1])["event"]
    Path(refusal.rpartition("remove ")[2].strip().rstrip(".")).unlink()
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


@pytest.mark.parametrize(
    "change",
    [remove, move_away, lambda place: os.replace(place.folder / "backup.sqlite", place.site.ledger), empty],
)
def test_a_running_daemon_notices_that_its_ledger_was_deleted_replaced_or_emptied(
    tmp_path: Path, change: Callable[[Place], None]
) -> None:
    place = worked(tmp_path)
    assert place.command("backup", tmp_path / "backup.sqlite").returncode == 0
    with Daemon(place) as daemon:
        change(place)
        assert daemon.wait_end() == os.EX_DATAERR
        found = "while the daemon used it" in daemon.log_text()
        if change is empty:  # SQLite may be the first to read it
            found |= any(
                words in daemon.log_text() for words in ("image is malformed", "file is not a database")
            )
        assert found
        assert ("was moved or deleted" in daemon.log_text()) == (change in (remove, move_away))
        assert "run `visiond repair" in daemon.log_text()


def test_a_program_that_opens_the_ledger_of_a_running_daemon_and_closes_it_takes_nothing_away(
    tmp_path: Path,
) -> None:
    """Whoever closes a ledger last deletes its -wal, and knows by the locks of others that it is not the last."""
    place = Place(tmp_path)
    place.drop_many(range(1))
    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        with contextlib.closing(sqlite3.connect(place.site.ledger)) as other:
            assert other.execute("SELECT COUNT(*) FROM image").fetchone() == (1,)
        place.drop_many(range(1, 3))
        daemon.wait_idle(3)
        daemon.kill(group=True)
    place.assert_kept(DONE=3)


def test_an_emptied_ledger_is_reported_as_emptied_even_if_sqlite_has_deleted_its_wal(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    with Daemon(place) as daemon:
        daemon.wait_idle(3)
        empty(place)
        assert place.rows("SELECT * FROM sqlite_schema") == []
        assert not Path(f"{place.site.ledger}-wal").exists()
        assert daemon.wait_end() == os.EX_DATAERR
        assert f"{place.site.ledger} was emptied while the daemon used it" in daemon.log_text()


def test_a_run_once_whose_ledger_was_deleted_does_not_end_with_success(tmp_path: Path) -> None:
    slow = {"blip": {"options": {"latency_per_image_seconds": 0.02}}}
    # The last check has to find it.
    place = Place(tmp_path, {"stages": slow, "pipeline": {"rescan_seconds": 3600.0}})
    place.drop_many(range(100))
    with Daemon(place, "--once") as daemon:
        daemon.wait_until(lambda status: status["done"], "work")
        remove(place)
        assert daemon.wait_end() == os.EX_DATAERR


def test_a_ledger_of_another_state_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    place, other = worked(tmp_path), worked(tmp_path / "other")
    remove(place)
    shutil.copy(other.site.ledger, place.site.ledger)
    refused = place.run_once()
    assert refused.returncode == os.EX_DATAERR
    assert "is not the ledger of this state folder" in refused.stderr


def test_a_restored_backup_works_and_no_number_is_given_twice(tmp_path: Path) -> None:
    place = worked(tmp_path)
    assert place.command("backup", tmp_path / "backup.sqlite").returncode == 0
    place.drop("later.ppm", picture(10))
    assert place.run_once().returncode == 0
    later = place.sidecar("later.ppm")["id"]
    remove(place)
    shutil.copy(tmp_path / "backup.sqlite", place.site.ledger)
    assert "older than the last one used here" in (run := place.run_once()).stderr
    assert run.returncode == 0
    assert place.sidecar("later.ppm")["id"] > later
    place.assert_kept(DONE=4)
    assert "older" not in place.run_once().stderr


def test_a_ledger_made_from_sidecars_gives_no_number_twice(tmp_path: Path) -> None:
    place = worked(tmp_path, 5)
    identity = tmp_path / "state" / "identity"
    # The daemon was killed before it noted more.
    noted = json.loads(identity.read_text()) | {"last_number": 2}
    identity.write_text(json.dumps(noted))
    *kept, fourth, fifth = sorted(
        place.site.results.glob("*.json"), key=lambda file: json.loads(file.read_bytes())["id"]
    )
    fourth.unlink()
    fifth.unlink()
    remove(place)
    assert place.command("repair").returncode == 0
    assert place.run_once().returncode == 0
    assert [json.loads(file.read_bytes())["id"] > 5 for file in (*kept, fourth, fifth)] == [False] * 3 + [
        True
    ] * 2
    place.assert_kept(DONE=5)


def test_a_state_folder_that_was_copied_whole_works(tmp_path: Path) -> None:
    place = worked(tmp_path)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "copy").rename(tmp_path / "state")
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


def test_a_wal_that_is_lost_before_the_first_checkpoint_is_noticed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        place.drop_many(range(20))
        daemon.wait_idle(20)
        identity = tmp_path / "state" / "identity"
        wait_for(lambda: json.loads(identity.read_text())["last_number"] == 20, "the note of the last number")
        daemon.kill()
    for name in ("-wal", "-shm"):
        Path(f"{place.site.ledger}{name}").unlink()
    run = place.run_once()
    assert "its -wal file was lost" in run.stderr
    assert run.returncode == 0
    assert place.rows("SELECT MIN(id) > 20, COUNT(*) FROM image") == [(1, 20)]
    place.assert_kept(DONE=20)


# Flipped bits


def test_a_damaged_result_is_not_reused_and_its_model_runs_again(tmp_path: Path) -> None:
    place = worked(tmp_path, 4)
    before, true = sidecars(place), stored_results(place)
    flip_results(place, seeded(), 4)
    place.drop_many(range(10, 11))
    for number in range(4):
        place.drop(f"twin-{number}.ppm", picture(number))
    run = place.run_once()
    assert run.returncode == 0
    assert run.stderr.count("damaged in the ledger") == 4
    assert set(true.values()) <= set(stored_results(place).values())
    assert sidecars(place).items() >= before.items()
    place.assert_kept(DONE=9)


def test_a_damaged_result_is_not_published_but_made_again(tmp_path: Path) -> None:
    place, before = owing_damaged_results(tmp_path)
    run = place.run_once()
    assert run.returncode == 0
    assert run.stderr.count("result damaged in the ledger; it is not published") == 4
    after = sidecars(place)
    assert [json.loads(after[name])["caption"] for name in before] == [
        json.loads(data)["caption"] for data in before.values()
    ]
    place.assert_kept(DONE=4)


def test_a_damaged_result_of_an_image_that_is_gone_leaves_its_sidecar_alone(tmp_path: Path) -> None:
    place, before = owing_damaged_results(tmp_path)
    for file in place.inbox().iterdir():
        file.unlink()
    assert place.run_once().returncode == 0
    assert sidecars(place) == before


def test_a_damaged_result_is_neither_shown_nor_exported(tmp_path: Path) -> None:
    place = worked(tmp_path, 4)
    [name] = flip_results(place, seeded(), 1)
    refused = place.command("show", name.removesuffix(".json"))
    assert (refused.returncode, refused.stdout) == (os.EX_DATAERR, "")
    assert "`visiond repair`" in refused.stderr
    exported = place.command("export", "-", "-f", "jsonl")
    assert exported.returncode == os.EX_DATAERR
    assert len(exported.stdout.splitlines()) == 3
    assert name.removesuffix(".json") not in exported.stdout
    assert "damaged in the ledger" in place.command("list").stdout


# No flipped bit makes a drawing of a picture: what ledger and sidecar say alike is taken as true.
@pytest.mark.parametrize("edit", [lambda data: b"{}\n", lambda data: data.replace(b"picture", b"drawing")])
def test_an_image_that_is_damaged_in_ledger_and_sidecar_is_processed_again(
    tmp_path: Path, edit: Callable[[bytes], bytes]
) -> None:
    place = worked(tmp_path, 4)
    before = sidecars(place)
    [name] = flip_results(place, seeded(), 1)
    (place.site.results / name).write_bytes(edit(before[name]))
    assert "no sidecar has an undamaged copy" in place.command("repair").stdout
    assert (place.site.results / name).read_bytes() == edit(before[name])
    assert place.run_once().returncode == 0
    assert json.loads(sidecars(place)[name])["caption"] == json.loads(before[name])["caption"]
    place.assert_kept(DONE=4)


def test_a_checksum_that_is_damaged_itself_is_made_again(tmp_path: Path) -> None:
    place = worked(tmp_path)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        for table in ("result", "image", "content"):
            connection.execute(f"UPDATE {table} SET checksum = checksum + 1")
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"damaged": 3}
    assert json.loads(place.command("repair", "--json").stdout)["counts"] == {"damaged": 3}
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"whole": 3}


@pytest.mark.parametrize(
    "change", ["bin = 'Z'", "criteria = '{}'", "models = '[1]'", "seen_at = 1", "finished_at = 1"]
)
def test_a_row_that_is_damaged_comes_back_from_its_sidecar(tmp_path: Path, change: str) -> None:
    place = worked(tmp_path)
    before = sidecars(place)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(f"UPDATE image SET {change} WHERE id = 2")
    assert json.loads(place.command("repair", "--json").stdout)["counts"] == {"whole": 2, "damaged": 1}
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"whole": 3}
    assert sidecars(place) == before


def test_a_result_that_belongs_to_no_bytes_any_more_is_removed_by_a_repair(tmp_path: Path) -> None:
    """Otherwise bytes that get the content id 99 later would get this result too."""
    place = worked(tmp_path)
    before = sidecars(place)
    change(place, "UPDATE result SET content = 99 WHERE content = 1 AND model = 2")
    assert json.loads(place.command("repair", "--json").stdout)["counts"] == {"whole": 2, "damaged": 2}
    assert place.rows("SELECT 1 FROM result WHERE content = 99") == []
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"whole": 3}
    assert sidecars(place) == before


# Versions that a newer one of the file has replaced

# Image 1 has content 1.
REPLACED = {
    "a result": "UPDATE result SET payload = replace(payload, '0', '1') WHERE content = 1",
    "a result's checksum": "UPDATE result SET checksum = 7 WHERE content = 1",
    "a size": "UPDATE content SET width = 7 WHERE id = 1",
    "the row": "UPDATE image SET bin = 'wrong' WHERE id = 1",
    "results removed": "DELETE FROM result WHERE content = 1",
}


def is_whole(place: Place) -> bool:
    """By `visiond verify` and by upkeep's check, which have to agree."""
    checked = True
    try:
        check_ledger(place.site.ledger, lambda: False)
    except LedgerDamaged:
        checked = False
    assert (place.command("verify").returncode == 0) == checked
    return checked


@pytest.mark.parametrize(
    ("damage", "on_success"), [*((damage, "keep") for damage in REPLACED), ("a result", "move")]
)
def test_after_a_repair_a_damaged_version_that_was_replaced_is_no_damage(
    tmp_path: Path, damage: str, on_success: str
) -> None:
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0, "on_success": on_success}]})
    for number in range(2):
        place.drop("a.ppm", picture(number))
        assert place.run_once().returncode == 0
    before = sidecars(place)
    change(place, REPLACED[damage])
    assert not is_whole(place)
    assert json.loads(place.command("repair", "--json").stdout)["counts"] == {"whole": 1, "damaged": 1}
    assert is_whole(place)
    assert place.command("export", "-", "-f", "jsonl").returncode == 0
    assert sidecars(place) == before


def test_the_check_and_verify_agree_on_what_is_not_published_and_on_an_inbox_that_is_not_configured(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, {"inbox": [{"name": name, "settle_seconds": 0} for name in ("a", "b")]})
    for number, name in enumerate(("a", "b")):
        place.drop("same.ppm", picture(number), name)
    assert place.run_once().returncode == 0
    change(place, "UPDATE image SET emitted = 0, bin = 'wrong' WHERE id = 1")
    assert not is_whole(place)
    assert place.command("repair").returncode == 0
    assert is_whole(place)
    change(place, "UPDATE result SET checksum = 7 WHERE content = 2")
    only_a = tmp_path / "a.toml"
    only_a.write_text(to_toml({**place.settings, "inbox": place.settings["inbox"][:1]}))
    assert place.command("repair", "--config", only_a).returncode == 0
    assert is_whole(place)
    assert place.run_once().returncode == 0
    assert is_whole(place)
    place.assert_kept(DONE=2)


# The file `identity`


@pytest.mark.parametrize(
    "content", [bytes(95), b"", b'{"ledger":"another","made_at":"2020","last_number":9}']
)
def test_a_damaged_identity_file_is_written_again_from_a_sound_ledger(tmp_path: Path, content: bytes) -> None:
    place = worked(tmp_path, 5)
    rows = place.rows("SELECT * FROM image")
    for file in list(place.site.results.glob("*.json"))[:2]:
        file.unlink()  # reading them removes them
    identity = tmp_path / "state" / "identity"
    before = identity.read_bytes()
    identity.write_bytes(content)
    assert place.run_once().returncode == os.EX_DATAERR
    done = json.loads(place.command("repair", "--json").stdout)
    assert done["counts"] == {"damaged": 1, "missing": 2, "whole": 3}
    assert done["amiss"][0]["file"] == str(identity)
    assert (identity.read_bytes(), place.rows("SELECT * FROM image")) == (before, rows)
    assert not list((tmp_path / "state").glob("*.damaged-*"))
    assert place.run_once().returncode == 0


@pytest.mark.parametrize("lose", [empty, remove, cut])
def test_with_a_damaged_identity_file_a_ledger_that_is_damaged_too_is_made_again(
    tmp_path: Path, lose: Callable[[Place], None]
) -> None:
    place = worked(tmp_path)
    lose(place)
    (tmp_path / "state" / "identity").write_bytes(bytes(95))
    assert json.loads(place.command("repair", "--json").stdout)["counts"] == {"restored": 3}
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=3)


def test_a_ledger_that_made_other_sidecars_is_not_kept_by_a_repair(tmp_path: Path) -> None:
    place = worked(tmp_path)
    before = sidecars(place)
    shutil.move(tmp_path / "state", tmp_path / "aside")
    shutil.move(tmp_path / "results", tmp_path / "old")
    place.drop("00000.ppm", picture(7))
    assert place.run_once().returncode == 0  # the same inbox, another ledger
    shutil.rmtree(tmp_path / "results")
    shutil.move(tmp_path / "old", tmp_path / "results")
    shutil.copy(tmp_path / "aside" / "identity", tmp_path / "state" / "identity")
    change(place, "UPDATE image SET seen_at = seen_at + 1, checksum = NULL")
    repaired = place.command("repair")
    assert sidecars(place) == before
    (kept,) = (tmp_path / "state").glob("ledger.sqlite.damaged-*[0-9]")
    assert f"The old one is kept as {kept}" in repaired.stdout.replace("\n", " ").replace("  ", " ")


# Numbers from outside

WRONG = {
    "id": [0, -1, (1 << 53) + 1, (1 << 63) - 1, 1 << 64],
    "bytes": [-1, (1 << 63) - 1],
    "width": [-1, 1 << 62],
    "height": [1 << 60],
}


def test_a_sidecar_with_a_number_that_no_image_has_is_left_out_and_the_number_named(tmp_path: Path) -> None:
    place = worked(tmp_path)
    whole = place.sidecar("00000.ppm")
    spoiled = {}
    for key, numbers in WRONG.items():
        for index, number in enumerate(numbers):
            name = f"{key}-{index}.ppm"
            document = whole | {"source": whole["source"] | {"path": name}}
            (document if key == "id" else document["source"])[key] = number
            spoiled[f"{name}.json"] = number
            (place.site.results / f"{name}.json").write_text(json.dumps(document))
    remove(place)
    done = json.loads(place.command("repair", "--json").stdout)
    assert done["counts"] == {"restored": 3, "left out": len(spoiled)}
    details = {Path(entry["file"]).name: entry["detail"] for entry in done["amiss"]}
    assert {name for name, number in spoiled.items() if str(number) in details[name]} >= {
        name for name, number in spoiled.items() if abs(number) < 1 << 63
    }
    for name in spoiled:
        (place.site.results / name).unlink()
    place.drop("new.ppm", picture(9))
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=4)


def test_a_ledger_whose_numbers_have_run_out_is_refused(tmp_path: Path) -> None:
    place = worked(tmp_path)
    change(place, "UPDATE sqlite_sequence SET seq = 9223372036854775807")
    refused = place.run_once()
    assert refused.returncode == os.EX_DATAERR
    assert "9223372036854775807" in refused.stderr


def put_back(place: Place, path: str, body: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    with contextlib.closing(connection):
        connection.sock.connect(str(place.folder / "state" / "control.sock"))
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_numbers_in_a_request_are_bounded_and_refused_in_a_sentence(tmp_path: Path) -> None:
    place = worked(tmp_path)
    with Daemon(place) as daemon:
        for body in (
            b"[0]",
            b"[9223372036854775808]",
            b"[1e99]",
            b"7",
            b"not JSON",
            json.dumps([1] * 10_001).encode(),
        ):
            status, answer = put_back(place, "/put-back/DONE", body)
            assert (status, "expected a list of at most 10000 numbers" in answer) == (400, True), body
        assert put_back(place, "/put-back/DONE", b" " * 1_000_000)[0] == 413
        assert put_back(place, "/put-back/PENDING", b"[1]")[0] == 404
        assert put_back(place, "/put-back/DONE", b"[1]") == (200, '{"images":1}')
        assert daemon.stop() == 0


@pytest.mark.parametrize("limit", ["0", "-1", str(1 << 63), "9" * 40])
def test_a_limit_out_of_bounds_is_refused_by_name(tmp_path: Path, limit: str) -> None:
    refused = worked(tmp_path, 1).command("list", "--limit", limit)
    assert refused.returncode == os.EX_USAGE
    assert "--limit" in refused.stderr


def test_a_table_that_sqlite_can_read_but_visiond_did_not_make_is_found_by_verify_and_repaired(
    tmp_path: Path,
) -> None:
    place = worked(tmp_path, 4)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'succeeded_at REAL', 'succeeded_at REEL')"
        )
    assert place.run_once().returncode == os.EX_DATAERR
    assert place.command("verify").returncode == os.EX_DATAERR
    assert place.command("repair").returncode == 0
    assert place.run_once().returncode == 0
