"""Chromium, for tests of the page. Without it on this machine they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from playwright.sync_api import Page as Tab

from tests.daemon_process import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: make tools")


@contextmanager
def launched() -> Iterator[Browser]:
    """Meanwhile Playwright waits as long as other tests: its own 5 s are too short for a machine that stands still."""
    expect.set_options(timeout=1000 * PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
    expect.set_options(timeout=None)


@contextmanager
def opened(browser: Browser, origin: str, *, ignore_https_errors: bool = False) -> Iterator[Tab]:
    """A tab. At its end, the test fails if a script failed or the content policy refused something."""
    context = browser.new_context(base_url=origin, ignore_https_errors=ignore_https_errors)
    tab, errors = context.new_page(), list[str]()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    open_requests = set[str]()
    tab.on("request", lambda request: open_requests.add(request.url))
    tab.on("requestfinished", lambda request: open_requests.discard(request.url))
    yield tab
    where = tab.evaluate("[scrollY, innerHeight, document.documentElement.scrollHeight, document.hasFocus()]")
    print(f"requests without an answer: {open_requests}; the window: {where}")  # shown if the test fails
    found = [*errors]  # read before closing, which interrupts requests and so causes errors
    context.close()
    assert not found, found  # pytest explains conditions of test modules only
