"""The table of second looks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.core.jobs import Content, Ending, Job, JobStatus, Placed
from daemon.core.messages import Output
from daemon.ledger import looks
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.ledger.statements import SQL
from tests.makers import MODELS, admit, content_of, done, failed, make_file, make_outputs

pytestmark = pytest.mark.anyio

OTHER = Model("ocr", "ocr-2", "")


@pytest.fixture
async def number(ledger: Ledger, inbox: Path) -> int:
    """The second model of OCR, by its number in the ledger."""
    await ledger.register([(inbox, 0)], MODELS, [OTHER])
    found = await ledger.run(lambda c: c.execute(SQL["model_id"], ("ocr", "ocr-2")).fetchone())
    return int(found[0])


async def finish(ledger: Ledger, *paths: bytes, published: bool = True) -> list[Job]:
    """Images that are DONE and wait for a look."""
    ledger.look_names = ["again"]
    jobs = await admit(ledger, *paths)
    await ledger.end([replace(done(job), looks=("again",)) for job in jobs])
    if published:
        await ledger.mark_emitted([Placed(job.id) for job in jobs])
    return jobs


async def take(ledger: Ledger, limit: int = 10, busy: tuple[int, ...] = ()) -> list[int]:
    found = await ledger.run(lambda c: looks.take(c, "again", limit, busy, [1]))
    return [job.id for job in found.jobs]


async def end(ledger: Ledger, number: int, *endings: Ending) -> set[int]:
    models = {**ledger.models, number: OTHER}
    found: set[int] = await ledger.run(lambda c: looks.end(c, "again", endings, models, number, ()))
    return found


def answer(job: Job) -> Ending:
    content = content_of(job.path, {"ocr": make_outputs(2)["ocr"]})
    return Ending(job, JobStatus.DONE, 3e9, 1, content=content)


async def recall(
    ledger: Ledger, number: int, data: bytes = b"a.jpg", *, reuse: bool = True
) -> dict[int, Content]:
    """What is known about image 1, whose file has these bytes."""
    read, models = [(1, content_of(data).digest)], {**ledger.models, number: OTHER}
    known: dict[int, Content]
    known, _ = await ledger.run(lambda c: looks.recall(c, read, models, number, reuse=reuse))
    return known


async def test_images_wait_in_the_order_of_their_numbers(ledger: Ledger) -> None:
    await finish(ledger, b"a.jpg", b"b.jpg", b"c.jpg")
    assert await take(ledger, 2) == [1, 2]
    assert await take(ledger, 2, busy=(1, 2)) == [3]


async def test_an_image_that_is_not_published_yet_waits_a_moment(ledger: Ledger) -> None:
    await finish(ledger, b"a.jpg", published=False)
    assert await take(ledger) == []
    await ledger.mark_emitted([Placed(1)])
    await ledger.run(lambda c: c.execute("UPDATE look SET not_before = 0"))
    assert await take(ledger) == [1]


async def test_images_of_an_inbox_that_does_not_answer_are_left(ledger: Ledger) -> None:
    await finish(ledger, b"a.jpg")
    found = await ledger.run(lambda c: looks.take(c, "again", 10, (), []))
    assert (found.jobs, found.some_left) == ([], False)
    assert not await ledger.run(lambda c: looks.is_wanted(c, "again", []))
    assert await ledger.run(lambda c: looks.is_wanted(c, "again", [1]))


async def test_an_answer_is_stored_and_the_image_is_to_be_published_again(
    ledger: Ledger, number: int
) -> None:
    [job] = await finish(ledger, b"a.jpg")
    assert await end(ledger, number, answer(job)) == {1}
    [record] = await ledger.owed(0, 10)
    assert record.looks["again"].output == Output(make_outputs(2)["ocr"].payload, 0.25)
    assert (record.looks["again"].model, record.outputs.keys()) == (OTHER, make_outputs().keys())


async def test_a_look_that_has_ended_does_not_end_again(ledger: Ledger, number: int) -> None:
    """As when an executor that was taken for lost reports it after all."""
    [job] = await finish(ledger, b"a.jpg")
    assert await end(ledger, number, answer(job)) == {1}
    await ledger.mark_emitted([Placed(1)])
    assert await end(ledger, number, failed(job)) == set()
    assert await ledger.owed(0, 10) == []
    with closing(Reader(ledger.path)) as reader, reader.lend() as connection:
        assert looks.count(connection, "again") == looks.Tally(waiting=0, done=1, failed=0)


async def test_the_look_of_a_replaced_version_is_not_published(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await ledger.admit([make_file(b"a.jpg", mtime_ns=9)])
    assert await end(ledger, number, answer(job)) == set()
    assert await take(ledger) == []


async def test_a_look_that_failed_says_why(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    assert await end(ledger, number, failed(job)) == {1}
    [record] = await ledger.owed(0, 10)
    assert (record.looks["again"].output, record.looks["again"].detail) == (None, "its end is missing")
    assert record.status is JobStatus.DONE
    with closing(Reader(ledger.path)) as reader, reader.lend() as connection:
        assert looks.count(connection, "again") == looks.Tally(waiting=0, done=0, failed=1)


async def test_a_redo_asks_for_the_look_again(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await end(ledger, number, answer(job))
    await ledger.mark_emitted([Placed(1)])
    await ledger.put_back(JobStatus.DONE, [1])
    [again] = await ledger.next_jobs(1, ())
    await ledger.end([replace(done(again), looks=("again",))])
    await ledger.mark_emitted([Placed(1)])
    assert await take(ledger) == [1]


async def test_a_redo_that_fits_no_longer_has_no_look(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await end(ledger, number, answer(job))
    await ledger.mark_emitted([Placed(1)])
    await ledger.put_back(JobStatus.DONE, [1])
    [again] = await ledger.next_jobs(1, ())
    await ledger.end([done(again)])
    [record] = await ledger.owed(0, 10)
    assert record.looks == {}


async def test_known_results_are_given_to_a_job_except_that_of_its_stage(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    known = await recall(ledger, number)
    assert known[1].outputs.keys() == make_outputs().keys() - {"ocr"}
    await end(ledger, number, answer(job))
    known = await recall(ledger, number)
    assert known[1].outputs["ocr"].payload == make_outputs(2)["ocr"].payload


async def test_other_bytes_than_those_of_the_image_are_not_looked_at(ledger: Ledger, number: int) -> None:
    await finish(ledger, b"a.jpg")
    assert await recall(ledger, number, b"others") == {}


async def test_a_redo_keeps_the_answers_of_looks_that_are_no_longer_configured(
    ledger: Ledger, number: int
) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await end(ledger, number, answer(job))
    await ledger.mark_emitted([Placed(1)])
    ledger.look_names = []
    await ledger.put_back(JobStatus.DONE, [1])
    [again] = await ledger.next_jobs(1, ())
    await ledger.end([done(again)])
    [record] = await ledger.owed(0, 10)
    assert record.looks.keys() == {"again"}


async def test_a_look_that_ends_during_a_redo_is_not_published(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await ledger.put_back(JobStatus.DONE, [1])
    assert await end(ledger, number, answer(job)) == set()
    assert await take(ledger) == []
    await ledger.run(lambda c: c.execute("UPDATE look SET not_before = 0"))
    [again] = await ledger.next_jobs(1, ())
    await ledger.end([replace(done(again), looks=("again",))])
    await ledger.mark_emitted([Placed(1)])
    assert await take(ledger) == [1]


async def test_only_some_images_may_be_asked_for(ledger: Ledger) -> None:
    await finish(ledger, b"a.jpg", b"b.jpg")
    found = await ledger.run(lambda c: looks.take(c, "again", 10, (), [1], [2]))
    assert [job.id for job in found.jobs] == [2]
    assert not await ledger.run(lambda c: looks.is_wanted(c, "again", [1], []))
    assert await ledger.run(lambda c: looks.is_wanted(c, "again", [1], [1]))


async def test_looks_of_an_inbox_that_does_not_answer_cost_no_write(ledger: Ledger) -> None:
    await finish(ledger, b"a.jpg", b"b.jpg")
    before = await ledger.run(lambda c: c.total_changes)
    await ledger.run(lambda c: looks.take(c, "again", 10, (), []))
    assert await ledger.run(lambda c: c.total_changes) == before


async def test_a_start_drops_looks_without_a_table_and_sets_those_of_other_inboxes_aside(
    ledger: Ledger,
) -> None:
    await finish(ledger, b"a.jpg")
    assert await ledger.run(lambda c: looks.begin(c, ["again"], [2])) == 0
    assert await take(ledger) == []
    assert await ledger.run(lambda c: looks.begin(c, ["again"], [1])) == 0
    assert await take(ledger) == [1]
    assert await ledger.run(lambda c: looks.begin(c, ["others"], [1])) == 1
    assert await take(ledger) == []


async def test_a_known_result_is_not_used_without_reuse(ledger: Ledger, number: int) -> None:
    [job] = await finish(ledger, b"a.jpg")
    await end(ledger, number, answer(job))
    assert "ocr" not in (await recall(ledger, number, reuse=False))[1].outputs
