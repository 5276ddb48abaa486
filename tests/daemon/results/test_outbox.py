"""Sinks follow the ledger by themselves: each gets every record at least once,
and none delays another or the work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import get_args

import anyio
import pytest
from structlog.testing import capture_logs

from daemon.config.output import OutputSection
from daemon.core.errors import LedgerUnusable
from daemon.core.jobs import JobStatus, Placed
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.maintenance.pruning import prune
from daemon.results import outbox
from daemon.results.outbox import Outbox, Recent
from daemon.results.sinks import SINKS, Sink
from tests.daemon_process import Daemon, Place, free_port, until
from tests.makers import MODELS, done, make_file

pytestmark = pytest.mark.anyio


class Collecting:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.groups: list[list[Record]] = []
        self.broken: Exception | None = None

    @property
    def records(self) -> list[Record]:
        return [record for group in self.groups for record in group]

    @property
    def ids(self) -> list[int]:
        return [record.id for record in self.records]

    async def append(self, records: Sequence[Record]) -> None:
        if self.broken:
            raise self.broken
        self.groups.append(list(records))

    def problem(self) -> str:
        return ""


class Silent(Collecting):
    """A sink that never answers."""

    async def append(self, records: Sequence[Record]) -> None:
        await anyio.sleep_forever()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    await opened.register([(tmp_path / "inbox", 0)], MODELS)
    yield opened
    opened.close()


@pytest.fixture
async def reader(ledger: Ledger) -> AsyncIterator[Reader]:
    opened = Reader(ledger.path)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSE_SECONDS", 0.01)


async def open_outbox(ledger: Ledger, reader: Reader, **sinks: Sink) -> Outbox:
    return await Outbox.open(ledger, reader, sinks, lambda images: None)


async def publish(ledger: Ledger, *paths: bytes, into: Outbox | None = None, size: int = 3) -> list[int]:
    """New images, processed and published. into: an outbox to notify, as the publisher does."""
    await ledger.admit([make_file(path, size=size) for path in paths])
    return await annotate(ledger, into=into)


async def annotate(ledger: Ledger, into: Outbox | None = None) -> list[int]:
    """All images that are PENDING."""
    endings = [done(job) for job in await ledger.next_jobs(1000, ())]
    await ledger.end(endings)
    ids = [ending.job.id for ending in endings]
    added = await ledger.mark_emitted([Placed(image) for image in ids])
    if into:
        records = {ending.job.id: ledger.record_of(ending) for ending in endings}
        into.add({number: records[image] for number, image in added.items()})
    return ids


async def deliver(opened: Outbox) -> None:
    """Deliver everything, as at the end of `run --once`."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.run)
        await opened.finish()
        tasks.cancel_scope.cancel()


async def test_a_dead_sink_is_reported_and_a_healthy_one_gets_everything(
    ledger: Ledger, reader: Reader
) -> None:
    dead, healthy = Collecting(), Collecting()
    dead.broken = OSError(28, "No space left on device")
    opened = await open_outbox(ledger, reader, dead=dead, healthy=healthy)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened.run)
            for path in (b"a.jpg", b"b.jpg", b"c.jpg"):
                await publish(ledger, path, into=opened)
            await until(lambda: healthy.ids == [1, 2, 3] and bool(opened.problems()))
            assert opened.problems() == ["sink dead: 3 records behind: [Errno 28] No space left on device"]
            dead.broken = None
            await until(lambda: dead.ids == [1, 2, 3])
            await until(lambda: opened.problems() == [])
            tasks.cancel_scope.cancel()
    assert [log["event"] for log in logs] == [
        "sink does not accept records; they are kept and tried again",
        "sink accepts records again",
    ]


async def test_a_sink_with_a_bug_stops_nothing_else(ledger: Ledger, reader: Reader) -> None:
    wrong, healthy = Collecting(), Collecting()
    wrong.broken = ZeroDivisionError("division by zero")
    opened = await open_outbox(ledger, reader, wrong=wrong, healthy=healthy)
    await publish(ledger, b"a.jpg", into=opened)
    await deliver(opened)
    assert healthy.ids == [1]
    assert opened.problems() == ["sink wrong: 1 record behind: division by zero"]


