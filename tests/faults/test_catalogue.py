"""The short forms of the catalogue's rows; `make faults` runs the full ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon_process import seeded
from tests.faults.catalogue import ROWS, Row


@pytest.mark.parametrize("row", [row for row in ROWS if row.short is not None], ids=lambda row: row.fault)
def test_the_daemon_survives(row: Row, tmp_path: Path) -> None:
    assert row.short is not None
    figure = row.attempt(tmp_path, seeded(), row.short)
    assert figure.passed, figure.text
