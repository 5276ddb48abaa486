"""What limits the rate, by the rule of daemon/monitoring/limits.py."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.monitoring.limits import (
    IN_DAEMON,
    IN_DECODERS,
    IN_UNPACKERS,
    IN_WORKERS,
    PARTS,
    Limit,
    Moment,
    find_limit,
)
from daemon.monitoring.metrics import Metrics


def work(
    seconds: int = 10, *, start: int = 0, cpu: tuple[float, ...] = (0.1, 0.2, 0.1), **more: Any
) -> list[Moment]:
    """On eight cores, ten images a second. cpu: cores of decoders, workers, the daemon and unpackers."""
    usual: dict[str, Any] = {"in_flight": 300, "occupied": 1.0, "decoders": 4, "cores": 8} | more
    kinds = (IN_DECODERS, IN_WORKERS, IN_DAEMON, IN_UNPACKERS)
    return [
        Moment(
            **{"at": float(at), "ended": 10 * at}
            | usual
            | {"cpu_seconds": {kind: at * cores for kind, cores in zip(kinds, cpu, strict=False)}}
        )
        for at in range(start, start + seconds)
    ]


IDLE: dict[str, Any] = {"occupied": 0.0, "waiting": {"input": 1.0}, "in_flight": 0, "ended": 40}
HALF: dict[str, Any] = {"gpu_busy": 0.5}


@pytest.mark.parametrize(
    ("moments", "part", "share"),
    [
        (work(**IDLE), "", 0.0),
        (work(occupied=None), "", 0.0),
        (work(2), "", 0.0),
        (work(**HALF, ended=0), "", 0.0),
        (work(**HALF, ended=0) + work(2, start=10, **HALF), "", 0.0),
        (work(**HALF, occupied=0.6, waiting={"read": 0.4}), "read", 0.4),
        (work(**HALF, cpu=(3.7, 0.2, 0.1)), "decode", 0.925),
        (work(gpu_busy=0.95), "gpu", 0.95),
        (work(gpu_busy=0.95, occupied=0.7, waiting={"input": 0.3}), "gpu", 0.95),
        (work(**HALF), "workers", 1.0),
        (work(), "workers", 1.0),
        (work(**HALF, occupied=0.92, waiting={"input": 0.08}), "workers", 0.92),
        (work(**HALF, occupied=0.3, waiting={"publish": 0.6, "read": 0.1}), "publish", 0.6),
        (work(**HALF, in_flight=0, occupied=0.1, waiting={"input": 0.9}), "input", 0.9),
        (work(**HALF, occupied=0.85, waiting={"input": 0.15}), "workers", 0.85),
        (work(**HALF, ended=7), "workers", 1.0),
        (work(5, **IDLE) + work(5, start=5, **HALF), "workers", 1.0),
        (work(cpu=(1, 6, 0.5)), "gpu", None),
        (work(**HALF, cpu=(1, 6, 0.5)), "workers", 1.0),
        (work(**HALF, decoders=20, cpu=(5, 2, 0.5)), "decode", 0.625),
        (work(**HALF, cpu=(1, 2, 4.5), occupied=0.5, waiting={"publish": 0.02}), "publish", 0.02),
        (work(**HALF, cpu=(1, 2, 1, 3.5), occupied=0.5, waiting={"publish": 0.02}), "read", 0.0),
    ],
    ids=[
        "an idle daemon",
        "no worker is ready",
        "too short to tell",
        "the first batch is under way",
        "the first batch has just ended",
        "slow reads",
        "slow decoders",
        "the GPU is full",
        "the GPU is full though threads are free",
        "the workers are full and the GPU half idle",
        "the workers are full without a GPU",
        "few threads wait",
        "slow publishing",
        "a trickle",
        "a queue that empties now and then",
        "an empty inbox, and the last images in long batches",
        "a backlog after an idle time",
        "the stages use the cores",
        "a GPU's workers use the cores",
        "decoders use the cores",
        "the daemon uses the cores",
        "unpacking uses the cores",
    ],
)
def test_what_limits_the_rate(moments: list[Moment], part: str, share: float | None) -> None:
    limit = find_limit(moments)
    assert limit.part == part
    assert limit.shares.get(part) == (pytest.approx(share) if part and share is not None else None)
    assert bool(limit.sentence()) == bool(part)


def test_a_full_slab_is_named_where_it_makes_batches_small() -> None:
    sentence = find_limit(work(**HALF, occupied=0.6, crowded=True)).sentence()
    assert sentence.startswith("limited by workers: their threads have a batch for 60% of the time")
    assert sentence.endswith("Set a larger [pipeline] slab_bytes")
    assert "slab_bytes" not in find_limit(work(gpu_busy=0.95, crowded=True)).sentence()


def test_the_message_says_what_to_type() -> None:
    sentence = find_limit(work(gpu_busy=0.55, cpu=(1, 2, 0.2))).sentence()
    assert "while the GPUs are 55% busy and the cores 40%" in sentence
    assert "workers_per_device or threads_per_worker" in sentence
    assert "tune" in sentence


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_advice_of_its_own(part: str) -> None:
    fixes = {each: Limit(part=each, shares={each: 1.0}).sentence().partition(". ")[2] for each in PARTS}
    assert fixes[part]
    assert list(fixes.values()).count(fixes[part]) == 1


def test_the_metric_is_1_for_the_part_that_limits_and_0_for_all_others() -> None:
    metrics = Metrics()
    for limiting in ("", "workers", "input", ""):
        metrics.limited(limiting)
        values = {part: metrics.value("visiond_limited_by", part=part) for part in PARTS}
        assert values == {part: float(part == limiting) for part in PARTS}
