from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.recovery import parse_age
from daemon.core.jobs import Ending, Job, JobStatus, Placed
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from daemon.ledger.statements import SQL
from daemon.maintenance import pruning
from daemon.maintenance.background import run_in_background
from daemon.maintenance.pruning import prune, survey
from tests.daemon_process import STAGES, Daemon, Place, picture, seeded
from tests.makers import Commits, admit, complete, done, failed, make_file

pytestmark = pytest.mark.anyio

LATER = 3e9  # after the end of every image here, in Unix seconds: all is old


async def add_version(ledger: Ledger, path: bytes, mtime_ns: int, regular: bool = True) -> Job:
    """The next version of a file, in flight if it must be processed."""
    await ledger.admit([make_file(path, mtime_ns=mtime_ns, regular=regular)])
    found = await ledger.next_jobs(1, ())
    return found[0] if found else Job(0, 1, path, b"", make_file().version, 0, 0.0)


async def publish(ledger: Ledger, ending: Ending, location: bytes | None = None) -> None:
    await complete(ledger, ending)
    await ledger.mark_emitted([Placed(ending.job.id, location, ending.job.version if location else None)])


def rows(ledger: Ledger, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        return [row[0] for row in connection.execute(query)]


def counted(amounts: pruning.Amounts) -> dict[str, int]:
    return {kind: amount.rows for kind, amount in amounts.items() if amount.rows}


async def replaced_and_gone(ledger: Ledger) -> None:
    """A file of three versions that are DONE, one that FAILED and is DONE now, one SKIPPED before,
    and one that is GONE."""
    for time in (1, 2, 3):
        await publish(ledger, done(await add_version(ledger, b"a.jpg", time), data=b"%d" % time))
    await publish(ledger, failed(await add_version(ledger, b"b.jpg", 1)))
    await publish(ledger, done(await add_version(ledger, b"b.jpg", 2)))
    await add_version(ledger, b"c.jpg", 1, regular=False)
    await publish(ledger, done(await add_version(ledger, b"c.jpg", 2)))
    await ledger.end([Ending(await add_version(ledger, b"d.jpg", 1), JobStatus.GONE, 2e9, 0)])


async def test_replaced_and_gone_versions_go_with_their_results_and_the_newest_stay(ledger: Ledger) -> None:
    await replaced_and_gone(ledger)
    expected = {
        "GONE": 1,
        "replaced DONE": 2,
        "replaced FAILED": 1,
        "replaced SKIPPED": 1,
        "results": 8,
        "contents": 3,
    }
    surveyed = survey(ledger.path, LATER, lambda: False)
    assert counted(surveyed) == expected
    forgotten: list[JobStatus] = []
    assert await prune(ledger, LATER, forgotten.append) == surveyed
    assert sorted(forgotten) == [
        JobStatus.DONE,
        JobStatus.DONE,
        JobStatus.FAILED,
        JobStatus.SKIPPED,
        JobStatus.GONE,
    ]
    assert rows(ledger, "SELECT CAST(path AS TEXT) FROM image ORDER BY path") == ["a.jpg", "b.jpg", "c.jpg"]
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert [len(record.outputs) for record in reader.finished()] == [4, 4, 4]
    assert counted(await prune(ledger, LATER)) == {}


async def test_the_share_that_was_searched_grows_to_all_of_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await replaced_and_gone(ledger)
    monkeypatch.setattr(pruning, "CHUNK", 1)
    seen: list[tuple[int, float]] = []

    def step(amounts: pruning.Amounts, share: float) -> None:
        seen.append((sum(amount.rows for amount in amounts.values()), share))

    survey(ledger.path, LATER, lambda: False, step)
    surveyed, seen = seen, []
    await prune(ledger, LATER, step=step)
    for steps in (surveyed, seen):
        assert len(steps) == 5 + 3  # rows, and the bytes that no version has then
        assert steps == sorted(steps)
        assert steps[4] == (5, 0.5)
        assert steps[-1][0] == 5 + 8 + 3
        assert 0.5 < steps[-1][1] <= 1


async def test_rows_that_are_not_old_enough_stay(ledger: Ledger) -> None:
    await replaced_and_gone(ledger)
    assert counted(await prune(ledger, 1.9e9)) == {}


async def test_results_that_another_file_has_too_stay(ledger: Ledger) -> None:
    await publish(ledger, done(await add_version(ledger, b"a.jpg", 1), data=b"x"))
    await publish(ledger, done(await add_version(ledger, b"a.jpg", 2), data=b"y"))
    await publish(ledger, done(await add_version(ledger, b"twin.jpg", 1), data=b"x"))
    assert counted(await prune(ledger, LATER)) == {"replaced DONE": 1}
    assert len(rows(ledger, "SELECT 1 FROM result")) == 8


async def gone_after_a_result(ledger: Ledger) -> None:
    """Without the later row the earlier one would be in exports again."""
    await publish(ledger, done(await add_version(ledger, b"a.jpg", 1)))
    await ledger.end([Ending(await add_version(ledger, b"a.jpg", 2), JobStatus.GONE, 2e9, 0)])


async def moved(ledger: Ledger) -> None:
    for time, name in ((1, b"/failed/a.jpg"), (2, b"/failed/a~2.jpg")):
        await publish(ledger, failed(await add_version(ledger, b"a.jpg", time)), name)


async def not_published(ledger: Ledger) -> None:
    await publish(ledger, done(await add_version(ledger, b"a.jpg", 1)))
    await complete(ledger, done(await add_version(ledger, b"a.jpg", 2)))


async def failed_after_a_result(ledger: Ledger) -> None:
    """The sidecar is still that of the earlier version."""
    await publish(ledger, done(await add_version(ledger, b"a.jpg", 1)))
    await publish(ledger, failed(await add_version(ledger, b"a.jpg", 2)))


async def skipped_after_a_failure(ledger: Ledger) -> None:
    """The reason is still there."""
    await publish(ledger, failed(await add_version(ledger, b"a.jpg", 1)))
    await add_version(ledger, b"a.jpg", 2, regular=False)


@pytest.mark.parametrize(
    "make",
    [gone_after_a_result, moved, not_published, failed_after_a_result, skipped_after_a_failure],
    ids=lambda f: f.__name__,
)
async def test_versions_that_are_still_needed_stay(ledger: Ledger, make: Callable[[Ledger], Any]) -> None:
    await make(ledger)
    assert counted(survey(ledger.path, LATER, lambda: False)) == counted(await prune(ledger, LATER)) == {}
    assert rows(ledger, "SELECT id FROM image") == [1, 2]


def seen_by_others(path: Path) -> dict[str, Any]:
    """What export, verify, repair, retry, redo and list read; of files that are only GONE nothing is left."""
    with contextlib.closing(Reader(path)) as reader:
        walks = ("finished", "published", "pending", "owed", "set_aside")
        seen: dict[str, Any] = {name: [record.id for record in getattr(reader, name)()] for name in walks}
        seen["redo"] = [record.id for record in reader.newest_done(with_results=False)]
        seen["retry"], seen["bins"] = reader.failed_ids(), reader.bin_counts()
        seen["list"] = [
            record.id for record in reader.newest(None, 9999) if record.status is not JobStatus.GONE
        ]
    return seen


def test_after_any_history_of_a_file_pruning_changes_nothing_that_others_see(tmp_path: Path) -> None:
    chance = seeded()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    insert = "INSERT INTO image VALUES (?, 1, ?, 0, ?, 1, 1, 1, 0, ?, ?, 1, 0, ?, NULL, ?, ?, '{}', NULL, NULL, ?, ?, 0, NULL)"
    with contextlib.closing(ledger), contextlib.closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute("INSERT INTO inbox (id, path) VALUES (1, CAST('/inbox' AS BLOB))")
        for number in range(1, 4001):
            status = chance.choices(list(JobStatus), (1, 4, 3, 2, 3))[0]
            had_result = status is JobStatus.DONE or chance.random() < 0.15
            finished = None if status is JobStatus.PENDING and not had_result else chance.uniform(0, 200)
            location = b"/done/%d" % number if chance.random() < 0.1 else None
            row = (number, b"%d" % chance.randrange(1200), number, status, chance.uniform(0, 200), location)
            connection.execute(
                insert, (*row, "[]" if had_result else None, "A", finished, chance.random() < 0.8)
            )
        connection.execute(
            "INSERT OR IGNORE INTO model (id, stage, fingerprint, notice) VALUES (1, 'ocr', 'x', '')"
        )
        connection.execute("UPDATE image SET models = '[1]' WHERE models = '[]' AND id % 10 > 0")
        connection.commit()
        before = seen_by_others(ledger.path)
        parameters = {"before": 150.0, "ids": json.dumps(list(range(1, 4001)))}
        removed = connection.execute(SQL["prune"], parameters).fetchall()
        connection.commit()
        assert seen_by_others(ledger.path) == before
    assert len(removed) > 400
    assert {status for _, status in removed} == {1, 2, 3, 4}


async def test_results_of_bytes_that_come_again_while_it_prunes_stay(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for time in (1, 2):
        await publish(ledger, done(await add_version(ledger, b"a.jpg", time), data=b"%d" % time))
    [again] = await admit(ledger, b"again.jpg")

    async def find(function: Callable[..., Any], *arguments: object) -> Any:
        found = await run_in_background(function, *arguments)
        if found and "unreferenced" in arguments:
            assert len(found) == 1
            await publish(ledger, done(again, data=b"1"))
        return found

    monkeypatch.setattr(pruning, "run_in_background", find)
    assert counted(await prune(ledger, LATER)) == {"replaced DONE": 1}
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert [len(record.outputs) for record in reader.finished()] == [4, 4]
    assert ledger.results.touched is None


async def test_rows_that_are_needed_again_since_they_were_found_stay(ledger: Ledger) -> None:
    await replaced_and_gone(ledger)
    spare = rows(ledger, "SELECT id FROM image")[:1]
    newest = rows(ledger, "SELECT MAX(id) FROM image WHERE path = CAST('a.jpg' AS BLOB)")
    found = partial(pruning._prune, ids=spare + newest, before=LATER)
    assert [number for number, _ in await ledger.run(found)] == spare


async def test_numbers_are_not_given_twice(ledger: Ledger) -> None:
    job = await add_version(ledger, b"a.jpg", 1)
    await ledger.end([Ending(job, JobStatus.GONE, 2e9, 0)])
    assert counted(await prune(ledger, LATER)) == {"GONE": 1}
    assert (await add_version(ledger, b"a.jpg", 1)).id > job.id


async def test_many_rows_go_in_small_transactions(
    ledger: Ledger, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    for time in (1, 2):
        await ledger.admit([make_file(b"%d.jpg" % number, mtime_ns=time) for number in range(100)])
        for job in await ledger.next_jobs(100, ()):
            await publish(ledger, done(job, data=b"%d %d" % (time, job.id)))
    monkeypatch.setattr(pruning, "CHUNK", 10)
    monkeypatch.setattr(pruning, "PORTION", 30)
    made: list[float] = []
    commits.observe = made.append
    assert counted(await prune(ledger, LATER)) == {"replaced DONE": 100, "results": 400, "contents": 100}
    assert len(made) == 20


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43_200), ("90d", 7_776_000), ("2w", 1_209_600), ("1y", 31_536_000)]
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


def replaced(folder: Path) -> Place:
    """Forty files, each processed twice, a year ago."""
    place = Place(folder)
    for first in (0, 40):
        for number in range(40):
            place.drop(f"{number}.ppm", picture(first + number))
        assert place.run_once().returncode == 0
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        past = "finished_at = finished_at - 31536000, seen_at = seen_at - 31536000, checksum = NULL"
        connection.execute(f"UPDATE image SET {past}")
    assert place.command("repair").returncode == 0  # the times are in the sidecars
    return place


def prune_by_command(place: Place, *options: str) -> dict[str, int]:
    answer = place.command("prune", "--older-than", "90d", "--json", *options)
    assert answer.returncode == 0, answer.stderr
    return {
        kind: amount["rows"]
        for kind, amount in json.loads(answer.stdout)["amounts"].items()
        if amount["rows"]
    }


@pytest.mark.parametrize("running", [True, False])
def test_the_command_prunes_with_and_without_a_daemon_and_verify_finds_all_whole(
    tmp_path: Path, running: bool
) -> None:
    place = replaced(tmp_path)
    expected = {"replaced DONE": 40, "results": 160, "contents": 40}
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(place)) if running else None
        assert prune_by_command(place, "--dry-run") == expected
        assert place.rows("SELECT COUNT(*) FROM image") == [(80,)]
        assert prune_by_command(place) == expected
        if daemon:
            assert daemon.status()["done"] == 40
            place.drop("new.ppm", picture(99))
            daemon.wait_idle(1)
            assert daemon.stop() == 0
    assert json.loads(place.command("status", "--json").stdout)["done"] == 40 + running
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"whole": 40 + running}
    assert place.run_once().returncode == 0
    assert place.rows("SELECT COUNT(*) FROM image") == [(40 + running,)]  # nothing was taken for new


