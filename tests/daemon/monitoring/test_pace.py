"""The rate, and the time to go."""

from __future__ import annotations

import pytest

from daemon.jobs import Admitted
from daemon.monitoring import counts as module
from daemon.monitoring.counts import Counts
from daemon.monitoring.pace import RATE_SECONDS, Pace
from tests.makers import done, make_job


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """The clock of its own shows 1000 s."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)
    return Counts()


def finish(counts: Counts, images: int) -> None:
    for _ in range(images):
        counts.finished(done(make_job()))


def test_the_time_to_go_does_not_count_the_time_before_the_images_came(counts: Counts) -> None:
    pace = Pace(counts)
    assert pace.rate(975.0) == 0.0  # a look while there was nothing to do
    counts.admitted(Admitted(100, 0, 0))
    finish(counts, 20)
    assert pace.rate(1002.0) == pytest.approx(20 / 27)
    assert pace.seconds_for(80, 1002.0) == pytest.approx(8.0)


def test_images_that_come_while_others_wait_do_not_begin_anew(counts: Counts) -> None:
    counts.began_at = 990.0
    pace = Pace(counts)
    pace.rate(990.0)
    counts.states[module.JobStatus.PENDING] = 1
    counts.admitted(Admitted(100, 0, 0))
    finish(counts, 10)
    pace.rate(1000.0)
    assert pace.seconds_for(91, 1000.0) == pytest.approx(91.0)


def test_where_images_come_one_by_one_the_rate_of_the_last_time_counts(counts: Counts) -> None:
    pace = Pace(counts)
    pace.rate(990.0)
    counts.admitted(Admitted(1, 0, 0))
    finish(counts, 1)
    counts.admitted(Admitted(1, 0, 0))
    assert pace.rate(1000.0) == pytest.approx(0.1)
    assert pace.seconds_for(1, 1000.0) == pytest.approx(10.0)


def test_what_was_finished_long_ago_is_not_in_the_rate(counts: Counts) -> None:
    pace = Pace(counts)
    finish(counts, 5)
    pace.rate(1000.0)
    assert pace.rate(1001.0 + RATE_SECONDS) == 0.0
    assert pace.seconds_for(1, 1001.0 + RATE_SECONDS) is None
