"""What the page of the state shows beside the snapshot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from daemon.config.loading import parse
from daemon.core.errors import VisiondError
from daemon.monitoring.overview import (
    Failures,
    LastHour,
    Overview,
    advise,
    say_bytes,
    say_seconds,
)
from stages.contract.base import Reason


class Reasons:
    """The failures of a test, and how often they were counted."""

    def __init__(self, **counts: int) -> None:
        self.counts = Counter(counts)
        self.asked = 0

    def __call__(self) -> tuple[Counter[str], bool]:
        self.asked += 1
        return self.counts, False


def test_folders_on_one_disk_are_one_line(tmp_path: Path) -> None:
    for inbox in ("a", "b"):
        (tmp_path / inbox).mkdir()
    inboxes = [{"path": inbox, "name": inbox} for inbox in ("a", "b")]
    inboxes.append({"url": "s3://bucket/in", "name": "c"})
    overview = Overview(parse({"inbox": inboxes}, tmp_path), Reasons())
    assert [room.space for room in overview.rooms()] == [None], "no disk has answered yet"
    anyio.run(overview.look)
    [room] = overview.rooms()
    assert room.folders == ["results", "failed", "state", "inbox a", "inbox b"]
    assert room.space
    assert 0 < room.space.free_bytes < room.space.size_bytes


def test_failures_are_grouped_by_reason_the_most_frequent_first() -> None:
    overview = Overview(parse({}, Path("/srv")), Reasons(truncated=2, empty=5))
    overview.count(7)
    assert overview.reasons == [
        Failures("empty", 5, advise("empty")),
        Failures("truncated", 2, advise("truncated")),
    ]
    overview.count(0)
    assert overview.reasons == []


def test_a_search_that_cannot_be_asked_leaves_the_rest_of_the_page() -> None:
    def refuse() -> tuple[Counter[str], bool]:
        raise VisiondError("the index is being made")

    overview = Overview(parse({}, Path("/srv")), refuse)
    overview.count(7)
    assert overview.reasons == []


def test_slow_counts_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("daemon.monitoring.overview.time.monotonic", lambda: now[0])
    reasons = Reasons(empty=1)

    def count() -> tuple[Counter[str], bool]:
        now[0] += 0.5
        return reasons()

    overview = Overview(parse({}, Path("/srv")), count)
    for _ in range(12):
        overview.count(1)
        now[0] += 1
    assert reasons.asked == 2


def test_every_reason_of_a_failure_says_what_to_do() -> None:
    assert [reason for reason in Reason if not advise(reason)] == [Reason.UNPACKED], "which is no failure"
    assert "list --status failed" in advise("of a later version")


def test_the_last_minute_is_on_the_right_and_the_highest_bar_fills_the_height() -> None:
    hour = LastHour.of([3, 12, 0])
    assert [(bar.x, bar.height, bar.title) for bar in hour.bars] == [
        (95.0, 25.0, "2 min ago: 3"),
        (96.667, 100.0, "1 min ago: 12"),
        (98.333, 0.0, "this minute: 0"),
    ]
    assert (hour.images, hour.most, hour.span) == (15, 12, "since the daemon started")
    assert LastHour.of([1] * 60).span == "in the last hour"
    assert LastHour.of([1] * 60).bars[0].x == 0
    assert LastHour.of([]).bars == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3, "0 s"),
        (119.4, "119 s"),
        (125, "2 min"),
        (7200, "2 h"),
        (12_000, "3 h 20 min"),
        (180_000, "2 days 2 h"),
        (172_800, "2 days"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert say_seconds(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (17, "17 bytes"),
        (20 << 20, "20 MiB"),
        (3 << 29, "1.5 GiB"),
        (57 << 30, "57 GiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes_are_said_as_people_say_them(count: int, said: str) -> None:
    assert say_bytes(count) == said
