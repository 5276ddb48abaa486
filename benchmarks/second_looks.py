"""Measures how much second looks slow first looks down, with fake stages on fake devices.

A fake device does one batch at a time. First looks take 3 ms of their device for each image, a second look takes
25 ms. Second looks run on a device of their own, or on that of the first looks with a budget of 4 images/s, which
is 10 % of the device's time.
Run: python -m benchmarks.second_looks [--files 3000] [--rounds 3] [--shares 0 0.01 0.05 0.2]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.overhead import make_files

FIRST_SECONDS, SECOND_SECONDS = 0.003, 0.025  # of the device's time for an image
BUDGET = 4.0  # images/s, on a device that first looks use too
SHARE_OF_BIN_A = 25 / 64  # of the answers of fake stages


def configure(folder: Path, inbox: Path, share: float, device: str, budget: float) -> Path:
    """share: of all images that get a second look. device: of second looks."""

    def options(seconds: float, file: str) -> str:
        return f'{{ latency_per_image_seconds = {seconds}, device_file = "{folder / file}", salt = {int(seconds * 1e3)} }}'

    lines = [f'[[inbox]]\npath = "{inbox}"\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "error"']
    lines += ["[pipeline]\nworkers_per_device = 2"]
    for stage in ("ocr", "yolo", "clip", "blip"):
        cost = options(FIRST_SECONDS, "first") if stage == "ocr" else "{}"
        lines.append(f'[stages.{stage}]\nbackend = "fake"\nbatch_size = 32\noptions = {cost}')
    if share:
        lines.append(
            f'[[second_look]]\nname = "again"\nwhen = "A"\nstage = "ocr"\nbackend = "fake"\nbatch_size = 1\n'
            f"share = {share / SHARE_OF_BIN_A}\nimages_per_second = {budget}\n"
            f"options = {options(SECOND_SECONDS, device)}"
        )
    file = folder / "daemon.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def measure(inbox: Path, folder: Path, share: float, device: str, budget: float) -> tuple[float, int]:
    """First looks per second, from the first that ended to the last, and the number of second looks.
    It does not wait for second looks: the daemon gets a signal after the first looks."""
    file = configure(folder, inbox, share, device, budget)
    files = sum(1 for _ in os.scandir(inbox))
    daemon = subprocess.Popen([sys.executable, "-P", "-m", "daemon", "run", "--config", file])
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                sys.exit(f"the daemon ended with status {daemon.wait(0.5)}")
            with contextlib.suppress(sqlite3.OperationalError):  # it has no tables yet
                done, seconds, looks = read(folder / "state" / "ledger.sqlite")
                if done == files:
                    return done / seconds, looks
    finally:
        daemon.terminate()
        daemon.wait()


def read(ledger: Path) -> tuple[int, float, int]:
    """Images that are DONE, the seconds from the first to the last, and second looks that are done."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        first = connection.execute(
            "SELECT COUNT(*), MAX(finished_at) - MIN(finished_at) FROM image WHERE status = 1"
        )
        looks = connection.execute("SELECT COUNT(*) FROM look WHERE not_before IS NULL AND reason IS NULL")
        return (*first.fetchone(), looks.fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.01, 0.05, 0.2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    kinds = [("another device", "second", 0.0), ("the same device", "first", BUDGET)]
    cases = [(share, *kind) for share in options.shares for kind in (kinds if share else kinds[:1])]
    rates: dict[tuple[float, str], list[float]] = {}
    looks: dict[tuple[float, str], int] = {}
    for number in range(options.rounds):
        for share, kind, device, budget in cases:
            folder = Path(tempfile.mkdtemp(prefix="visiond-bench-", dir=options.folder))
            try:
                make_files(folder / "inbox", options.files, number)
                rate, count = measure(folder / "inbox", folder, share, device, budget)
            finally:
                shutil.rmtree(folder)
            rates.setdefault((share, kind), []).append(rate)
            looks[share, kind] = count
    base = statistics.median(rates[0, "another device"]) if (0, "another device") in rates else None
    for (share, kind), found in rates.items():
        middle = statistics.median(found)
        ratio = f", {middle / base:.3f} of none" if base else ""
        print(
            f"{share:4.0%} on {kind}: {middle:,.1f} first looks/s ({min(found):,.1f} to {max(found):,.1f}){ratio}, "
            f"{looks[share, kind]} second looks in that time"
        )


if __name__ == "__main__":
    main()
