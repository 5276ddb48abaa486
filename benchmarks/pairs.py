"""Compares the rate of this tree with that of an earlier one, in turns on the same machine.

    python -m benchmarks.pairs v0.1.0 --rounds 5                      fake stages: the cost of the daemon itself
    python -m benchmarks.pairs v0.1.0 --rounds 5 --job standard       the standard job; on a GPU
    python -m benchmarks.pairs /path/to/an/older/tree …               a folder instead of a commit

Prints each round when it ends, then the median, the minimum and the maximum ratio of the pairs. The two trees
take turns in starting a round. Before the standard job, each tree processes a few images, so that it does not
compile its kernels in a round. The standard job has two rates: that of the whole run, from the first loaded
worker to the last sidecar, which depends on when the other workers have loaded; and that of the middle, from
a quarter of the images to 95 %.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import TEMPORARY, make_files, read_options, spread, work_folder
from daemon.measure.place import Place

ROOT = Path(__file__).parent.parent
FAKES = """
import sys, pathlib
from benchmarks.overhead import run_daemon
print(run_daemon(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
"""
STANDARD = """
import sys, pathlib
try:
    from daemon.measure.job import Place, run_job
except ModuleNotFoundError:  # an earlier tree
    try:
        from daemon.bench.job import Place, run_job
    except ModuleNotFoundError:  # as in 0.1.0
        from daemon.bench import Place, run_job
run = run_job(Place(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), cold=False)
at, count = run.published_at, len(run.published_at)
first, last = count // 4, count * 19 // 20
print(run.images_per_second, (last - first) / (at[last] - at[first]))
"""


@contextlib.contextmanager
def open_tree(name: str) -> Iterator[Path]:
    """Yield a folder unchanged, or a commit in a temporary folder."""
    if Path(name).is_dir():
        yield Path(name).absolute()
        return
    archive = subprocess.run(["git", "-C", ROOT, "archive", name], stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="visiond-pairs-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def run_tree(tree: Path, program: str, *arguments: Path) -> list[float]:
    """Run a program with the code of a tree in a separate process. Returns the rates that it prints,
    in images per second."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    output = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [float(rate) for rate in output.splitlines()[-1].split()]


def run_fakes(tree: Path, folder: Path, files: int, number: int) -> list[float]:
    """Run fake stages over small, new files."""
    with work_folder(folder) as work:
        make_files(work / "inbox", files, number)
        os.sync()
        return run_tree(tree, FAKES, work / "inbox", work)


def run_standard(tree: Path, place: Place, inbox: Path) -> list[float]:
    """Run the real stages, with a pack that both trees use.
    Returns the rates of the whole run and of its middle."""
    os.sync()  # otherwise each run waits for the disk to write what the previous one left
    return run_tree(tree, STANDARD, place.folder, inbox)


def main() -> None:
    # images: different ones of the standard job
    options = read_options(
        __doc__, "before", job="fakes", rounds=5, files=20_000, images=1000, folder=TEMPORARY
    )
    assert options.job in ("fakes", "standard")
    rates: dict[str, list[list[float]]] = {"before": [], "now": []}
    with open_tree(options.before) as before:
        trees = {"before": before, "now": ROOT}
        if options.job == "standard":
            place = Place(options.folder / "bench")
            place.make_pack()
            images = place.make_images(options.images)
            inbox = place.make_inbox(images, options.files // options.images)
            for name, tree in trees.items():
                print(
                    f"to compile its kernels, {name}: {show(run_standard(tree, place, images[0].parent))}",
                    flush=True,
                )
        for number in range(options.rounds):
            for name in sorted(trees, reverse=number % 2 == 1):
                if options.job == "standard":
                    rate = run_standard(trees[name], place, inbox)
                else:
                    rate = run_fakes(trees[name], options.folder, options.files, number)
                rates[name].append(rate)
                print(f"round {number + 1}, {name}: {show(rate)}", flush=True)
    print(f"{options.job}, {options.files:,} files, {options.rounds} pairs")
    for part, what in enumerate(("whole", "middle")[: len(rates["now"][0])]):
        now, then = ([rate[part] for rate in rates[name]] for name in ("now", "before"))
        print(compare(what, now, then))


def show(rate: Sequence[float]) -> str:
    return " and ".join(f"{part:,.1f}" for part in rate) + " images/s"


def compare(what: str, now: Sequence[float], then: Sequence[float]) -> str:
    """The median rates, and the median, minimum and maximum ratio of the pairs."""
    ratios = [ours / theirs for ours, theirs in zip(now, then, strict=True)]
    middles = f"before {statistics.median(then):,.1f}/s, now {statistics.median(now):,.1f}/s"
    return f"{what}: {middles}; now by before {spread(ratios, 3)}"


if __name__ == "__main__":
    main()
