"""What an executor takes over from a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.core.messages import Beat, Outcome, Output, Reply
from daemon.core.slab import Slab
from daemon.monitoring.metrics import Metrics
from daemon.pipeline.executor import Executor
from daemon.results.judge import Judge
from stages.contract.binning import Thresholds
from stages.registry import registry
from tests.makers import make_attempt, make_job


@pytest.mark.anyio
async def test_results_are_in_the_order_of_the_stages_also_if_the_ledger_had_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plug_ins = ("zebra", "ape", "bee")  # as they run: an ape needs the zebra's answer, the bee needs both
    monkeypatch.setattr(registry, "ORDER", (*registry.ORDER, *plug_ins))
    had, said = ({name: Output(b"{}", 0.5) for name in names} for names in (("ocr", "ape"), ("zebra", "bee")))
    executor = Executor(Slab(64), [], Judge(Thresholds()), {}, Metrics())
    attempt, reply = make_attempt(make_job(), had), Reply(1, [Outcome("PPM", 8, 8, said)], [])
    await executor.advance(cast(Any, SimpleNamespace(name="w")), "cpu", [attempt], reply)
    assert list(attempt.content.outputs) == ["ocr", *plug_ins]


def test_what_a_worker_has_prepared_for_its_gpu_is_in_the_metrics() -> None:
    metrics, prepared = Metrics(), {"plan": 3, "compilation": 1}
    worker = SimpleNamespace(loaded=True, beat=Beat(1, prepared=prepared), looked_at=0.0)
    slot = SimpleNamespace(worker=worker, setup=SimpleNamespace(name="all/0", stages=[]))
    batcher = cast(Any, SimpleNamespace(pool=SimpleNamespace(slots=[slot])))
    Executor(Slab(64), [batcher], Judge(Thresholds()), {}, metrics).measure()
    assert {
        kind: metrics.value("visiond_worker_preparations", worker="all/0", preparation=kind)
        for kind in ("plan", "recording", "compilation")
    } == {**prepared, "recording": 0}
