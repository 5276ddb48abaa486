"""Sidecars and ledger are restored from each other, without running a model,
and an unusable ledger is refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from daemon.config.loading import load
from daemon.config.state import lock_state
from daemon.maintenance.comparing import check_some
from tests.checker import digest_of
from tests.daemon_process import STAGES, Daemon, Place, meanwhile, picture, seeded
from tests.faults.syscalls import Call, Supervisor

# a name too long for its sidecar, one that is not UTF-8
ODD: list[str | bytes] = ["sub/a.ppm", "n" * 250 + ".ppm", b"\xff\n.ppm", "sub/b.jpg"]
# How far `verify` and `repair` are, as they say it when they take longer than ten seconds
PROGRESS = re.compile(
    r"^([\d,]+ of [\d,]+ sidecars, [\d,.]+/s, \d+ s to go|(reading the ledger, [\d,]+ MiB|counting the sidecars), \d+ s)\n",
    re.MULTILINE,
)
# Every call of a model fails.
NO_MODEL = {"stages": {name: {"options": {"fail": {"": "raise"}}} for name in STAGES}}


def finished(folder: Path, images: int, **settings: object) -> Place:
    """A finished run: this many images are DONE, and there are four more with odd names, one of which FAILED."""
    place = Place(folder, settings)
    place.drop_many(range(images))
    for number, name in enumerate(ODD[:3]):
        place.drop(name, picture(images + number))
    place.drop(ODD[3], b"no picture")
    assert place.run_once().returncode == 1
    return place


def sidecars(place: Place) -> dict[Path, bytes]:
    folders = (place.site.results, place.site.failed)
    return {file: file.read_bytes() for folder in folders for file in folder.rglob("*.json")}


def told(place: Place, *arguments: str) -> tuple[int, dict[str, int]]:
    """The exit status of a command, and the number of sidecars of each kind that it prints."""
    done = place.command(*arguments, "--json")
    assert not PROGRESS.sub("", done.stderr)
    return done.returncode, json.loads(done.stdout)["counts"]


# Sidecars


def edit(file: Path, chance: random.Random) -> None:
    """Change a byte, so that everything except the content stays the same."""
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1
    file.write_bytes(data)


def test_each_of_a_thousand_deleted_or_edited_sidecars_is_found_and_written_again(tmp_path: Path) -> None:
    place = finished(tmp_path, 996)
    before, chance = sidecars(place), seeded()
    assert told(place, "verify") == (0, {"whole": 1000})
    for file in list(before)[::2]:
        file.unlink()
    for file in list(before)[1::2]:
        edit(file, chance)
    assert told(place, "verify") == (1, {"missing": 500, "edited": 500})
    assert told(place, "repair") == (0, {"missing": 500, "edited": 500})
    assert sidecars(place) == before
    assert told(place, "verify") == (0, {"whole": 1000})


def test_a_sidecar_may_say_of_its_models_what_the_ledger_was_once_told_and_nothing_else(
    tmp_path: Path,
) -> None:
    place = finished(tmp_path, 3)
    file = next(iter(sidecars(place)))
    whole = json.loads(file.read_bytes())
    older, renamed = whole["provenance"]["ocr"] | {"visiond": "0.1.0"}, {"name": "mine"}
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        known = json.dumps([older, whole["provenance"]["ocr"]])
        known = f"{crc32(known.encode()):08x} {known}"
        connection.execute("UPDATE model SET provenance = ? WHERE stage = 'ocr'", (known,))
    for said, counts in (
        (whole["provenance"], {"whole": 7}),
        ({}, {"whole": 7}),
        (whole["provenance"] | {"ocr": older}, {"whole": 7}),
        (whole["provenance"] | {"ocr": renamed}, {"whole": 6, "edited": 1}),
        ({"ocr": [[0]] * 100}, {"whole": 6, "edited": 1}),
    ):
        document = {
            key: said if key == "provenance" else value
            for key, value in whole.items()
            if said or key != "provenance"
        }
        file.write_bytes(msgspec.json.encode(document) + b"\n")
        assert told(place, "verify")[1] == counts
    file.write_bytes(b'{"a":' + b"[" * 100_000)
    assert told(place, "verify")[1] == {"whole": 6, "edited": 1}


def test_a_ledger_that_is_damaged_where_it_says_what_a_model_is_believes_the_sidecars(tmp_path: Path) -> None:
    place = finished(tmp_path, 3)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute("UPDATE model SET provenance = replace(provenance, 'fake', 'fbke')")
    before = sidecars(place)
    assert told(place, "verify") == (0, {"whole": 7})
    assert told(place, "repair") == (0, {"whole": 7})
    assert sidecars(place) == before


def test_a_lost_ledger_is_reported_with_the_fix_before_a_new_one_replaces_it(tmp_path: Path) -> None:
    place = finished(tmp_path, 1)
    shutil.rmtree(place.folder / "state")
    mend = "there are results: `visiond repair` makes it from them"
    assert mend in place.command("check", "--quick").stdout
    assert mend in place.command("status").stderr
    assert mend in place.run_once().stderr
    assert mend not in place.command("check", "--quick").stdout


def test_the_same_bytes_asked_again_leave_sidecars_as_the_ledger_has_them(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"reuse_results": False}})
    for name in ("a.ppm", "b.ppm", "c.ppm"):
        place.drop(name, picture(1))
        assert place.run_once().returncode == 0
    assert told(place, "verify") == (0, {"whole": 3})


@pytest.mark.parametrize(
    "command",
    [
        "verify",
        "repair",
        "status",
        "list",
        "show a",
        "retry --all",
        "export a.csv",
        "backup a.sqlite",
        "check",
        "plan",
        "gpus",
    ],
)
def test_in_a_wrong_folder_no_command_makes_anything(tmp_path: Path, command: str) -> None:
    place = Place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused = place.command(*command.split())
    assert sorted(tmp_path.rglob("*")) == before
    if command not in ("check", "plan", "gpus"):
        assert refused.returncode == os.EX_NOINPUT
        assert "ledger at" in refused.stderr


@pytest.mark.parametrize("folder", ["results", "failed"])
def test_a_sidecar_of_no_image_is_named_and_left_alone(tmp_path: Path, folder: str) -> None:
    place = finished(tmp_path, 1)
    foreign = tmp_path / folder / "copy.json"
    foreign.write_bytes((place.site.results / "00000.ppm.json").read_bytes())
    assert told(place, "verify") == told(place, "verify") == (1, {"whole": 5, "foreign": 1})
    assert told(place, "repair")[0] == 0
    assert foreign.exists()
    assert "copy.json" in place.command("verify").stdout


@pytest.mark.parametrize("on_success", ["keep", "move"])
def test_the_reason_of_an_image_that_waits_for_a_retry_is_not_foreign(
    tmp_path: Path, on_success: str
) -> None:
    place = Place(tmp_path, {"inbox": [{"on_success": on_success, "settle_seconds": 0.1}]})
    # an image whose own name is like a sidecar's, moved next to its reason
    place.drop("cut.json", b"P6\n8 8\n255\n")
    place.drop("bad.jpg", b"no picture")
    place.configure(
        {"stages": {"ocr": {"options": {"fail": {"": "error"}}}}, "pipeline": {"max_attempts": 1}}
    )
    assert place.run_once().returncode == 1
    assert told(place, "verify") == (0, {"whole": 2})
    assert place.command("retry", "--all").stdout == "2 images pending again\n"
    assert told(place, "verify") == (0, {})


def test_every_version_that_failed_and_was_moved_keeps_its_own_reason(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"on_success": "move", "settle_seconds": 0.1}]})
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "a~2.jpg").write_bytes(b"the user's")  # so that the second gets the third name
    for version, content in enumerate((b"no picture", b"no picture either", picture(1)), 1):
        place.drop("a.jpg", content)
        assert place.run_once().returncode == (version < 3)
        assert told(place, "verify") == (0, {"whole": version})
    before = sidecars(place)
    digests = {
        file.name: json.loads(data)["source"]["digest"]
        for file, data in before.items()
        if "failed" in file.parts
    }
    images = [
        file for file in place.site.failed.iterdir() if file.suffix != ".json" and file.name != "a~2.jpg"
    ]
    assert digests == {f"{file.name}.json": f"sha256:{digest_of(os.fsencode(file))}" for file in images}
    assert len(digests) == 2
    (place.site.failed / "a.jpg.json").write_bytes(b"{}")
    assert told(place, "verify") == (1, {"whole": 2, "edited": 1})
    assert told(place, "repair") == (0, {"whole": 2, "edited": 1})
    image = place.site.failed / "a.jpg"
    image.rename(tmp_path / "a.jpg")
    assert told(place, "verify") == (1, {"whole": 2, "foreign": 1})
    (tmp_path / "a.jpg").rename(image)
    place.site.ledger.unlink()
    assert told(place, "repair") == (0, {"restored": 3})
    assert told(place, "verify") == (0, {"whole": 3})
    assert sidecars(place) == before


def test_sidecars_of_images_that_a_crash_left_unmarked_are_not_foreign(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute("UPDATE image SET emitted = 0 WHERE id = 1")
    assert told(place, "verify") == (0, {"whole": 5})


def test_a_sidecar_under_its_second_name_is_verified_and_written_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    (place.site.results / "a.ppm.json").mkdir(parents=True)
    assert place.run_once().returncode == 0
    [sidecar] = place.site.results.glob("~*.json")
    whole = sidecar.read_bytes()
    sidecar.write_bytes(b"{}")
    assert told(place, "verify") == (1, {"edited": 1})
    sidecar.unlink()
    assert told(place, "repair") == (0, {"missing": 1})
    assert sidecar.read_bytes() == whole


def retry(place: Place) -> None:
    assert place.command("retry", "--all").returncode == 0
    place.drop("a.jpg", picture(3))


def replace_by_a_link(place: Place) -> None:
    file = place.inbox() / "a.jpg"
    file.unlink()
    file.symlink_to("/etc/hostname")


@pytest.mark.parametrize(("on_success", "replace"), [("move", retry), ("keep", replace_by_a_link)])
def test_the_reason_of_a_failure_that_was_replaced_is_not_foreign(
    tmp_path: Path, on_success: str, replace: Callable[[Place], None]
) -> None:
    place = Place(tmp_path, {"inbox": [{"on_success": on_success, "settle_seconds": 0.1}]})
    place.drop("a.jpg", b"no picture")
    assert place.run_once().returncode == 1
    replace(place)
    assert place.run_once().returncode == 0
    assert told(place, "verify") == (0, {"whole": 1})
    assert len(list(place.site.failed.rglob("*.json"))) == 1


def test_beside_a_daemon_only_what_stays_amiss_is_reported_and_nothing_is_repaired(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(20))
    place.drop("missing.ppm", picture(20))
    place.drop("edited.ppm", picture(21))
    numbers = itertools.count()

    def replace_a_file() -> None:
        number = next(numbers)
        place.drop(f"{number % 20:05d}.ppm", picture(number))

    with Daemon(place) as daemon, meanwhile(replace_a_file):
        daemon.wait_until(lambda s: s["ended_in_this_run"] > 40, "results")
        for _ in range(3):
            assert told(place, "verify")[1].keys() == {"whole"}
        (place.site.results / "missing.ppm.json").unlink()
        edit(place.site.results / "edited.ppm.json", seeded())
        (place.site.results / "foreign.ppm.json").write_bytes(b"{}")
        for command in (["verify"], ["repair", "--dry-run"]):
            status, counts = told(place, *command)
            assert (status, counts.pop("whole") > 10) == (1, True)
            assert counts == {"missing": 1, "edited": 1, "foreign": 1}
        refused = place.command("repair")
        assert (refused.returncode, "Another visiond is using" in refused.stderr) == (os.EX_TEMPFAIL, True)


def test_beside_a_daemon_older_reasons_and_results_of_waiting_images_are_compared_too(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"on_success": "move", "settle_seconds": 0.1}]})
    for content in (b"no picture", picture(1)):
        place.drop("a.jpg", content)
        place.run_once()
    place.drop("b.ppm", picture(2))
    place.run_once()
    assert place.command("redo", "b.ppm").returncode == 0
    (place.site.failed / "a.jpg.json").write_bytes(b"{}")
    edit(place.site.results / "b.ppm.json", seeded())
    with lock_state(tmp_path / "state"):  # as a daemon that has begun nothing yet
        assert told(place, "verify") == (1, {"whole": 1, "edited": 2})


def test_a_dry_run_of_a_repair_changes_nothing_and_says_what_would_be_done(tmp_path: Path) -> None:
    place = finished(tmp_path, 3)
    assert place.command("repair", "--dry-run").returncode == 0
    (place.site.results / "00001.ppm.json").unlink()
    said = place.command("repair", "--dry-run")
    assert (said.returncode, "1 missing, to be written again" in said.stdout) == (1, True)
    identity = place.site.ledger.with_name("identity")
    identity.rename(tmp_path / "identity")
    identity.write_bytes(b"damaged")
    refused = place.command("repair", "--dry-run")
    assert (refused.returncode, "visiond repair" in refused.stderr) == (os.EX_DATAERR, True)
    (tmp_path / "identity").rename(identity)
    place.site.ledger.unlink()
    assert told(place, "repair", "--dry-run") == (1, {"restored": 6})
    assert not place.site.ledger.exists()


def test_each_tenth_of_the_sidecars_is_compared_in_its_turn(tmp_path: Path) -> None:
    place = finished(tmp_path, 40)
    files = random.Random(1).sample(sorted(sidecars(place)), 3)
    for file in files:
        file.unlink()
    said = [check_some(load(place.config), part, 10, lambda: False) for part in range(10)]
    found = [re.match(r"(?:([\d,]+) of )?([\d,]+) sidecars", each) for each in said]
    assert sum(int(each[1] or 0) for each in found if each) == 3
    assert sum(int(each[2]) for each in found if each) == 44
    assert any(str(files[0]) in each or str(files[1]) in each for each in said)


# The ledger


def zero_the_head(ledger: Path) -> None:
    with ledger.open("r+b") as file:
        file.write(bytes(100))


def zero_the_pages(ledger: Path) -> None:
    """The first page, with the names of all tables, is left."""
    with ledger.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(ledger.stat().st_size - 4096))


@pytest.mark.parametrize("damage", [zero_the_head, zero_the_pages])
def test_a_damaged_ledger_is_refused_with_the_fix_and_rebuilt_from_the_sidecars(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    place = finished(tmp_path, 40)
    damage(place.site.ledger)
    before = place.site.ledger.read_bytes()
    for command in ("run", "verify", "status", "export"):
        refused = place.command(command, *([tmp_path / "out.csv"] if command == "export" else []))
        assert refused.returncode == os.EX_DATAERR, command
        assert "run `visiond repair`" in refused.stderr
    assert place.site.ledger.read_bytes() == before
    assert told(place, "repair") == (0, {"restored": 44})
    (kept,) = place.site.ledger.parent.glob("ledger.sqlite.damaged-*[0-9]")
    assert kept.read_bytes() == before
    assert told(place, "verify") == (0, {"whole": 44})


@pytest.mark.parametrize(
    "settings", [{}, {"inbox": [{"on_success": "move", "settle_seconds": 0.1}]}, {"output": {"bins": "move"}}]
)
def test_a_lost_ledger_comes_back_from_the_sidecars_and_no_model_runs_again(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    place = finished(tmp_path, 40, **settings)
    before = sidecars(place)
    place.site.ledger.unlink()
    assert told(place, "repair") == (0, {"restored": 44})
    place.configure(NO_MODEL)
    place.drop("twin.ppm", picture(0))  # the same bytes as an image that is known
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=44, FAILED=1)
    assert sidecars(place).items() > before.items()
    assert place.command("retry", "--all").stdout == "1 image pending again\n"
    assert place.run_once().returncode == 1  # it is read where it is now, and fails again
    place.assert_kept(DONE=44, FAILED=1)


def test_an_image_that_changed_since_its_sidecar_was_written_is_a_new_version(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    place.site.ledger.unlink()
    place.drop("00000.ppm", picture(100))
    assert told(place, "repair") == (0, {"restored": 6})
    assert place.run_once().returncode == 0
    place.dropped[""][b"00000.ppm"].pop(0)
    (row,) = place.rows("SELECT COUNT(*) FROM image WHERE status = 1 AND path = CAST('00000.ppm' AS BLOB)")
    assert row == (2,)
    assert (
        place.sidecar("00000.ppm")["source"]["digest"].removeprefix("sha256:")
        == place.dropped[""][b"00000.ppm"][-1]
    )


def test_a_sidecar_in_the_folder_of_another_inbox_is_left_out(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"name": name, "settle_seconds": 0.1} for name in ("a", "b")]})
    for number, name in enumerate(("a", "b")):
        place.drop("same.ppm", picture(number), name)
    assert place.run_once().returncode == 0
    place.site.ledger.unlink()
    for old, new in (("a", "aside"), ("b", "a"), ("aside", "b")):
        os.rename(place.site.results / old, place.site.results / new)
    amiss = json.loads(place.command("repair", "--json").stdout)["amiss"]
    assert [(entry["kind"], "it belongs to the inbox" in entry["detail"]) for entry in amiss] == [
        ("left out", True)
    ] * 2
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=2)


def test_no_ledger_is_made_when_the_sidecars_are_of_an_inbox_that_was_moved(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    place.site.ledger.unlink()
    (place.site.ledger.parent / "identity").unlink()
    old, new = place.inbox(), tmp_path / "moved"
    old.rename(new)
    place.settings["inbox"][0]["path"] = "moved"
    place.configure()
    for _ in range(2):
        refused = place.command("repair")
        assert refused.returncode == os.EX_CONFIG
        assert (
            f"6 sidecars of the inbox {old}, which is not in this configuration, and none of {new}"
            in refused.stderr
        )
        assert f"`ln -s {new} {old}`" in refused.stderr
        assert not list(place.site.ledger.parent.glob("ledger.sqlite*"))
    old.symlink_to(new)
    place.settings["inbox"][0]["path"] = "inbox"
    place.configure()
    assert told(place, "repair") == (0, {"restored": 6})
    assert place.run_once().stdout.startswith("0 done")


def test_a_rebuilt_ledger_takes_the_damaged_ones_place_at_once_and_outlives_a_power_failure(
    tmp_path: Path,
) -> None:
    place = finished(tmp_path, 2)
    zero_the_head(place.site.ledger)

    absent: list[Call] = []

    def decide(call: Call) -> int:
        # A daemon that is started now would make a new ledger.
        absent.extend([] if place.site.ledger.exists() else [call])
        return 0

    with Supervisor(tmp_path, decide) as supervisor:
        assert place.command("repair", supervisor=supervisor.path).returncode == 0
    assert absent == []
    renamed = supervisor.calls.index(Call("rename", os.fsencode(place.site.ledger)))
    assert Call("fsync", os.fsencode(place.site.ledger.parent)) in supervisor.calls[renamed:]


def test_a_file_that_is_not_a_sidecar_is_left_out_and_named(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    whole = place.sidecar("00000.ppm")
    spoiled = {
        "half.json": b'{"schema":"visiond/1",',
        "00000.ppm.json": json.dumps(whole | {"id": "one"}).encode(),
        "elsewhere.json": json.dumps(
            whole | {"source": whole["source"] | {"path": "../../00000.ppm"}}
        ).encode(),
        "00001.ppm.json": json.dumps(
            {key: value for key, value in place.sidecar("00001.ppm").items() if key != "clip"}
        ).encode(),
        "huge.ppm.json": json.dumps(
            whole | {"id": 1 << 64, "source": whole["source"] | {"path": "huge.ppm"}}
        ).encode(),
        "none.ppm.json": json.dumps(
            whole | {"id": 0, "source": whole["source"] | {"path": "none.ppm"}}
        ).encode(),
        "sub/a.ppm.json": json.dumps(place.sidecar("sub/a.ppm") | {"id": 99, "schema": "visiond/2"}).encode(),
    }
    for name, data in spoiled.items():
        (place.site.results / name).write_bytes(data)
    for name in ("pipe.json", "link.json"):
        spoiled[name] = b""
    os.mkfifo(place.site.results / "pipe.json")
    (place.site.results / "link.json").symlink_to("/dev/zero")
    place.site.ledger.unlink()
    done = place.command("repair", "--json")
    assert done.returncode == 1
    assert "9 sidecars could not be used" in json.loads(done.stdout)["notes"][0]
    amiss = json.loads(done.stdout)["amiss"]
    assert {
        Path(entry["file"]).relative_to(place.site.results).as_posix() for entry in amiss
    } == spoiled.keys()
    assert all(entry["kind"] == "left out" and entry["detail"] for entry in amiss)
    for name in ("half.json", "elsewhere.json", "pipe.json", "link.json", "huge.ppm.json", "none.ppm.json"):
        (place.site.results / name).unlink()
    assert place.run_once().returncode == 0  # what was left out is simply done again
    place.assert_kept(DONE=5, FAILED=1)


def test_a_ledger_that_cannot_be_opened_is_not_rebuilt(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.site.ledger.mkdir(parents=True)
    for command in ("run", "repair"):
        refused = place.command(command)
        assert refused.returncode == os.EX_CONFIG
        assert "ledger.sqlite is a folder" in refused.stderr
    assert place.site.ledger.is_dir()


def test_a_rebuild_that_was_killed_starts_again(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    os.rename(place.site.ledger, f"{place.site.ledger}.new")
    Path(f"{place.site.ledger}.new-wal").write_bytes(b"torn")
    assert told(place, "repair") == (0, {"restored": 6})
    assert not list(place.site.ledger.parent.glob("*.new*"))


def test_a_sidecar_that_the_disk_loses_after_all_ends_the_repair_with_a_sentence(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    with Supervisor(tmp_path, lambda call: errno.EIO if call.name == "syncfs" else 0) as supervisor:
        refused = place.command("repair", supervisor=supervisor.path)
    assert refused.returncode == os.EX_CANTCREAT
    assert "then run `visiond repair` again" in refused.stderr


def test_a_sidecar_that_cannot_be_written_ends_the_repair_with_a_sentence(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    shutil.rmtree(place.site.results)
    place.site.results.write_bytes(b"in the way")
    refused = place.command("repair")
    assert refused.returncode == os.EX_CANTCREAT
    assert "then run `visiond repair` again" in refused.stderr


# Backups


def test_a_backup_is_taken_while_the_daemon_writes_and_brings_everything_back(tmp_path: Path) -> None:
    place, copy = Place(tmp_path), tmp_path / "backup.sqlite"
    with Daemon(place) as daemon:
        place.drop_many(range(300))
        daemon.wait_until(lambda status: status["ended_in_this_run"] > 20, "some endings")
        assert place.command("backup", copy).stdout == f"The ledger is backed up to {copy}\n"
        daemon.wait_idle(300)
        assert daemon.stop() == 0
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT COUNT(*) FROM image WHERE status = 1").fetchone()[0] > 20
    os.replace(copy, place.site.ledger)
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=300)
    assert told(place, "verify") == (0, {"whole": 300})


def test_a_backup_brings_back_the_results_of_sources_that_are_no_longer_there(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"inbox": [{"settle_seconds": 0, "on_success": "delete"}], "output": {"bins": "copy"}}
    )
    place.drop_many(range(3))
    place.drop("broken.jpg", b"no picture")
    assert place.run_once().returncode == 1
    before, exported = sidecars(place), place.command("export", "-").stdout
    assert place.command("backup", tmp_path / "backup.sqlite").returncode == 0
    for folder in ("state", "results", "failed", "done", "bins"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    (tmp_path / "state").mkdir()
    os.replace(tmp_path / "backup.sqlite", place.site.ledger)
    assert told(place, "repair") == (0, {"missing": 4})
    assert (sidecars(place), place.command("export", "-").stdout) == (before, exported)
    assert place.command("retry", "--all").returncode == 0
    again = place.drop("00000.ppm", picture(0))
    assert place.run_once().returncode == 0
    assert place.rows("SELECT status FROM image ORDER BY id")[-1] == (1,)
    # The image to retry is not there.
    assert place.rows("SELECT COUNT(*) FROM image WHERE status = 4")[0] == (1,)
    assert [path.name for path in place.site.bins.rglob("*.ppm")] == [again.name]


def test_if_two_sidecars_have_one_number_one_is_reported_as_left_out(tmp_path: Path) -> None:
    place = finished(tmp_path, 2)
    twin = place.site.results / "00001.ppm.json"
    twin.write_text(json.dumps(place.sidecar("00001.ppm") | {"id": place.sidecar("00000.ppm")["id"]}))
    place.site.ledger.unlink()
    done = json.loads(place.command("repair", "--json").stdout)
    assert done["counts"] == {"restored": 5, "left out": 1}
    assert len(place.rows("SELECT id FROM image")) == 5


def test_a_backup_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.run_once().returncode == 0
    refused = place.command("backup", tmp_path / "none" / "backup.sqlite")
    assert refused.returncode == os.EX_CANTCREAT
    assert "backup.sqlite cannot be written" in refused.stderr


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["backup"], "is the ledger itself"),
        (["export", "-f", "jsonl"], "a folder of the daemon (state.path)"),
    ],
)
def test_a_copy_never_takes_the_place_of_the_ledger(tmp_path: Path, command: list[str], why: str) -> None:
    place = finished(tmp_path, 1)
    for suffix in ("", "-wal"):
        refused = place.command(*command, f"{place.site.ledger}{suffix}")
        assert refused.returncode == os.EX_USAGE
        assert why in refused.stderr
    assert told(place, "verify") == (0, {"whole": 5})
