"""What the benchmarks share: their options, small files, fake stages, a daemon for the time of a measurement, and how figures
are printed. The daemon and its meter are those of `visiond bench`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from daemon.config.loading import load
from daemon.measure.meter import Meter
from daemon.measure.steady import measure_rate
from daemon.measure.throwaway import Throwaway
from daemon.monitoring.snapshot import Snapshot
from daemon.server.control import find_snapshot

FAKES = "".join(
    f'[stages.{name}]\nbackend = "fake"\nbatch_size = 64\n' for name in ("ocr", "yolo", "clip", "blip")
)
CONFIG = '[[inbox]]\npath = "{inbox}"\nsettle_seconds = 0\n[http]\nlisten = ""\n[log]\nlevel = "error"\n'
POLL_SECONDS = 0.05


def read_options(description: str | None, *words: str, **defaults: Any) -> argparse.Namespace:
    """words: names of what must be given. Options by their defaults: False makes a flag, and a list an option with several
    values."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    for word in words:
        parser.add_argument(word)
    for name, default in defaults.items():
        named = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(named, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(named, nargs="*", type=kind, default=default, help=f"default: {default}")
        else:
            parser.add_argument(named, type=type(default), default=default, help=f"default: {default}")
    return parser.parse_args()


TEMPORARY = Path(tempfile.gettempdir())


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="visiond-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def make_files(folder: Path, count: int, seed: int) -> None:
    """Make small JPEGs with different bytes."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (90, 120, 150)).save(buffer, "JPEG")
    for number in range(count):
        (folder / f"{number:07d}.jpg").write_bytes(buffer.getvalue() + chance.randbytes(16))


def fake_daemon(folder: Path, *options: str, settings: str = FAKES, inbox: Path | None = None) -> Throwaway:
    """A daemon with fake stages in this folder. settings: further lines of its configuration; options: of `visiond run`."""
    file = folder / "daemon.toml"
    file.write_text(CONFIG.format(inbox=inbox or folder / "inbox") + settings)
    return Throwaway(load(file), file, *options)


class Run(NamedTuple):
    whole: float  # images per second, from the first image seen to the last one published
    middle: float  # images per second of the steady part
    cpu_seconds: dict[str, float]  # by kind of process; empty if it was not metered


def run_fakes(
    folder: Path, settings: str = FAKES, inbox: Path | None = None, *, metered: bool = False
) -> Run:
    """`visiond run --once` with fake stages. The figures are from its ledger, which must have all files as published."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(fake_daemon(folder, "--once", settings=settings, inbox=inbox))
        meter = Meter(daemon.process.pid, daemon.config)
        if metered:
            stack.enter_context(meter)
        daemon.wait_until_done()
    rows = ask_ledger(
        folder, "SELECT seen_at, finished_at FROM image WHERE status = 1 AND emitted = 1 ORDER BY finished_at"
    )
    files, sidecars = (sum(1 for _ in os.scandir(f)) for f in (inbox or folder / "inbox", folder / "results"))
    assert len(rows) == sidecars == files, f"{len(rows)} rows and {sidecars} sidecars for {files} files"
    whole = files / (rows[-1][1] - min(seen for seen, _ in rows))
    middle = measure_rate([finished for _, finished in rows])[0]
    return Run(whole, middle, meter.cpu_seconds)


def ask_ledger(folder: Path, statement: str, *values: object) -> list[tuple[Any, ...]]:
    ledger = f"file:{folder}/state/ledger.sqlite?mode=ro"
    with contextlib.closing(sqlite3.connect(ledger, uri=True, timeout=30)) as connection:
        return connection.execute(statement, values).fetchall()


def wait_for(daemon: Throwaway, key: str, least: int, patience_seconds: float = 600) -> Snapshot:
    """Ask the daemon for its status until a figure has reached `least`."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        assert daemon.process.poll() is None, "the daemon has ended"
        snapshot = find_snapshot(daemon.config)
        if snapshot and getattr(snapshot, key) >= least:
            return snapshot
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{key} did not reach {least} within {patience_seconds:g} s")


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median and the range."""
    middle, least, most = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"
