"""Measures what an open page costs: the rate of the daemon with a browser at its gallery and without one, in turns.

The stages are fake ones. With --rate their "GPU" needs as long for an image as a real one; with --rate 0 they need
nothing, and the daemon takes all the cores that it can get. Chromium runs beside it on the same machine, at the lowest
priority, as it would usually have a machine of its own.

Run: python -m benchmarks.browsing [--files 6000] [--rounds 5] [--rate 740]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.overhead import make_files, spread
from stages.contract import processes

CONFIG = """
[[inbox]]
path = "inbox"
settle_seconds = 0
on_success = "keep"
[http]
listen = ""
[page]
listen = "127.0.0.1:{port}"
[log]
level = "error"
[stages.ocr]
backend = "fake"
batch_size = 64
options = {{ latency_per_image_seconds = {seconds} }}
[stages]
yolo = {{ backend = "fake", batch_size = 64 }}
clip = {{ backend = "fake", batch_size = 64 }}
blip = {{ backend = "fake", batch_size = 64 }}
"""
PAGE = "daemon.server.process"
LOWEST = 19
PATIENCE_SECONDS = 600.0


class Work:
    """A daemon with its page, and the files that it gets."""

    def __init__(self, folder: Path, rate: float, port: int) -> None:
        self.folder = folder
        (folder / "inbox").mkdir()
        config = folder / "daemon.toml"
        config.write_text(CONFIG.format(port=port, seconds=1 / rate if rate else 0))
        command = processes.python("-P", "-m", "daemon", "run", "--config", str(config))
        self.process = subprocess.Popen(command)
        self.done = 0

    def run(self, count: int, number: int) -> float:
        """Images per second from the first one seen to the last one finished."""
        make_files(self.folder / "made", count, number)
        os.sync()
        (self.folder / "made").rename(self.folder / "inbox" / str(number))
        self.done += count
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._ask("SELECT COUNT(*) FROM image WHERE emitted") < self.done:
            assert time.monotonic() < deadline, "the daemon does not finish its images"
            time.sleep(0.2)
        span = "SELECT MAX(finished_at) - MIN(seen_at) FROM image WHERE CAST(path AS TEXT) LIKE ?"
        return count / self._ask(span, f"{number}/%")

    def wait(self) -> None:
        """Until it has made its ledger."""
        while True:
            with contextlib.suppress(sqlite3.OperationalError):
                self._ask("SELECT COUNT(*) FROM image")
                return
            time.sleep(0.2)

    def page_seconds(self) -> float:
        """CPU seconds of the page's process so far."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if PAGE in (entry / "cmdline").read_text() and self._owns(entry):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        raise SystemExit("the daemon has no page; is the port in use?")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def _owns(self, entry: Path) -> bool:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid

    def _ask(self, statement: str, *values: str) -> float:
        ledger = sqlite3.connect(f"file:{self.folder}/state/ledger.sqlite?mode=ro", uri=True)
        with contextlib.closing(ledger):
            return float(ledger.execute(statement, values).fetchone()[0])


@contextlib.contextmanager
def looking(port: int) -> Iterator[None]:
    """A tab at the gallery, which shows the rate and counts new images every two seconds."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        own, kept = os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, own, LOWEST)  # its children inherit it
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, own, kept)
        try:
            browser.new_page().goto(f"http://127.0.0.1:{port}/")
            yield
        finally:
            browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate", type=float, default=740.0, help="images per second of the fake GPU; 0: no limit"
    )
    parser.add_argument("--port", type=int, default=9475)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="visiond-browsing-", dir=options.folder))
    alone, watched = list[float](), list[float]()
    work = Work(folder, options.rate, options.port)
    try:
        work.wait()
        work.run(options.files, 0)
        for number in range(1, 2 * options.rounds, 2):
            kinds = [(contextlib.nullcontext, alone), (lambda: looking(options.port), watched)]
            costs = {}
            for order, (opened, rates) in enumerate(kinds if number % 4 == 1 else reversed(kinds)):
                with opened():
                    before = work.page_seconds()
                    rates.append(work.run(options.files, number + order))
                    costs[id(rates)] = 1e6 * (work.page_seconds() - before) / options.files
            print(
                f"without a browser {alone[-1]:,.0f} images/s, with one {watched[-1]:,.0f}; the page's process "
                f"{costs[id(alone)]:,.0f} and {costs[id(watched)]:,.0f} µs of CPU for each image",
                flush=True,
            )
    finally:
        work.close()
        shutil.rmtree(folder)
    ratios = [with_one / without for with_one, without in zip(watched, alone, strict=True)]
    print(
        f"{options.files:,} files, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, median (range):\n"
        f"  without  {spread(alone)} images/s\n  with     {spread(watched)} images/s\n"
        f"  ratio    {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