async def test_a_sink_goes_on_at_its_place_after_a_restart(ledger: Ledger, reader: Reader) -> None:
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg", b"b.jpg", into=opened)
    await deliver(opened)
    await publish(ledger, b"c.jpg")  # and the daemon is killed before its delivery
    await deliver(await open_outbox(ledger, reader, sink=sink))
    assert sink.ids == [1, 2, 3]
    assert sink.records[2].bin == sink.records[0].bin
    assert sink.records[2].sidecar.count(b'"caption"') == 1, "from the ledger comes the complete record"


async def test_more_records_than_fit_in_memory_come_once_and_in_order(
    ledger: Ledger, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "GROUP", 3)
    monkeypatch.setattr(outbox, "RECENT", 4)
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    for number in range(20):
        await publish(ledger, b"%d.jpg" % number, into=opened)
    await deliver(opened)
    assert sink.ids == list(range(1, 21))
    assert max(map(len, sink.groups)) == 3


async def test_large_records_leave_the_memory_sooner_and_come_from_the_ledger(
    ledger: Ledger, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    recent = Recent()
    ids = await publish(ledger, *(b"%d.jpg" % number for number in range(6)))
    records = reader.published_after(0, 6)[0]
    size = records[1].result_bytes
    assert size > 4 * 10  # the results of four stages
    monkeypatch.setattr(outbox, "RECENT_BYTES", 3 * size)
    for sequence in ids:
        recent.add({sequence: records[sequence]})
    assert [recent.after(place) for place in (1, 2)] == [[], []]
    assert [sequence for sequence, _ in recent.after(3)] == [4, 5, 6]
    recent.add({9: records[1]})  # after a gap
    recent.add({10: records[2], 11: records[3]})
    assert [sequence for sequence, _ in recent.after(8)] == [9, 10, 11]

    monkeypatch.setattr(outbox, "RECENT_BYTES", size - 1)  # no record fits
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"7.jpg", b"8.jpg", into=opened)
    await deliver(opened)
    assert sink.ids == [7, 8]


async def test_records_that_become_known_out_of_order_are_all_delivered(
    ledger: Ledger, reader: Reader
) -> None:
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg", b"b.jpg", b"c.jpg")
    first, _, third = reader.published_after(0, 3)[0].values()
    opened.add({1: first})
    opened.add({3: third})
    await deliver(opened)
    assert sink.ids == [1, 2, 3]


async def test_a_sink_that_is_new_gets_records_from_now_on(ledger: Ledger, reader: Reader) -> None:
    old, new = Collecting(), Collecting()
    opened = await open_outbox(ledger, reader, old=old)
    await publish(ledger, b"a.jpg", into=opened)
    opened = await open_outbox(ledger, reader, old=old, new=new)
    await publish(ledger, b"b.jpg", into=opened)
    await deliver(opened)
    assert (old.ids, new.ids) == ([1, 2], [2])


async def test_a_sink_that_is_new_says_what_it_lacks_until_it_has_a_record(
    ledger: Ledger, reader: Reader
) -> None:
    def told(by: Outbox) -> list[tuple[str, int]]:
        return [(state.name, state.earlier) for state in (each.state() for each in by.deliveries)]

    with capture_logs() as logs:
        opened = await open_outbox(ledger, reader, old=Collecting())
    assert not logs  # nothing is DONE
    await publish(ledger, b"a.jpg", into=opened)
    with capture_logs() as logs:
        opened = await open_outbox(ledger, reader, old=Collecting(), new=Collecting())
    assert [(log["sinks"], log["done"], log["fix"]) for log in logs] == [(["new"], 1, "visiond redo --all")]
    assert told(opened) == [("old", 0), ("new", 1)]
    await publish(ledger, b"b.jpg", into=opened)
    await deliver(opened)
    assert told(opened) == [("old", 0), ("new", 0)]
    with capture_logs() as logs:
        await open_outbox(ledger, reader, old=Collecting(), new=Collecting())
    assert not logs


