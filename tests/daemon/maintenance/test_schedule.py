from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec import structs

from daemon.config.loading import parse
from daemon.config.sections import Inbox
from daemon.config.state import UPKEEP
from daemon.core.errors import ConfigError, LedgerDamaged
from daemon.core.jobs import JobStatus
from daemon.inbox.folder import open_folder
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stopped
from daemon.ledger.records import Reader
from daemon.ledger.writer import Alone
from daemon.maintenance import pruning
from daemon.maintenance import schedule as upkeep
from daemon.maintenance.background import run_in_background
from daemon.maintenance.backups import back_up_into
from daemon.maintenance.comparing import check_ledger
from daemon.maintenance.forgetting import Forgotten
from daemon.maintenance.schedule import Upkeep, is_quiet
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import TASKS
from daemon.monitoring.upkeep import read_upkeep
from tests.daemon_process import PATIENCE, Daemon, Gate, Place, picture, until, wait_for
from tests.makers import MODELS, make_file

pytestmark = pytest.mark.anyio

DAY, HOUR, MINUTE = 86_400.0, 3600.0, 60.0
NIGHT = 1_700_000_000 // 86_400 * DAY + 2 * HOUR  # 02:00 in UTC
LOCAL = [task for task in TASKS if task != "upload"]  # its tests have a store: tests/daemon/stores
VERIFY_ALONE = {"backup_folder": "", "forget_days": 0, "prune_days": 0, "vacuum_days": 0}
ALL_ON = {"backup_folder": "backups", "prune_days": 1, "verify_days": 1, "vacuum_days": 1}


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = NIGHT) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def open_upkeep(tmp_path: Path, inbox: Path) -> AsyncIterator[Callable[..., Upkeep]]:
    """Upkeep of a new ledger in tmp_path/state, with these settings."""
    ledger = Ledger(tmp_path / "state" / "ledger.sqlite")
    await ledger.register([(inbox, 0)], MODELS)

    def make(clock: Callable[[], float], is_idle: bool = True, **settings: Any) -> Upkeep:
        config = parse({"upkeep": ALL_ON | settings}, tmp_path)
        return Upkeep(config, ledger, Metrics(), lambda: is_idle, {}, clock)

    yield make
    ledger.close()


async def do_all(keeper: Upkeep) -> list[str]:
    """Run everything that is due, one task after another."""
    done: list[str] = []
    while task := keeper.next_task():
        await keeper.perform(task)
        done.append(task)
    return done


def damage(ledger: Path) -> None:
    """Overwrite a page of its tables and indexes on the disk."""
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'version'").fetchone()
    with ledger.open("r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xff" * 4096)


# When


@pytest.mark.parametrize(
    ("hours", "clock", "quiet"),
    [
        ("02:00-05:00", "01:59", False),
        ("02:00-05:00", "02:00", True),
        ("02:00-05:00", "04:59", True),
        ("02:00-05:00", "05:00", False),
        ("22:30-04:00", "23:00", True),
        ("22:30-04:00", "03:59", True),
        ("22:30-04:00", "12:00", False),
        ("", "12:00", True),
    ],
)
def test_quiet_hours_are_local_and_may_cross_midnight(hours: str, clock: str, quiet: bool) -> None:
    hour, minute = map(int, clock.split(":"))
    assert is_quiet(hours, NIGHT - 2 * HOUR + hour * HOUR + minute * MINUTE) is quiet


@pytest.mark.parametrize("hours", ["2-5", "02:00", "24:00-05:00", "02:00-02:00", "02:60-05:00"])
def test_invalid_quiet_hours_are_refused(tmp_path: Path, hours: str) -> None:
    with pytest.raises(ConfigError, match="quiet_hours"):
        parse({"upkeep": {"quiet_hours": hours}}, tmp_path)


