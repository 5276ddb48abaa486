"""Compares what Lance has with what Parquet has, for images of a daemon with fake stages, and measures the sink lance.

With --rows, the sink gets groups when its data set has as many rows already, all in files of 8,192.

    python -m benchmarks.lance --images 10000
    python -m benchmarks.lance --rows 1000000
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet

from benchmarks.harness import (
    FAKES,
    TEMPORARY,
    fake_daemon,
    make_files,
    read_options,
    run_fakes,
    spread,
    work_folder,
)
from daemon.exports.choice import ExportChoice
from daemon.exports.columns import ExportColumns
from daemon.exports.export import export_records
from daemon.exports.lance import LanceSink, load_library, write_lance
from daemon.ledger.records import Reader
from daemon.results.outbox import GROUP

SINK = '[output]\nsinks = ["lance"]\n'


def main() -> None:
    options = read_options(__doc__, images=0, rows=0, groups=40, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        make_files(folder / "inbox", options.images or GROUP, seed=1)
        rate = run_fakes(folder, SINK + FAKES).whole
        config = fake_daemon(folder).config
        with contextlib.closing(Reader(config.state.path / "ledger.sqlite")) as reader:
            columns = ExportColumns(config.stage_names, models=True)
            if options.images:
                print(f"{rate:,.0f} images/s with the sink")
                compare(reader, columns, folder)
            else:
                records = [*reader.finished()]
                anyio.run(measure, LanceSink(config), folder, records, columns, options)


def compare(reader: Reader, columns: ExportColumns, folder: Path) -> None:
    for name in ("all.parquet", "all.lance"):
        started = time.monotonic()
        format = name.removeprefix("all.")
        count = export_records(
            reader, folder / name, format, ExportChoice(), columns, lambda done, total: None
        )
        print(f"{name}: {count:,} images in {time.monotonic() - started:.1f} s")
    expected = pyarrow.parquet.read_table(folder / "all.parquet")
    for name in ("all.lance", "results.lance"):
        found = load_library().dataset(folder / name).to_table().sort_by("id").select(expected.column_names)
        pairs = itertools.zip_longest(found.to_pylist(), expected.to_pylist())
        different = sum(ours != theirs for ours, theirs in pairs)
        print(f"{name}: {len(found):,} rows, {different:,} of them different from Parquet's")


async def measure(
    sink: LanceSink, folder: Path, records: list[Any], columns: ExportColumns, options: Any
) -> None:
    [(_, document)] = columns.rows_of(records[:1])
    rows = (
        replace(each, id=n) for n, each in zip(range(options.rows), itertools.cycle(records), strict=False)
    )
    (folder / "results.lance").rename(folder / "old")
    (folder / "results.lance").mkdir()
    started = time.monotonic()
    write_lance(folder / "results.lance", rows, columns, [document["clip"]["embedding"]["dim"]])
    # Made by the sink, which asks whose rows these are.
    made = load_library().dataset(folder / "old").schema.metadata
    load_library().dataset(folder / "results.lance").update_schema_metadata(
        {key.decode(): value.decode() for key, value in made.items()}, replace=True
    )
    print(f"{options.rows:,} rows written in {time.monotonic() - started:.0f} s")
    times = []
    for number in range(options.groups):
        group = [replace(each, id=options.rows + number * GROUP + n) for n, each in enumerate(records)]
        started = time.monotonic()
        await sink.append(group)
        times.append(1000 * (time.monotonic() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"a group of {GROUP}: {spread(times, 1)} ms; {peak:,} MiB at most")


if __name__ == "__main__":
    main()
