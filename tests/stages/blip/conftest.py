"""Small captioners of each model type, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stages import captioners

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_captioner(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a small model by its type; made once."""
    place = tmp_path_factory.mktemp("captioners")

    def make(kind: str) -> Path:
        if not (place / kind).exists():
            captioners.CAPTIONERS[kind](place / kind)
        return place / kind

    return make
