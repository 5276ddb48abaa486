"""Kills at random, in short; `make faults` runs the full forms."""

from __future__ import annotations

from pathlib import Path

from tests.daemon_process import seeded
from tests.faults.kill import kill_daemons, kill_workers, open_place


def test_kill_9_at_any_instant_loses_nothing_doubles_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    outcome = kill_daemons(open_place(tmp_path), 6, 600, seeded())
    assert outcome.verdict.problems == []
    assert outcome.verdict.counts == {"DONE": 600}
    assert outcome.orphans == 0
    assert outcome.figures["under load"] >= 3


def test_kill_9_of_random_workers_loses_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    outcome = kill_workers(open_place(tmp_path, workers=2), 4, 500, seeded())
    assert outcome.verdict.problems == []
    assert outcome.verdict.counts == {"DONE": 500}
    assert outcome.orphans == 0
    assert outcome.figures["of their rate kept by the others"] > 0.5  # on a machine that may be busy with other things
