"""Takes the pictures of the page, docs/page-*.webp, in Chromium: over the results in the folder of `visiond demo`, which a
daemon serves.

make picture
"""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

ADDRESS = "http://127.0.0.1:9465"
START_SECONDS = 120.0
LOAD_SECONDS = 300.0  # on a busy machine, of the model that understands sentences
QUALITY = 82  # of WebP
# Ends when every picture that can be seen has been loaded.
SEEN = """() => Promise.all(
  [...document.images].filter(it => it.getBoundingClientRect().top < innerHeight).map(it => it.decode())
)"""


class Shot(NamedTuple):
    """boxes: whether they are shown. ready: text that is there once all has been loaded."""

    name: str
    path: str
    ready: str
    width: int
    height: int
    scheme: str = "light"
    boxes: bool = False


SHOTS = (
    Shot("page-search", "/?q=purple+boats", "near in meaning", 1200, 760, boxes=True),
    Shot("page-image", "/?q=name:000005", "Why bin", 1200, 860, boxes=True),
    Shot("page-phone", "/?bin=B", "newest first", 390, 780, "dark", boxes=True),
)


def main() -> None:
    demo, folder = map(Path, sys.argv[1:])
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with serving(demo), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for shot in SHOTS:
            content = take(browser, shot)
            file = folder / f"{shot.name}.webp"
            Image.open(io.BytesIO(content)).save(file, "WEBP", quality=QUALITY, method=6)
            print(f"{file}: {file.stat().st_size:,} bytes")
        browser.close()


@contextlib.contextmanager
def serving(demo: Path) -> Iterator[None]:
    """A daemon over the folder of the demo. Fails if another one has the address of its page."""
    with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(ADDRESS):
        sys.exit(f"something else answers at {ADDRESS}; stop it first")
    visiond = Path(sys.executable).with_name("visiond")
    command = (visiond, "run", "--config", demo / "daemon.toml")
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        last = time.monotonic() + START_SECONDS
        while daemon.poll() is None and time.monotonic() < last:
            with (
                contextlib.suppress(urllib.error.URLError),
                urllib.request.urlopen(f"{ADDRESS}/live") as live,
            ):
                if b"images/s" in live.read():
                    break
            time.sleep(0.5)
        else:
            sys.exit("the daemon did not start; see: visiond run --config demo/daemon.toml")
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)


def take(browser: Browser, shot: Shot) -> bytes:
    """As PNG."""
    viewport = {"width": shot.width, "height": shot.height}
    context = browser.new_context(base_url=ADDRESS, viewport=viewport, color_scheme=shot.scheme)  # type: ignore[arg-type]
    tab = context.new_page()
    tab.goto(shot.path)
    if shot.name == "page-image":
        tab.locator(".card .name a").first.click()
    expect(tab.get_by_text(shot.ready).first).to_be_visible(timeout=1000 * LOAD_SECONDS)
    expect(tab.locator(".live")).to_contain_text("images/s")
    if shot.boxes:
        tab.get_by_label("Show boxes").check()
    # Where the demo is on this machine is nobody's business.
    tab.locator(".path").evaluate_all(
        "them => them.forEach(it => it.textContent = it.textContent.replace(/.*(?=inbox)/, ''))"
    )
    tab.evaluate(SEEN)
    tab.wait_for_load_state("networkidle")
    content = tab.screenshot()
    context.close()
    return content


if __name__ == "__main__":
    main()
