"""How far scans of several inboxes came, noted by the threads of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daemon.inbox import markers
from daemon.inbox.markers import Markers


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_inboxes_note_their_markers_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_threads: None
) -> None:
    monkeypatch.setattr(markers, "SAVE_SECONDS", 0.0)
    kept = Markers(tmp_path / "markers.json")

    def scan(inbox: int) -> None:
        for number in range(100):
            root = b"s3://bucket/%d-%d" % (inbox, number % 7)
            kept.note(root, b"a.jpg")
            kept.note(root, b"")
        kept.note(b"s3://bucket/%d" % inbox, b"last.jpg")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(scan, range(8)))
    assert {Markers(tmp_path / "markers.json").of(b"s3://bucket/%d" % inbox) for inbox in range(8)} == {
        b"last.jpg"
    }