@pytest.mark.parametrize("running", [True, False])
def test_the_command_needs_no_plug_in_and_prunes_the_results_of_one_that_is_not_installed(
    tmp_path: Path, running: bool
) -> None:
    place = replaced(tmp_path)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection, connection:
        connection.execute(
            "INSERT INTO model (id, stage, fingerprint, notice) VALUES (99, 'sharpness', 'f', '')"
        )
        connection.execute(
            "INSERT INTO result (content, model, payload, seconds) SELECT id, 99, CAST('{}' AS BLOB), 0 FROM content"
        )
    with contextlib.ExitStack() as stack:
        if running:
            stack.enter_context(Daemon(place))
        place.configure({"pipeline": {"stages": [*STAGES, "sharpness"]}})
        assert 'no stage "sharpness" is installed' in place.command("prune", "--dry-run").stderr
        expected = {"replaced DONE": 40, "results": 200, "contents": 40}
        assert prune_by_command(place, "--dry-run") == prune_by_command(place) == expected
        assert place.rows("SELECT COUNT(*) FROM result WHERE model = 99") == [(40,)]


def test_without_a_ledger_nothing_is_created(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for options in ((), ("--dry-run",)):
        assert "There is no ledger" in place.command("prune", *options).stderr
    assert not (tmp_path / "state").exists()
