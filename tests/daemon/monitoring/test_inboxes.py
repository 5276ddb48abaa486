from __future__ import annotations

import threading

import anyio
import pytest
from prometheus_client import CollectorRegistry

from daemon.core.errors import VisiondError
from daemon.core.jobs import Ending, JobStatus, Waiting
from daemon.monitoring import inboxes
from daemon.monitoring.inboxes import Count, InboxMetrics
from tests.daemon_process import PATIENCE, until
from tests.makers import done, failed, make_job, postponed

pytestmark = pytest.mark.anyio


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"inbox": "scans", **labels})


def test_an_image_counts_for_its_inbox_once_and_a_redo_does_not_count_as_a_wait() -> None:
    registry = CollectorRegistry()
    metrics = InboxMetrics(registry)
    metrics.begin({1: "scans", 2: "mail"})
    again = make_job(has_result=True)
    metrics.finished(
        [
            done(make_job()),
            done(again),
            failed(make_job()),
            postponed(make_job(), 1.0),
            Ending(again, JobStatus.GONE, 2e9, 0),  # it keeps its result
            done(make_job(inbox=2)),
        ]
    )
    assert value(registry, "visiond_inbox_images_total", outcome="done") == 2
    assert value(registry, "visiond_inbox_images_total", outcome="failed") == 1
    assert value(registry, "visiond_inbox_images_total", outcome="gone") == 0
    assert value(registry, "visiond_inbox_first_results_total") == 1


async def test_a_slow_count_delays_no_scrape_and_is_repeated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "COUNT_SECONDS", 0.2)
    seconds, counts = 0.0, 0
    go_on, counted = threading.Event(), threading.Event()

    def read() -> dict[int, Waiting]:
        nonlocal seconds, counts
        counts += 1
        go_on.wait(10)
        seconds += 2.0
        counted.set()
        return {1: Waiting(counts, 0.0)}

    count = Count(read, lambda: seconds)
    while not counts:
        assert await count.count() == {}
    assert await count.count() == {}
    go_on.set()
    await until(counted.is_set)
    with anyio.fail_after(PATIENCE):
        while not await count.count():
            await anyio.lowlevel.checkpoint()
    seconds += 99.0
    assert await count.count() == {1: Waiting(1, 0.0)}
    seconds += 1.0
    await count.count()
    await until(lambda: counts == 2)


async def test_a_count_for_which_no_thread_was_free_in_time_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = Count(lambda: {1: Waiting(3, 0.0)})
    monkeypatch.setattr(inboxes, "COUNT_SECONDS", 0.0)
    assert await count.count() == {}
    monkeypatch.setattr(inboxes, "COUNT_SECONDS", PATIENCE)
    assert await count.count() == {1: Waiting(3, 0.0)}


async def test_a_count_that_fails_leaves_the_last_one() -> None:
    answers = iter([{1: Waiting(3, 0.0)}])

    def read() -> dict[int, Waiting]:
        for answer in answers:
            return answer
        raise VisiondError("the ledger is damaged")

    clock = iter(range(0, 10**6, 1000))
    count = Count(read, lambda: float(next(clock)))
    assert await count.count() == await count.count() == {1: Waiting(3, 0.0)}
