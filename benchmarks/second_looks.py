"""Measures how much second looks slow first looks down, with fake stages on fake devices.

    python -m benchmarks.second_looks --files 3000 --rounds 3 --shares 0 0.01 0.05 0.2

A fake device does one batch at a time. First looks take 3 ms of their device for each image, a second look takes
25 ms. Second looks run on a device of their own, or on that of the first looks with a budget of 4 images/s, which
is 10 % of the device's time.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.harness import (
    TEMPORARY,
    ask_ledger,
    fake_daemon,
    make_files,
    read_options,
    spread,
    wait_for,
    work_folder,
)

FIRST_SECONDS, SECOND_SECONDS = 0.003, 0.025  # of the device's time for an image
BUDGET = 4.0  # images/s, on a device that first looks use too
SHARE_OF_BIN_A = 25 / 64  # of the answers of fake stages


def configure(folder: Path, share: float, device: str, budget: float) -> str:
    """share: of all images that get a second look. device: of second looks."""

    def options(seconds: float, file: str) -> str:
        return f'{{ latency_per_image_seconds = {seconds}, device_file = "{folder / file}", salt = {int(seconds * 1e3)} }}'

    lines = ["[pipeline]\nworkers_per_device = 2"]
    for stage in ("ocr", "yolo", "clip", "blip"):
        cost = options(FIRST_SECONDS, "first") if stage == "ocr" else "{}"
        lines.append(f'[stages.{stage}]\nbackend = "fake"\nbatch_size = 32\noptions = {cost}')
    if share:
        lines.append(
            f'[[second_look]]\nname = "again"\nwhen = "A"\nstage = "ocr"\nbackend = "fake"\nbatch_size = 1\n'
            f"share = {share / SHARE_OF_BIN_A}\nimages_per_second = {budget}\n"
            f"options = {options(SECOND_SECONDS, device)}"
        )
    return "\n".join(lines) + "\n"


def measure(folder: Path, files: int, settings: str) -> tuple[float, int]:
    """First looks per second, from the first that ended to the last, and the number of second looks until then."""
    with fake_daemon(folder, settings=settings) as daemon:
        wait_for(daemon, "done", files)
        asked = "SELECT MAX(finished_at) - MIN(finished_at) FROM image WHERE status = 1"
        [(seconds,)] = ask_ledger(folder, asked)
        [(looks,)] = ask_ledger(
            folder, "SELECT COUNT(*) FROM look WHERE not_before IS NULL AND reason IS NULL"
        )
    return files / seconds, looks


def main() -> None:
    options = read_options(__doc__, files=3000, rounds=3, shares=[0.0, 0.01, 0.05, 0.2], folder=TEMPORARY)
    kinds = [("another device", "second", 0.0), ("the same device", "first", BUDGET)]
    cases = [(share, *kind) for share in options.shares for kind in (kinds if share else kinds[:1])]
    rates: dict[tuple[float, str], list[float]] = {}
    looks: dict[tuple[float, str], int] = {}
    for number in range(options.rounds):
        for share, kind, device, budget in cases:
            with work_folder(options.folder) as folder:
                make_files(folder / "inbox", options.files, number)
                rate, count = measure(folder, options.files, configure(folder, share, device, budget))
            rates.setdefault((share, kind), []).append(rate)
            looks[share, kind] = count
    base = statistics.median(rates.get((0, "another device"), [0.0]))
    for (share, kind), found in rates.items():
        ratio = f", {statistics.median(found) / base:.3f} of none" if base else ""
        print(
            f"{share:4.0%} on {kind}: {spread(found, 1)} first looks/s{ratio}, {looks[share, kind]} second looks in that time"
        )


if __name__ == "__main__":
    main()
