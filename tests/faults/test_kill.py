"""Kills at random, in short; `make faults` runs the full forms."""

from __future__ import annotations

from pathlib import Path

from tests.daemon_process import Daemon, Gate, seeded
from tests.faults.hang import kill_while_a_worker_hangs
from tests.faults.kill import all_ready, drop_shares, end_orphans, kill_daemons, kill_one, open_place


def test_kill_9_at_any_instant_loses_nothing_doubles_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    place = open_place(tmp_path, seconds_per_image=0.01)  # a share of 85 takes a second
    outcome = kill_daemons(place, 6, 600, seeded())
    assert outcome.verdict.problems == []
    assert outcome.verdict.counts == {"DONE": 600}
    assert outcome.orphans == 0
    assert outcome.figures["under load"] > 0


def test_kill_9_of_random_workers_loses_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    place, gate, chance, dropped = open_place(tmp_path, workers=2), Gate(tmp_path, tickets=2), seeded(), 0
    with Daemon(place, environment=gate.environment) as daemon:
        for share in drop_shares(place, 3, 500):
            dropped += share
            kill_one(daemon, chance)
            daemon.wait_idle(dropped)  # by the other worker: the replacement may not start before
            gate.let_in()
            daemon.wait_until(all_ready, "its successor")
        assert daemon.stop() == 0
    assert end_orphans(place) == 0
    place.assert_kept(DONE=500)


def test_a_worker_that_hangs_with_the_interpreter_lock_held_ends_with_a_killed_daemon(tmp_path: Path) -> None:
    assert kill_while_a_worker_hangs(tmp_path, rounds=1) == 0
