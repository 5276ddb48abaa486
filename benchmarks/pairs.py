"""Compares the rate of this tree with that of an earlier one, in turns on the same machine.

    python -m benchmarks.pairs COMMIT --rounds 5                      fake stages: the cost of the daemon itself
    python -m benchmarks.pairs COMMIT --rounds 5 --job standard       the standard job; on a GPU
    python -m benchmarks.pairs /path/to/an/older/tree …               a folder instead of a commit

Prints each rate, then the median, the minimum and the maximum ratio of the pairs. Before the standard job each tree processes a
few images, so that it does not compile its kernels in a round. The standard job has two rates: that of the whole run, from the
first loaded worker to the last sidecar, and that of the middle, from a quarter of the images to 95 %.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import TEMPORARY, make_files, read_options, spread, work_folder
from daemon.measure.place import Place
from stages.contract.processes import ROOT

FAKES = """
from benchmarks.overhead import run_daemon
print(run_daemon(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
"""
STANDARD = """
from daemon.measure.job import Place, run_job
run = run_job(Place(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), cold=False)
at, count = run.published_at, len(run.published_at)
first, last = count // 4, count * 19 // 20
print(run.images_per_second, (last - first) / (at[last] - at[first]))
"""


def run_tree(tree: Path, program: str, *arguments: Path) -> list[float]:
    """Run a program with the code of a tree. Returns the rates that it prints, in images per second."""
    os.sync()  # otherwise each run waits for the disk to write what the previous one left
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", f"import sys, pathlib{program}", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(rate) for rate in done.stdout.splitlines()[-1].split()]


def main() -> None:
    # images: different ones of the standard job
    options = read_options(
        __doc__, "before", job="fakes", rounds=5, files=20_000, images=1000, folder=TEMPORARY
    )
    rates: dict[str, list[list[float]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory(prefix="visiond-pairs-") as folder:
        trees: dict[str, Path] = {"before": Path(options.before).absolute(), "now": Path(ROOT)}
        if not trees["before"].is_dir():
            trees["before"] = Path(folder)
            archive = subprocess.Popen(["git", "-C", ROOT, "archive", options.before], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", folder], stdin=archive.stdout, check=True)
            assert archive.wait() == 0, f"there is no commit {options.before}"
        if options.job == "standard":
            place = Place(options.folder / "bench")
            place.make_pack()
            images = place.make_images(options.images)
            inbox = place.make_inbox(images, options.files // options.images)
            for tree in trees.values():
                run_tree(tree, STANDARD, place.folder, images[0].parent)
        for number in range(options.rounds):
            for name in sorted(trees, reverse=number % 2 == 1):
                if options.job == "standard":
                    rate = run_tree(trees[name], STANDARD, place.folder, inbox)
                else:
                    with work_folder(options.folder) as work:
                        make_files(work / "inbox", options.files, number)
                        rate = run_tree(trees[name], FAKES, work / "inbox", work)
                rates[name].append(rate)
                print(
                    f"round {number + 1}, {name}: {', '.join(f'{part:,.1f}' for part in rate)} images/s",
                    flush=True,
                )
    print(f"{options.job}, {options.files:,} files, {options.rounds} pairs")
    for part, what in enumerate(("whole", "middle")[: len(rates["now"][0])]):
        now, then = ([rate[part] for rate in rates[name]] for name in ("now", "before"))
        ratios = [ours / theirs for ours, theirs in zip(now, then, strict=True)]
        middles = f"before {statistics.median(then):,.1f}/s, now {statistics.median(now):,.1f}/s"
        print(f"{what}: {middles}; now by before {spread(ratios, 3)}")


if __name__ == "__main__":
    main()
