"""How a rate is read from the times at which images were finished."""

from __future__ import annotations

import itertools

import pytest

from daemon.bench.rates import measure_rate


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
    assert (slowest, fastest) == (pytest.approx(100, rel=0.01), pytest.approx(200, rel=0.01))


def test_few_batches_are_measured_as_a_whole() -> None:
    assert measure_rate([0.0, 0.0, 2.0, 2.0])[0] == pytest.approx(1.5)
