"""One sealed decoder for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.contract.base import Limits
from stages.images.decoder import Decoder


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    opened = Decoder(Limits())
    yield opened
    opened.close()
