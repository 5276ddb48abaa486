"""The short form of kill.py: `make faults` runs the long one."""

from __future__ import annotations

from pathlib import Path

from tests.daemon_process import seeded
from tests.faults.kill import kill_repeatedly, open_place

KILLS, FILES = 6, 600


def test_kill_9_at_any_instant_loses_nothing_doubles_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    outcome = kill_repeatedly(open_place(tmp_path), KILLS, FILES, seeded())
    assert outcome.verdict.problems == []
    assert outcome.verdict.counts == {"DONE": FILES}
    assert outcome.orphans == 0
    assert outcome.under_load >= KILLS // 2
