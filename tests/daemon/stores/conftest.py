"""Fixtures: an object store for all tests of this folder, and for each test a proxy and a prefix of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.core import stores as opening
from tests.daemon.stores.server import Bucket, FaultyProxy, find_server, proxied, serving


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the store."""
    pytest.importorskip("obstore", reason="obstore is not installed: make setup")
    if not find_server():
        pytest.skip("the object store for tests is not installed: make tools")
    with serving(Path(tmp_path_factory.mktemp("store"))) as port:
        yield port


@pytest.fixture
def proxy(store: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Also the way of this process to the store."""
    with proxied(store) as opened:
        for name, value in opened.environment.items():
            monkeypatch.setenv(name, value)
        opening.store_of.cache_clear()
        yield opened
        opening.store_of.cache_clear()


@pytest.fixture
def bucket(store: int) -> Bucket:
    return Bucket(store)


@pytest.fixture
def prefix() -> str:
    return f"in-{secrets.token_hex(4)}"