async def test_a_sink_that_is_no_longer_configured_holds_no_records_back(
    ledger: Ledger, reader: Reader
) -> None:
    sink = Collecting()
    await publish(ledger, b"a.jpg", into=await open_outbox(ledger, reader, sink=sink))
    with capture_logs() as logs:
        await open_outbox(ledger, reader)
    assert [(log["log_level"], log["sink"], log["records"]) for log in logs] == [("warning", "sink", 1)]
    opened = await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"b.jpg", into=opened)
    await deliver(opened)
    assert sink.ids == [2]


async def test_each_sink_has_a_place_of_its_own(ledger: Ledger, reader: Reader) -> None:
    first, second = Collecting(), Collecting()
    second.broken = OSError("away")
    opened = await open_outbox(ledger, reader, first=first, second=second)
    await publish(ledger, b"a.jpg", into=opened)
    await deliver(opened)
    assert {name: behind for name, (behind, _) in reader.sinks().items()} == {"first": 0, "second": 1}
    second.broken = None
    await deliver(await open_outbox(ledger, reader, first=first, second=second))
    assert {name: behind for name, (behind, _) in reader.sinks().items()} == {"first": 0, "second": 0}
    assert (first.ids, second.ids) == ([1], [1])


async def test_an_image_that_is_processed_again_has_two_records(ledger: Ledger, reader: Reader) -> None:
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    [image] = await publish(ledger, b"a.jpg", into=opened)
    await deliver(opened)
    await ledger.put_back(JobStatus.DONE, [image])
    opened = await open_outbox(ledger, reader, sink=sink)
    await annotate(ledger, into=opened)
    await deliver(opened)
    assert sink.ids == [image, image]


async def test_a_record_is_delivered_although_its_image_waits_for_another_result(
    ledger: Ledger, reader: Reader
) -> None:
    sink = Collecting()
    await open_outbox(ledger, reader, sink=sink)
    [image] = await publish(ledger, b"a.jpg")
    record = reader.find_number(image)
    await ledger.put_back(JobStatus.DONE, [image])
    await deliver(await open_outbox(ledger, reader, sink=sink))
    assert [found.sidecar for found in sink.records] == [record.sidecar if record else b""]


async def test_pruning_leaves_what_a_sink_does_not_have(ledger: Ledger, reader: Reader) -> None:
    sink = Collecting()
    await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg")
    await publish(ledger, b"a.jpg", size=4)
    await prune(ledger, 1e12)
    await deliver(await open_outbox(ledger, reader, sink=sink))
    assert sink.ids == [1, 2]
    await prune(ledger, 1e12)
    assert reader.find_number(1) is None


async def test_an_image_whose_record_is_damaged_is_processed_again_and_then_delivered(
    ledger: Ledger, reader: Reader
) -> None:
    sink = Collecting()
    await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg", b"b.jpg")
    await ledger.run(lambda connection: connection.execute("UPDATE image SET bin = 'Z' WHERE id = 1"))
    opened = await open_outbox(ledger, reader, sink=sink)
    with capture_logs() as logs:
        await deliver(opened)
    assert sink.ids == [2]
    assert (
        logs[0]["event"]
        == "result damaged in the ledger; it is not published, and the image is processed again"
    )
    opened = await open_outbox(ledger, reader, sink=sink)
    assert await annotate(ledger, into=opened) == [1]
    await deliver(opened)
    assert sink.ids == [2, 1]


