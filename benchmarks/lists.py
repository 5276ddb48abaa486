"""What the columns of a list cost `visiond ray run`.

    python -m benchmarks.lists [--rows 10000000] [--group 1000000] [--held 256]

A Parquet list with the columns of LAION-400M is made in a temporary folder, with row groups of --group rows. Printed are, in a
process of its own for each: the CPU time and memory of a driver that lists it and forms units of 1,000, and those of an
actor that reads the columns of unit after unit. --held: MiB of a row group that may be held; 0: none.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks.harness import read_options
from daemon.config.loading import parse
from visiond.cluster.places import ClusterFolder
from visiond.cluster.planning import Planner
from visiond.cluster.plans import Plans
from visiond.cluster.reading import joining
from visiond.cluster.reading.inputs import InputListing
from visiond.cluster.reading.keeping import choose_kept

UNIT = 1000
UNITS_READ = 200  # at even distances


def make_list(file: Path, rows: int, group: int) -> None:
    chance, writer = np.random.default_rng(0), None
    for first in range(0, rows, group):
        numbers = np.arange(first, min(first + group, rows))
        share = chance.random(len(numbers))
        columns = {
            "SAMPLE_ID": numbers.astype(float),
            "URL": [f"https://cdn.example.com/images/{n:012d}/photo-{n % 977}.jpg" for n in numbers],
            "TEXT": [
                f"caption number {n} of a thing that stands near {n * 7919 % 100003} others" for n in numbers
            ],
            "HEIGHT": (share * 1000).astype(np.int32),
            "WIDTH": (share * 1200).astype(np.int32),
            "LICENSE": ["?"] * len(numbers),
            "NSFW": ["UNLIKELY"] * len(numbers),
            "similarity": share,
        }
        table = pyarrow.table(columns)
        writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table, row_group_size=group)
    assert writer
    writer.close()


def measure_driver(listing: InputListing, rows: int, held: int) -> str:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans.open(ClusterFolder(folder), parse({}, Path(folder)), resume=False)
        units = sum(1 for _ in Planner(plans, listing.inputs(), UNIT).units())
    return f"driver: {units:,} units, {(time.process_time() - began) / rows * 1e6:.1f} µs a row"


def measure_actor(listing: InputListing, rows: int, held: int) -> str:
    pyarrow.array(np.zeros(1)).take(pyarrow.array([0]))  # what Arrow imports only now is no cost of a unit
    joining.HELD_BYTES = held << 20
    columns = joining.ParquetColumns(choose_kept(listing, (), every=True))
    step = 1 if held else max(1, rows // UNIT // UNITS_READ)
    spent = []
    for first in range(0, rows - UNIT + 1, UNIT * step):
        began = time.process_time()
        columns.read([], np.arange(first, first + UNIT))
        spent.append(1e3 * (time.process_time() - began))
    return f"actor: {statistics.mean(spent):.2f} ms for the columns of {UNIT:,} images (at most {max(spent):.0f})"


def report(measure: Callable[[InputListing, int, int], str], file: Path, rows: int, held: int) -> None:
    said = measure(InputListing(str(file), parse({}, file.parent), column="URL"), rows, held)
    # ru_maxrss would begin with that of the process that has started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(f"{said}, at most {int(status['VmHWM'].split()[0]) >> 10} MiB", flush=True)


def main() -> None:
    options = read_options(__doc__, rows=10_000_000, group=1_000_000, held=256)
    with tempfile.TemporaryDirectory(prefix="visiond-lists-") as folder:
        file = Path(folder) / "list.parquet"
        make_list(file, options.rows, options.group)
        for measure in (measure_driver, measure_actor):
            process = multiprocessing.get_context("spawn").Process(
                target=report, args=(measure, file, options.rows, options.held)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
