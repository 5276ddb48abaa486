"""Small page readers of each model type, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stages import readers

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_reader(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a small model by its type; made once."""
    place = tmp_path_factory.mktemp("readers")

    def make(kind: str) -> Path:
        if not (place / kind).exists():
            readers.READERS[kind](place / kind)
        return place / kind

    return make
