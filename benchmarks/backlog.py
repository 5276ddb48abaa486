"""Measures a large backlog: memory while many files wait,
and the time to the first result with a million pending rows.

Run: python -m benchmarks.backlog [--files 200000] [--rows 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead import FAKES, make_files
from daemon.control import ask
from daemon.core.errors import NotRunning
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model

CONFIG = '[[inbox]]\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "warning"\n'
# Slow, so that the backlog stays.
SLOW = FAKES.replace('"fake"\n', '"fake"\noptions = { latency_seconds = 2.0 }\n', 1)


def start(folder: Path, stages: str) -> subprocess.Popen[bytes]:
    (folder / "daemon.toml").write_text(CONFIG + stages)
    return subprocess.Popen([sys.executable, "-P", "-m", "daemon", "run", "--config", folder / "daemon.toml"])


def ask_until(folder: Path, patience: float, key: str, least: int) -> dict[str, Any]:
    """Ask the daemon for its status until a figure has reached `least`."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            status: dict[str, Any] = ask(folder / "state" / "control.sock", "GET", "/api/status")
            if status[key] >= least:
                return status
        except NotRunning:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{key} did not reach {least} within {patience:g} s")


def resident_mebibytes(pid: int) -> float:
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) / 1024


def measure_memory(folder: Path, files: int) -> None:
    """Anonymous memory of the daemon at the start and while more and more files wait."""
    make_files(folder / "inbox", files, 0)
    daemon = start(folder, SLOW)
    try:
        ask_until(folder, 60, "done", 64)
        readings = [resident_mebibytes(daemon.pid)]
        for share in (0.25, 0.5, 0.75, 0.95):
            status = ask_until(folder, 600, "pending", int(files * share))
            readings.append(resident_mebibytes(daemon.pid))
        print(f"{files:,} files waiting ({status['pending']:,} pending at the last reading): ", end="")
        print(
            f"{', '.join(f'{reading:.0f}' for reading in readings)} MiB, spread {max(readings) - min(readings):.0f} MiB"
        )
    finally:
        daemon.kill()
        daemon.wait()


def measure_start(folder: Path, rows: int) -> None:
    """Seconds from the start of the process to the first result, with a ledger full of pending rows."""
    make_files(folder / "inbox", 256, 0)

    async def register() -> None:
        ledger = Ledger(folder / "state" / "ledger.sqlite")
        await ledger.register([(folder / "inbox", 0)], [Model("ocr", "x", "")])
        ledger.close()

    asyncio.run(register())
    connection = sqlite3.connect(folder / "state" / "ledger.sqlite")
    columns = "inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at"
    values = ((1, b"absent/%07d.jpg" % n, 0, n, 2000, n, n, 0, 0, time.time()) for n in range(rows))
    existing = []
    for path in sorted((folder / "inbox").iterdir()):
        s = path.stat()
        existing.append(
            (1, path.name.encode(), 0, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, 0, 0, 0.0)
        )
    with connection:
        for part in (existing, values):
            connection.executemany(
                f"INSERT INTO image ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", part
            )
    connection.close()
    started = time.monotonic()
    daemon = start(folder, FAKES)
    try:
        ask_until(folder, 60, "done", 1)
        print(
            f"{rows:,} rows pending: first result {time.monotonic() - started:.2f} s after the start of the process"
        )
    finally:
        daemon.kill()
        daemon.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    for measure, size in ((measure_start, options.rows), (measure_memory, options.files)):
        folder = Path(tempfile.mkdtemp(prefix="visiond-backlog-", dir=options.folder))
        try:
            measure(folder, size)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
