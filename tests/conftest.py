"""What tests of several modules share: the event loop the daemon runs on, and a ledger with an inbox."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from daemon.ledger import Ledger
from tests.makers import MODELS

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may do; only the tests of kernels see it

hypothesis.settings.register_profile("visiond", database=None, deadline=None)
hypothesis.settings.load_profile("visiond")


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
async def ledger(tmp_path: Path, inbox: Path) -> AsyncIterator[Ledger]:
    """A new ledger whose inbox 1 is `inbox`, with a model for each stage."""
    opened = Ledger(tmp_path / "state" / "ledger.sqlite")
    assert await opened.register([(inbox, 0)], MODELS) == [1]
    yield opened
    opened.close()
