"""Measures groups of the sink lance when its data set has so many rows already, all in files of 8,192.

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
from daemon.exports.columns import ExportColumns
from daemon.exports.lance import LanceSink, load_library, write_lance
from daemon.ledger.records import Reader
from daemon.results.outbox import GROUP

SINK = '[output]\nsinks = ["lance"]\n'


def main() -> None:
    options = read_options(__doc__, rows=1_000_000, groups=40, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        make_files(folder / "inbox", GROUP, seed=1)
        run_fakes(folder, SINK + FAKES)
        config = fake_daemon(folder).config
        with contextlib.closing(Reader(config.state.path / "ledger.sqlite")) as reader:
            columns = ExportColumns(config.stage_names, models=True)
            records = [*reader.finished()]
            anyio.run(measure, LanceSink(config), folder, records, columns, options)


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
