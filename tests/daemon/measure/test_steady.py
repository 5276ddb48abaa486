"""How a rate is read from the times at which images were finished, and what limits it from what was measured meanwhile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.measure import steady as module
from daemon.measure.meter import DAEMON, DECODERS, WORKERS, LoadSample, Meter, StatusSample
from daemon.measure.steady import Steady, find_steady, measure_rate


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


def watched(
    gpu: float | None = None,
    cpu: tuple[float, float, float] = (0.0, 0.0, 0.0),
    stage_seconds: float = 0.0,
    **look: Any,
) -> Meter:
    """A run of 100 s. cpu: cores of decoders, workers and daemon; stage_seconds: in each second."""
    usual = {"unread": 500, "in_flight": 300, "queued": 200, "slab_share": 0.5, "workers": 2}
    usual |= {"devices": ["cpu" if gpu is None else "cuda:1"]} | look
    times = range(0, 101)
    return cast(
        "Meter",
        SimpleNamespace(
            devices=["cuda:0", "cuda:1"],
            threads_per_worker=2,
            looks=[StatusSample(at=at, stage_seconds=at * stage_seconds, **usual) for at in times],
            samples=[
                LoadSample(
                    at,
                    [0.99, gpu],  # the first GPU is another program's
                    [],
                    0,
                    0,
                    {kind: at * cores for kind, cores in zip((DECODERS, WORKERS, DAEMON), cpu, strict=True)},
                    decoders=4,
                )
                for at in times
            ],
        ),
    )


def judge(meter: Meter, monkeypatch: pytest.MonkeyPatch, lag_seconds: float = 0.1) -> Steady:
    """Ten images in each second, on eight cores."""
    monkeypatch.setattr(module, "count_cores", lambda: 8)
    return find_steady([number / 10 for number in range(1000)], lag_seconds, meter)


@pytest.mark.parametrize(
    ("meter", "lag_seconds", "part", "share"),
    [
        (watched(gpu=0.95, cpu=(2, 1, 1)), 0.1, "gpu", 0.95),
        (watched(cpu=(1, 1, 1), stage_seconds=3.8), 0.1, "gpu", 0.95),
        (watched(gpu=0.4, cpu=(3.6, 1, 1)), 0.1, "decode", 0.9),
        (watched(gpu=0.4, queued=0), 0.1, "read", 1.0),
        (watched(gpu=0.4, queued=0, unread=0), 0.1, "input", 1.0),
        (watched(gpu=0.4), 8.0, "publish", 0.8),
        (watched(gpu=0.4, queued=0, slab_share=0.95, cpu=(2, 1, 1)), 0.1, "decode", 0.5),
        (watched(gpu=0.6, cpu=(2, 4, 1.5)), 0.1, "gpu", 0.6),
        (watched(gpu=0.6, cpu=(2, 1, 4.5)), 0.1, "read", 0.0),
    ],
    ids=["gpu", "cpu", "decoders", "reading", "input", "publishing", "slab", "workers' cores", "own cores"],
)
def test_the_part_that_is_occupied_most_limits(
    meter: Meter, lag_seconds: float, part: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = judge(meter, monkeypatch, lag_seconds)
    assert steady.limited_by == part
    assert steady.shares[part] == pytest.approx(share)


def test_a_full_slab_is_named_when_nothing_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slab_bytes" in judge(watched(gpu=0.6, slab_share=0.95), monkeypatch).why
    assert "slab_bytes" not in judge(watched(gpu=0.95, slab_share=0.95), monkeypatch).why


def test_cores_and_gpus_in_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = judge(watched(gpu=0.4, cpu=(3, 2, 1)), monkeypatch)
    assert (steady.gpu_busy, steady.cores_busy) == (pytest.approx(0.4), pytest.approx(6 / 8))
    assert steady.cpu_milliseconds == pytest.approx(600)
    assert judge(watched(cpu=(3, 2, 1)), monkeypatch).gpu_busy is None


@pytest.mark.parametrize("few", ["samples", "looks"])
def test_of_a_short_run_nothing_but_its_rate_is_said(few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = watched(gpu=0.5)
    monkeypatch.setattr(meter, few, getattr(meter, few)[:16])
    steady = judge(meter, monkeypatch)
    assert steady.images_per_second == pytest.approx(10, rel=0.01)
    assert (steady.cores_busy, steady.limited_by) == (None, "")
