"""Measures the cost of the daemon itself: four fake stages compared with a bare loop, on the same files,
in the same run.

The bare loop reads each file, digests it, records it in SQLite (64 per commit, synchronous FULL) and writes a
sidecar: the minimum that any such program does. Run: python -m benchmarks.overhead [--files 20000] [--rounds
3]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

COMMIT = 64
FAKES = "".join(
    f'[stages.{name}]\nbackend = "fake"\nbatch_size = 64\n' for name in ("ocr", "yolo", "clip", "blip")
)


def make_files(folder: Path, count: int, seed: int) -> None:
    """Make small JPEGs with different bytes."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (90, 120, 150)).save(buffer, "JPEG")
    for number in range(count):
        (folder / f"{number:07d}.jpg").write_bytes(buffer.getvalue() + chance.randbytes(16))


def run_bare(inbox: Path, folder: Path) -> float:
    """Images per second of the bare loop."""
    results = folder / "bare"
    results.mkdir()
    connection = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE image (path TEXT PRIMARY KEY, digest TEXT, result TEXT)")
    started = time.perf_counter()
    rows = []
    count = 0
    for entry in os.scandir(inbox):
        with open(entry.path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        result = json.dumps(
            {"schema": "bare", "path": entry.name, "digest": digest, "text": "nothing was looked at"}
        )
        rows.append((entry.name, digest, result))
        with open(results / f"{entry.name}.tmp", "w") as file:
            file.write(result)
        os.rename(results / f"{entry.name}.tmp", results / f"{entry.name}.json")
        count += 1
        if len(rows) == COMMIT:
            _commit(connection, rows)
            rows = []
    _commit(connection, rows)
    seconds = time.perf_counter() - started
    connection.close()
    return count / seconds


def _commit(connection: sqlite3.Connection, rows: list[tuple[str, str, str]]) -> None:
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO image VALUES (?, ?, ?)", rows)
    connection.execute("COMMIT")


def run_daemon(inbox: Path, folder: Path) -> float:
    """Images per second from the first one seen to the last one durable and published,
    from the daemon's ledger."""
    config = folder / "daemon.toml"
    config.write_text(
        f'[[inbox]]\npath = "{inbox}"\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "error"\n{FAKES}'
    )
    subprocess.run([sys.executable, "-P", "-m", "daemon", "run", "--once", "--config", config], check=True)
    ledger = sqlite3.connect(f"file:{folder}/state/ledger.sqlite?mode=ro", uri=True)
    query = "SELECT COUNT(*), MAX(finished_at) - MIN(seen_at) FROM image WHERE status = 1 AND emitted = 1"
    count, seconds = ledger.execute(query).fetchone()
    ledger.close()
    files = sum(1 for _ in os.scandir(inbox))
    sidecars = sum(1 for _ in os.scandir(folder / "results"))
    assert count == sidecars == files, f"{count} rows and {sidecars} sidecars for {files} files"
    return float(count / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    bare, daemon = [], []
    for number in range(options.rounds):
        folder = Path(tempfile.mkdtemp(prefix="visiond-bench-", dir=options.folder))
        try:
            make_files(folder / "inbox", options.files, number)
            for run, rates in ((run_bare, bare), (run_daemon, daemon)):
                os.sync()  # otherwise each waits for the disk to write what the other one left
                rates.append(run(folder / "inbox", folder))
        finally:
            shutil.rmtree(folder)
        print(
            f"round {number + 1}: bare loop {bare[-1]:,.0f}/s, visiond {daemon[-1]:,.0f}/s, ratio {daemon[-1] / bare[-1]:.2f}"
        )
    ratios = [d / b for d, b in zip(daemon, bare, strict=True)]
    print(
        f"{options.files:,} files, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores, median (range):\n"
        f"  bare loop  {spread(bare)} images/s\n  visiond    {spread(daemon)} images/s\n"
        f"  ratio      {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    main()
