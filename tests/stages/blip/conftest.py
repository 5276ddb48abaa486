"""Small captioners of each model type, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stages.contract.base import Image
from tests.stages import captioners

Make = Callable[[str], Path]


@pytest.fixture
def mixed_images(mixed_images: list[Image]) -> list[Image]:
    """Eight of them, each of a size of its own."""
    return mixed_images[:8]


@pytest.fixture(scope="session")
def with_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BLIP-2 with a language model that has an encoder and a decoder."""
    make = captioners.make_blip2(captioners.T5)
    make(folder := tmp_path_factory.mktemp("t5") / "blip-2")
    return folder


@pytest.fixture(scope="session")
def make_captioner(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a small model by its type; made once."""
    place = tmp_path_factory.mktemp("captioners")

    def make(kind: str) -> Path:
        if not (place / kind).exists():
            captioners.CAPTIONERS[kind](place / kind)
        return place / kind

    return make