async def test_a_place_that_cannot_be_written_repeats_no_record(
    ledger: Ledger, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Collecting()
    opened = await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg", into=opened)
    run, refusals = ledger.run, iter([LedgerUnusable("the disk is full")])

    async def refuse_once(work: object) -> object:
        if error := next(refusals, None):
            raise error
        return await run(work)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "run", refuse_once)
    await deliver(opened)
    assert sink.ids == [1]
    assert opened.problems() == []


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("models = '[1,2'", JobStatus.PENDING),
        ("models = NULL", JobStatus.PENDING),
        ("models = '[77]'", JobStatus.PENDING),
        ("models = CAST(x'ff' AS TEXT)", JobStatus.PENDING),
        ("bin = CAST(x'ff' AS TEXT)", JobStatus.PENDING),
        ("seen_at = 'then', checksum = NULL", JobStatus.PENDING),
        ("finished_at = 1e300, checksum = NULL", JobStatus.PENDING),
        ("seen_at = 1e300", JobStatus.PENDING),
        ("digest = 'text', checksum = NULL", JobStatus.PENDING),
        ("path = 'text'", JobStatus.GONE),
    ],
)
async def test_a_row_that_cannot_be_read_is_left_out_and_does_not_stop_the_sink(
    ledger: Ledger, reader: Reader, fault: str, status: JobStatus
) -> None:
    sink = Collecting()
    await open_outbox(ledger, reader, sink=sink)
    await publish(ledger, b"a.jpg", b"b.jpg", b"c.jpg")
    await ledger.run(lambda connection: connection.execute(f"UPDATE image SET {fault} WHERE id = 2"))
    opened = await open_outbox(ledger, reader, sink=sink)
    with capture_logs() as logs:
        await deliver(opened)
    assert opened.problems() == []
    assert sink.ids == [1, 3]
    damaged = "result damaged in the ledger; it is not published, and the image is processed again"
    assert [log["event"] for log in logs].count(damaged) == 1
    assert await ledger.run(
        lambda connection: [row[0] for row in connection.execute("SELECT status FROM image WHERE id = 2")]
    ) == [status]
    if status is JobStatus.PENDING:
        opened = await open_outbox(ledger, reader, sink=sink)
        await annotate(ledger, into=opened)
        await deliver(opened)
        assert sink.ids == [1, 3, 2]
        assert reader.find_number(2)


@pytest.mark.parametrize("drains", [True, False])
async def test_the_end_does_not_wait_for_a_sink_that_does_not_answer(
    ledger: Ledger, reader: Reader, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    monkeypatch.setattr(outbox, "DRAIN_SECONDS" if drains else "SILENT_SECONDS", 0.05)
    healthy = Collecting()
    opened = await open_outbox(ledger, reader, silent=Silent(), healthy=healthy)
    [_, answering] = opened.deliveries
    await publish(ledger, b"a.jpg", into=opened)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.run)
        # Its disk may be slow. The silent one never comes so far.
        await until(lambda: answering.place.number == 1)
        if drains:
            opened.drain()
        with anyio.fail_after(20):
            await opened.finish()
        tasks.cancel_scope.cancel()
    assert healthy.ids == [1]
    assert opened.problems() == ["sink silent: 1 record behind: there was no time for the rest"]


async def test_a_sink_that_does_not_answer_is_reported(
    ledger: Ledger, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SILENT_SECONDS", 0.0)
    opened = await open_outbox(ledger, reader, silent=Silent())
    await publish(ledger, b"a.jpg", into=opened)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.run)
        await until(
            lambda: opened.problems() == ["sink silent: 1 record behind: it has not answered for 0 s"]
        )
        tasks.cancel_scope.cancel()


def test_every_sink_that_can_be_configured_exists() -> None:
    [choices] = get_args(OutputSection.model_fields["sinks"].annotation)
    assert set(get_args(choices)) == SINKS.keys()


KILLED_AFTER_APPEND = """
import os, signal, sys
from pathlib import Path
import anyio
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from daemon.results.outbox import Outbox
from daemon.results.sinks import JsonlSink

class Killed(JsonlSink):
    async def append(self, records):
        await super().append(records)
        os.kill(os.getpid(), signal.SIGKILL)

async def main(folder):
    ledger = Ledger(folder / "ledger.sqlite")
    opened = await Outbox.open(ledger, Reader(ledger.path), {"sink": Killed(folder / "out.jsonl")}, print)
    await opened.run()

anyio.run(main, Path(sys.argv[1]))
"""


