from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from playwright.sync_api import Page as Tab

from tests.daemon.server.browser import launched, opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, origin: str) -> Iterator[Tab]:
    """origin: a fixture of the tests, the scheme, host and port of their page."""
    with opened(browser, origin) as tab:
        yield tab
