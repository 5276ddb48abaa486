"""What root makes belongs to the owner of the folder that it is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.system.ownership import hand_over


def test_root_hands_over_no_file_that_a_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the folder could make it lead to a file of root's."""
    given: list[tuple[Path, bool]] = []

    def note(path: Path, user: int, group: int, *, follow_symlinks: bool = True) -> None:
        given.append((path, follow_symlinks))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", note)
    hand_over(tmp_path / "link")
    assert given == [(tmp_path / "link", False)]