async def test_a_kill_between_a_record_and_the_sinks_place_repeats_the_record(tmp_path: Path) -> None:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        await ledger.register([(tmp_path / "inbox", 0)], MODELS)
        with contextlib.closing(Reader(ledger.path)) as reader:
            await open_outbox(ledger, reader, sink=Collecting())
        await publish(ledger, b"a.jpg", b"b.jpg")
    killed = await anyio.run_process([sys.executable, "-P", "-c", KILLED_AFTER_APPEND, tmp_path], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2
    sink = Collecting()
    with (
        contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger,
        contextlib.closing(Reader(ledger.path)) as reader,
    ):
        await ledger.register([(tmp_path / "inbox", 0)], MODELS)
        await deliver(await open_outbox(ledger, reader, sink=sink))
    assert sink.ids == [1, 2]


def test_a_daemon_publishes_everything_while_a_sink_is_broken_and_delivers_the_rest_later(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}, "http": {"listen": f"127.0.0.1:{free_port()}"}})
    file = tmp_path / "results.jsonl"
    file.mkdir()
    place.drop_many(range(5))
    with Daemon(place) as daemon:
        status = daemon.wait_until(
            lambda status: status["done"] == 5 and status["sinks"][0]["problem"], "the sink's problem"
        )
        assert status["obstacles"] == [f"sink jsonl: 5 records behind: [Errno 21] Is a directory: '{file}'"]
        assert status["sinks"][0] | {"problem": ""} == {
            "name": "jsonl",
            "behind": 5,
            "succeeded_at": None,
            "problem": "",
            "configured": True,
            "earlier": 0,
        }
        ready, answer = daemon.get("/readyz")
        assert (ready, answer["warnings"]) == (200, status["obstacles"])
        assert daemon.metric("visiond_sink_records_behind", sink="jsonl") == 5
        assert daemon.metric("visiond_sink_last_success_timestamp_seconds", sink="jsonl") == 0
        assert place.assert_kept(DONE=5)
        assert daemon.stop() == 0
        assert "stopped before a sink had all records" in daemon.log_text()
    assert "jsonl  5               never" in place.command("status").stdout
    done = place.run_once()
    assert done.returncode == os.EX_IOERR
    assert "sink jsonl: 5 records behind" in done.stderr
    assert "run --once` delivers the rest" in done.stderr
    caught_up = "sink has received what earlier runs could not deliver"
    assert caught_up not in done.stderr
    file.rmdir()
    done = place.run_once()
    assert done.returncode == 0
    [line] = [line for line in map(json.loads, done.stderr.splitlines()) if line["event"] == caught_up]
    assert (line["sink"], line["records"]) == ("jsonl", 5)
    assert len(file.read_bytes().splitlines()) == 5
    place.drop_many(range(5, 6))
    done = place.run_once()
    assert done.returncode == 0
    assert caught_up not in done.stderr
    assert len(file.read_bytes().splitlines()) == 6


def test_a_sink_on_an_older_ledger_gets_no_record_that_was_published_before(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as connection:
        connection.executescript(
            "DROP INDEX made; DROP INDEX failures; DROP INDEX files; DROP TABLE renamed; "
            "ALTER TABLE model DROP COLUMN is_current; ALTER TABLE model DROP COLUMN provenance; "
            "DROP TABLE look; DROP TABLE sink; "
            "DROP TABLE publication; DROP TABLE start; DROP TABLE lost; "
            "ALTER TABLE inbox DROP COLUMN marker; PRAGMA user_version = 3; "
            "CREATE TABLE answer AS SELECT digest, model, payload, seconds, result.checksum AS checksum "
            "FROM content JOIN result ON content = content.id; DROP TABLE result; ALTER TABLE answer RENAME TO result; "
            "CREATE TABLE known AS SELECT digest, format, width, height, pages, checksum FROM content; DROP TABLE content; "
            "ALTER TABLE known RENAME TO content;"
        )
    assert "3 done" in place.command("status").stdout
    place.configure({"output": {"sinks": ["jsonl"]}})
    place.drop("new.ppm", b"P6\n1 1\n255\nabc")
    assert place.run_once().returncode == 0
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 1
