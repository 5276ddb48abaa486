"""How a rate is read from the times at which images were finished, and what limits it from what was measured meanwhile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.measure.meter import Meter
from daemon.measure.steady import Steady, find_steady, measure_rate
from daemon.monitoring.limits import Moment


def stairs(workers: int, batch: int, batches: int, seconds: float) -> list[float]:
    """When images are finished if each worker ends a batch every so many seconds, one after another."""
    ends = [(number + 1) * seconds / workers for number in range(batches)]
    return [end + 0.001 * place / batch for end in ends for place in range(batch)]


@pytest.mark.parametrize(
    ("workers", "batch", "batches"), list(itertools.product((1, 2, 5), (1, 8, 128), (16, 33)))
)
def test_a_rate_does_not_depend_on_where_batches_begin_and_end(
    workers: int, batch: int, batches: int
) -> None:
    rate, slowest, fastest = measure_rate(stairs(workers, batch, batches, seconds=2.0))
    assert rate == pytest.approx(batch * workers / 2.0, rel=0.01)
    assert 0.99 * rate <= slowest <= rate <= fastest <= 1.01 * rate


def test_the_beginning_and_the_end_do_not_count() -> None:
    steady = [10 + number / 100 for number in range(1000)]
    assert measure_rate([0.0, 5.0, *steady, 40.0, 60.0])[0] == pytest.approx(100, rel=0.01)


def test_a_rate_that_changes_has_a_spread() -> None:
    times = [number / 100 for number in range(500)] + [5 + number / 200 for number in range(500)]
    _, slowest, fastest = measure_rate(times)
    assert (slowest, fastest) == pytest.approx((100, 200), rel=0.01)


def test_few_batches_are_measured_as_a_whole() -> None:
    assert measure_rate([0.0, 0.0, 2.0, 2.0])[0] == pytest.approx(1.5)
    assert measure_rate([4.0, 4.0])[0] == pytest.approx(0.5)


def watched(seconds: int = 101, **more: Any) -> Meter:
    """A run that began at 5,000 s, at which 8 cores were looked at once a second; the first 15 s were idle."""
    busy = {"in_flight": 300, "occupied": 1.0, "cores": 8} | more
    idle = {"in_flight": 300, "occupied": 0.0, "waiting": {"input": 1.0}, "cores": 8}
    moments = [
        Moment(
            **{
                "at": 5000.0 + at,
                "ended": 10 * at,
                "cpu_seconds": {"workers": 4.8 * at, "unpackers": 1.2 * at},
            }
            | (busy if at >= 15 else idle)
        )
        for at in range(seconds)
    ]
    return cast("Meter", SimpleNamespace(started=5000.0, moments=moments))


def judge(meter: Meter) -> Steady:
    """Ten images in each second."""
    return find_steady([number / 10 for number in range(1000)], meter)


def test_what_the_daemon_measured_in_the_middle_of_a_run_counts() -> None:
    steady = judge(watched(gpu_busy=0.4))
    assert (steady.limited_by, steady.shares["workers"]) == ("workers", 1.0)
    assert (steady.gpu_busy, steady.cores_busy) == pytest.approx((0.4, 6 / 8))
    assert steady.cpu_milliseconds == pytest.approx(600)
    assert steady.cpu_milliseconds_by_kind == pytest.approx(
        {"daemon": 0, "workers": 480, "decoders": 0, "unpackers": 120}
    )
    assert judge(watched()).gpu_busy is None


def test_of_a_short_run_nothing_but_its_rate_is_said() -> None:
    steady = judge(watched(seconds=17, gpu_busy=0.4))
    assert steady.images_per_second == pytest.approx(10, rel=0.01)
    assert (steady.cores_busy, steady.cpu_milliseconds, steady.limited_by) == (None, None, "")