async def test_tasks_are_done_once_in_their_interval_in_quiet_hours_alone(
    open_upkeep: Callable[..., Upkeep],
) -> None:
    clock = Clock(NIGHT - MINUTE)
    keeper = open_upkeep(clock)
    assert await do_all(keeper) == []
    for _ in range(3):
        clock.now += MINUTE
        assert await do_all(keeper) == LOCAL
        clock.now += HOUR
        assert await do_all(keeper) == []
        clock.now += DAY - HOUR - MINUTE
    assert await do_all(open_upkeep(Clock(clock.now - HOUR))) == []  # a later daemon knows what was done


@pytest.mark.parametrize("days", [1, 7, 10])
async def test_ten_checks_compare_all_of_the_sidecars(
    days: int, open_upkeep: Callable[..., Upkeep], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    monkeypatch.setattr(upkeep, "check_some", lambda config, part, parts_, stop: parts.append(part))
    clock = Clock()
    keeper = open_upkeep(clock, **VERIFY_ALONE, verify_days=days)
    for _ in range(10):
        assert await do_all(keeper) == ["verify"]
        clock.now += days * DAY
    assert sorted(parts) == list(range(10))


async def test_disabled_tasks_never_run_and_none_starts_while_images_are_in_flight(
    open_upkeep: Callable[..., Upkeep],
) -> None:
    assert await do_all(open_upkeep(Clock(), is_idle=False)) == []
    assert await do_all(open_upkeep(Clock(), **VERIFY_ALONE)) == ["verify"]


async def test_a_clock_that_was_set_back_keeps_nothing_waiting_for_longer_than_its_interval(
    open_upkeep: Callable[..., Upkeep],
) -> None:
    clock = Clock(NIGHT + 1000 * DAY)
    keeper = open_upkeep(clock)
    await do_all(keeper)
    clock.now = NIGHT
    assert await do_all(keeper) == LOCAL


async def test_skipped_files_are_forgotten_when_each_inbox_that_can_be_read_has_been_scanned(
    open_upkeep: Callable[..., Upkeep], inbox: Path
) -> None:
    keeper = open_upkeep(Clock(), **VERIFY_ALONE | {"verify_days": 0, "forget_days": 1})
    there, dead = open_folder(1, Inbox(path=inbox)), open_folder(2, Inbox(path=inbox / "dead"))
    keeper._folders = {1: there, 2: dead}
    assert keeper.next_task() is None
    there.first_scanned_at = 1.0
    assert keeper.next_task() is None
    dead.trouble = "Transport endpoint is not connected"
    assert keeper.next_task() == "forget"


async def test_a_run_forgets_skipped_files_each_time_unless_that_took_long(
    open_upkeep: Callable[..., Upkeep], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = Clock(), list[str]()

    async def forget(*_: object) -> Forgotten:
        done.append("forget")
        return Forgotten()

    async def count(seconds: float) -> int:
        """How often it has been done after one more run a minute later, if the last time took so long."""
        clock.now += MINUTE
        if run := keeper._last_runs.get("forget"):
            keeper._last_runs["forget"] = structs.replace(run, seconds=seconds)
        await keeper.forget_at_end()
        return len(done)

    monkeypatch.setattr(upkeep, "forget_skipped", forget)
    keeper = open_upkeep(clock)
    assert await count(0.1) == 0, "there is no skipped file"
    keeper._counts.begin({JobStatus.SKIPPED: 1})
    assert [await count(0.1), await count(0.9), await count(2.0), await count(2.0)] == [1, 2, 2, 2]
    clock.now += 2 * MINUTE
    assert await count(2.0) == 3
    keeper = open_upkeep(clock, forget_days=0)
    keeper._counts.begin({JobStatus.SKIPPED: 1})
    assert await count(0.1) == 3


# How it ends


async def test_a_damaged_ledger_is_reported_counted_and_checked_again_an_hour_later(
    open_upkeep: Callable[..., Upkeep],
) -> None:
    clock = Clock()
    keeper = open_upkeep(clock, **VERIFY_ALONE)
    damage(keeper._ledger.path)
    assert await do_all(keeper) == ["verify"]
    [failure] = keeper.failures()
    assert failure.startswith("upkeep: verify failed:")
    assert "visiond repair" in failure
    assert keeper._metrics.value("visiond_upkeep_failures_total", task="verify") == 1
    assert keeper._metrics.value("visiond_upkeep_failed", task="verify") == 1
    assert (
        open_upkeep(clock)._metrics.value("visiond_upkeep_failed", task="verify") == 1
    )  # after a restart too
    assert keeper._metrics.value("visiond_upkeep_last_success_timestamp_seconds", task="verify") == 0
    clock.now += HOUR - 1
    assert await do_all(keeper) == []
    clock.now += 1
    assert await do_all(keeper) == ["verify"]


async def test_a_later_daemon_shows_the_last_success(
    open_upkeep: Callable[..., Upkeep], tmp_path: Path
) -> None:
    assert len(await do_all(open_upkeep(Clock()))) == 5
    later = open_upkeep(Clock())
    assert [(run.task, run.outcome, run.succeeded_at) for run in later.last_runs()] == [
        (task, "done", NIGHT) for task in LOCAL
    ]
    assert later._metrics.value("visiond_upkeep_last_success_timestamp_seconds", task="backup") == NIGHT
    (tmp_path / "state" / UPKEEP).write_bytes(b"{torn")
    assert read_upkeep(tmp_path / "state") == []


async def test_every_failure_is_counted_from_zero(open_upkeep: Callable[..., Upkeep]) -> None:
    metrics = open_upkeep(Clock())._metrics
    names = ("visiond_upkeep_failures_total", "visiond_upkeep_last_success_timestamp_seconds")
    assert [metrics.registry.get_sample_value(name, {"task": task}) for name in names for task in TASKS] == [
        0.0
    ] * (2 * len(TASKS))


# Backups


async def test_only_the_newest_backups_are_kept_and_nothing_else_is_touched(
    ledger: Ledger, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    for name in ("mine.sqlite", "ledger-old.sqlite", ".ledger-2020-01-01T000000Z.sqlite.partial-journal"):
        (folder / name).touch()
    await ledger.admit([make_file()])
    for day in range(5):
        file = back_up_into(ledger.path, folder, 2, NIGHT + day * DAY, lambda: False)
    dates = [time.strftime("%Y-%m-%d", time.gmtime(NIGHT + day * DAY)) for day in (3, 4)]
    assert sorted(os.listdir(folder)) == [
        *(f"ledger-{date}T020000Z.sqlite" for date in dates),
        "ledger-old.sqlite",
        "mine.sqlite",
    ]
    with contextlib.closing(Reader(file)) as reader:
        assert reader.counts()[JobStatus.PENDING] == 1


async def test_a_new_backup_is_never_removed_as_old_whatever_the_names_of_the_others(
    ledger: Ledger, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    for year in (2098, 2099):  # of a clock that was wrong
        (folder / f"ledger-{year}-01-01T000000Z.sqlite").touch()
        os.utime(folder / f"ledger-{year}-01-01T000000Z.sqlite", (0, 0))
    assert back_up_into(ledger.path, folder, 2, NIGHT, lambda: False).exists()
    assert len(list(folder.iterdir())) == 2


async def test_two_prunings_are_done_one_after_the_other(
    open_upkeep: Callable[..., Upkeep], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, running = open_upkeep(Clock()), list[int]()

    async def fake(*_: object) -> dict[str, object]:
        running.append(len(running))
        assert len(running) == 1
        await anyio.lowlevel.checkpoint()
        running.clear()
        return {}

    monkeypatch.setattr(upkeep, "prune", fake)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper._prune_when_asked)
        keeper.prune_soon(0.0)
        await keeper.perform("prune")
        await until(lambda: not keeper.pruning.running)
        tasks.cancel_scope.cancel()
    assert keeper.pruning.trouble == ""
    assert keeper.failures() == []


async def test_a_backup_is_of_one_moment_though_images_come_all_the_time(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.admit([make_file(b"%d.jpg" % number) for number in range(2000)])
    loop, numbers = asyncio.get_running_loop(), iter(range(100_000, 100_010))

    def admit_one_in_each_pause(_seconds: float) -> None:
        for number in itertools.islice(numbers, 1):
            asyncio.run_coroutine_threadsafe(ledger.admit([make_file(b"%d.jpg" % number)]), loop).result(
                PATIENCE
            )

    monkeypatch.setattr("daemon.maintenance.backups.PAGES", 5)
    monkeypatch.setattr("daemon.maintenance.backups.time.sleep", admit_one_in_each_pause)
    file = await run_in_background(back_up_into, ledger.path, tmp_path / "backups", 2, NIGHT)
    with contextlib.closing(Reader(file)) as reader, contextlib.closing(Reader(ledger.path)) as now:
        assert (reader.counts()[JobStatus.PENDING], now.counts()[JobStatus.PENDING]) == (2000, 2010)


async def test_a_copy_of_a_damaged_ledger_replaces_no_good_one(ledger: Ledger, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    good = back_up_into(ledger.path, folder, 1, NIGHT, lambda: False)
    damage(ledger.path)
    with pytest.raises(LedgerDamaged):
        back_up_into(ledger.path, folder, 1, NIGHT + DAY, lambda: False)
    assert os.listdir(folder) == [good.name]


# Stopping


def wait_to_be_stopped(begun: threading.Event, stopped: threading.Event, stop: Callable[[], bool]) -> None:
    begun.set()
    while not stop():
        time.sleep(0.001)
    stopped.set()


async def test_a_background_thread_is_stopped_when_nothing_waits_for_it() -> None:
    begun, stopped = threading.Event(), threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_in_background, wait_to_be_stopped, begun, stopped)
        await until(begun.is_set)
        tasks.cancel_scope.cancel()
    await until(stopped.is_set)


@pytest.mark.parametrize(
    "read",
    [check_ledger, lambda path, stop: back_up_into(path, path.parent / "backups", 1, NIGHT, stop)],
    ids=["check", "backup"],
)
async def test_long_reads_can_be_stopped(ledger: Ledger, read: Callable[..., Any]) -> None:
    await ledger.admit([make_file(b"%d.jpg" % number) for number in range(5000)])
    with pytest.raises(Stopped):
        read(ledger.path, lambda: True)
    assert not list(ledger.path.parent.glob("backups/*"))


async def fill_and_empty(ledger: Ledger, megabytes: int) -> None:
    def work(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE filler (data)")
        connection.executemany("INSERT INTO filler VALUES (zeroblob(1048000))", [()] * megabytes)

    await ledger.run(work)
    await ledger.run(lambda connection: connection.execute("DELETE FROM filler"))


async def test_a_file_that_is_mostly_free_is_made_smaller(open_upkeep: Callable[..., Upkeep]) -> None:
    keeper = open_upkeep(Clock())
    assert await keeper._vacuum() == "not needed: only 0 of 0 MiB are free"
    await fill_and_empty(keeper._ledger, 20)
    assert "given back" in await keeper._vacuum()
    assert keeper._ledger.path.stat().st_size < 1 << 20
    assert (await keeper._ledger.admit([make_file()])).pending == 1


async def admit(keeper: Upkeep) -> None:
    assert (await keeper._ledger.admit([make_file(b"new.jpg")])).pending == 1


async def put_back(keeper: Upkeep) -> None:
    assert await keeper._ledger.put_back(JobStatus.FAILED, [1]) == 0


async def ask_to_prune(keeper: Upkeep) -> None:
    keeper.prune_soon(0.0)


@pytest.mark.parametrize("ask", [admit, put_back, ask_to_prune])
async def test_making_the_file_smaller_stops_when_images_or_a_command_come(
    open_upkeep: Callable[..., Upkeep],
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[Upkeep], Coroutine[Any, Any, None]],
) -> None:
    keeper = open_upkeep(Clock())
    ledger, begun, asked, vacuum = keeper._ledger, threading.Event(), threading.Event(), pruning._vacuum
    await ledger.admit([make_file(b"%d.jpg" % number) for number in range(5000)])
    size = ledger.path.stat().st_size

    def begin_late(connection: sqlite3.Connection, stop: Callable[[], bool]) -> None:
        begun.set()
        assert asked.wait(PATIENCE)
        vacuum(connection, stop)

    monkeypatch.setattr(pruning, "_vacuum", begin_late)
    monkeypatch.setattr(pruning, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(pruning, "FREE_SHARE", 0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper.perform, "vacuum")
        await until(begun.is_set)
        tasks.start_soon(ask, keeper)
        await anyio.wait_all_tasks_blocked()
        asked.set()
    [run] = [run for run in keeper.last_runs() if run.task == "vacuum"]
    assert (run.outcome, run.succeeded_at, keeper.failures()) == ("stopped", None, [])
    assert ledger.path.stat().st_size == size


async def test_work_that_must_not_run_in_a_transaction_runs_outside_of_one_although_requests_wait(
    ledger: Ledger,
) -> None:
    go, answers = threading.Event(), []

    async def ask(work: Any) -> None:
        answers.append(await ledger.run(work))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, lambda connection: go.wait(30))
        await anyio.wait_all_tasks_blocked()
        for work in (
            _is_in_transaction,
            Alone(_is_in_transaction),
            _is_in_transaction,
            Alone(_is_in_transaction),
        ):
            tasks.start_soon(ask, work)
        await anyio.wait_all_tasks_blocked()
        go.set()
    assert sorted(answers) == [False, False, True, True, True]


def _is_in_transaction(connection: sqlite3.Connection) -> bool:
    return connection.in_transaction


# In the daemon


def test_the_daemon_does_what_is_due_and_its_status_and_readyz_say_how_that_ended(tmp_path: Path) -> None:
    folder = "/proc/backups"  # where nobody can make a folder
    place = Place(tmp_path, {"upkeep": {"quiet_hours": "", "backup_folder": folder}})
    place.drop("a.ppm", picture(1))
    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        status = daemon.wait_until(lambda s: all(run["outcome"] for run in s["upkeep"]), "upkeep")
        assert [(run["task"], run["outcome"]) for run in status["upkeep"]] == [
            ("verify", "done"),
            ("backup", "failed"),
            ("forget", "done"),
            ("vacuum", "done"),
        ]
        code, ready = daemon.get("/readyz")
        assert (code, ready["problems"]) == (200, [])
        assert ready["upkeep"] == [
            f"upkeep: backup failed: {folder} cannot be written: No such file or directory."
        ]
        assert daemon.metric("visiond_upkeep_failures_total", task="backup") == 1
        assert daemon.metric("visiond_upkeep_last_success_timestamp_seconds", task="verify") > 1.7e9
        place.drop("b.ppm", picture(2))
        daemon.wait_idle(2)
        assert daemon.stop() == 0
    assert "backup failed" in place.command("status").stdout


def test_a_scrape_does_not_wait_for_the_ledger_and_reports_what_was_known(tmp_path: Path) -> None:
    place, gate = Place(tmp_path), Gate(tmp_path)
    oldest = "visiond_oldest_pending_seconds"
    place.drop("a.ppm", picture(1))
    with Daemon(place, ready=False, environment=gate.environment) as daemon:
        daemon.wait_event("placement")
        known = wait_for(
            lambda: (
                daemon.metric(oldest) if place.has_ledger() and place.rows("SELECT 1 FROM image") else None
            ),
            "an image",
        )
        with contextlib.closing(sqlite3.connect(place.site.ledger, isolation_level=None)) as other:
            # The ledger's thread waits for this for five seconds, and then fails.
            other.execute("BEGIN IMMEDIATE")
            asked = time.monotonic()
            assert daemon.fetch("/metrics")[0] == 200
            assert time.monotonic() - asked < 4
            assert daemon.metric(oldest) > known
        gate.let_in()
        daemon.wait_idle(1)
