"""How long does --resume need to know what is finished, and how much memory?

    python -m benchmarks.resume [--inputs 10000000]

Makes an OUTPUT with plans and empty parts of so many inputs, and then, in a process of its own, opens it and goes
through a listing of all of them, as `visiond ray run --resume` does before it starts Ray. The listing is made up, so
the time that a disk or a store needs to list its files comes on top.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from daemon.config.loading import parse
from stages.contract import processes
from visiond.cluster.inputs import Input
from visiond.cluster.places import Folder
from visiond.cluster.planning import Planner, Unit, id_of
from visiond.cluster.plans import Plans, name_of, part_of

UNIT, PLAN = 1000, 1_000_000  # inputs


def listed(count: int) -> Iterator[Input]:
    return (Input(b"%08d.jpg" % n, b"/data/images/%08d.jpg" % n, b"204800 %d" % n) for n in range(count))


def make(folder: Path, count: int) -> None:
    plans = Plans.open(Folder(str(folder)), parse({}, folder), resume=False)
    inputs = listed(count)
    for begin in range(0, count, PLAN):
        size = min(PLAN, count - begin)
        ids = np.fromiter((id_of(next(inputs)) for _ in range(size)), np.uint64, size)
        units = [Unit(name_of(part), part, True, b"") for part in np.split(ids, range(UNIT, size, UNIT))]
        plans.write(units)
        for unit in units:
            (folder / part_of(unit.name)).touch()


def resume(folder: Path, count: int) -> None:
    before, began = used_bytes(), time.perf_counter()
    plans = Plans.open(Folder(str(folder)), parse({}, folder), resume=True)
    opened = time.perf_counter() - began
    print(f"opened: {opened:.1f} s, at most {used_bytes() >> 20:,} MiB ({before >> 20:,} MiB before)")
    planner = Planner(plans, listed(count), UNIT)
    left = sum(len(unit.ids) for unit in planner.units())
    seconds = time.perf_counter() - began
    most, busy = used_bytes() >> 20, time.process_time()
    print(
        f"listed {count:,}, {planner.finished:,} finished, {left:,} left: {seconds:.1f} s, at most {most:,} MiB"
    )
    print(f"{busy:.1f} s of CPU in all")


def used_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        resume(options.folder, options.inputs)
        return
    with tempfile.TemporaryDirectory(prefix="visiond-resume-") as folder:
        make(Path(folder), options.inputs)
        own = ("-m", "benchmarks.resume", "--inputs", str(options.inputs), "--folder", folder)
        subprocess.run(processes.python(*own), env=processes.environment(), check=True)


if __name__ == "__main__":
    main()
