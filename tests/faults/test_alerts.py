"""The alerts whose faults are quickly caused; `make faults` drives all of them, each for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.prometheus import needs_prometheus
from tests.faults.alerts import DRILLS, work_for_an_hour

QUICK = [
    "VisiondWatchdog",
    "VisiondInboxAway",
    "VisiondPublishingBehind",
    "VisiondDown",
    "VisiondManyFailures",
    "VisiondWorkersRestarting",
    "VisiondWrongAnswers",
    "VisiondDiskLow",
    "VisiondGpuMemory",
    "VisiondEventsLost",
    "VisiondConfigurationRefused",
]

pytestmark = needs_prometheus


@pytest.mark.parametrize("alert", QUICK)
def test_a_fault_makes_exactly_its_alert_fire(alert: str, tmp_path: Path) -> None:
    DRILLS[alert](tmp_path, {"linger_seconds": 0})


def test_in_a_quarter_of_an_hour_of_work_no_alert_fires(tmp_path: Path) -> None:
    assert work_for_an_hour(tmp_path, 0.25) > 0
