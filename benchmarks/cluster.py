"""The overhead of `visiond ray run`.

    python -m benchmarks.cluster plain  [--images 40000] [--rounds 3]
    python -m benchmarks.cluster standard [--images 1000] [--repeat 10] [--rounds 3] [--folder bench] [--pack mini]

plain: fake stages, beside a plain pipeline of Ray Data with the same class in its actor: read_binary_files,
map_batches, write_parquet. Both are timed from the first call to the last file, with the start of the actors.
standard: the standard job of `visiond bench`, beside `visiond run --once`, on all GPUs that CUDA_VISIBLE_DEVICES leaves. It has
--images different images, each under --repeat names for each GPU. Both rates are those between the first tenth and the last
tenth of the images, by the time at which each was finished: the start of Ray or of the models is not in them. Kernels are
compiled in a first run of the daemon, which is not counted.
The two ways take turns, and the ratio of each round is printed: others may use this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from benchmarks.harness import read_options, spread
from daemon.config.loading import Config, parse
from daemon.measure.place import MachineInfo, Place
from stages.contract import processes
from tests.daemon_process import STAGES, picture
from visiond.cluster import running
from visiond.cluster.job import ClusterJob
from visiond.engine import Annotator

BATCH = 250  # images: of a plain batch, and of a part


class Plain:
    """What somebody would write without `visiond ray run`."""

    def __init__(self, config: str) -> None:
        self.annotator = Annotator(Config.model_validate_json(config))
        self.annotator.load()

    def __call__(self, table: Any) -> Any:
        names, data = (table.column(name).to_pylist() for name in ("path", "bytes"))
        return pyarrow.Table.from_pylist(self.annotator.annotate(zip(names, data, strict=True)))


def run_plain(config: Config, inbox: Path, output: Path) -> None:
    import ray.data

    ray.data.read_binary_files(str(inbox), include_paths=True).map_batches(
        Plain,
        fn_constructor_args=(config.model_dump_json(),),
        batch_size=BATCH,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    ).write_parquet(str(output))


def run_ours(config: Config, inbox: Path, output: Path) -> None:
    running.run(ClusterJob(str(inbox), str(output), config, chains=1, part_images=BATCH))


def compare(
    rounds: int, folder: Path, ours: Callable[[Path], float], theirs: Callable[[Path], float], name: str
) -> None:
    """Each takes a folder to write to, and returns images/s."""
    ratios = []
    for number in range(rounds):
        rates = {}
        for label, measure in ((name, theirs), ("visiond ray run", ours))[:: 1 if number % 2 else -1]:
            rates[label] = measure(folder / f"{label.replace(' ', '-')}-{number}")
        ratios.append(rates["visiond ray run"] / rates[name])
        listed = ", ".join(f"{label} {rate:,.1f}/s" for label, rate in sorted(rates.items()))
        print(f"round {number + 1}: {listed}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"ratio: {spread(ratios, 2)}")


def measure_plain(folder: Path, images: int, rounds: int) -> None:
    import ray
    import ray.data

    inbox = folder / "inbox"
    inbox.mkdir()
    for number in range(images):
        (inbox / f"{number:06d}.ppm").write_bytes(picture(number))
    config = parse({"stages": {name: {"backend": "fake"} for name in STAGES}}, folder)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": processes.environment()["PYTHONPATH"]}
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def timed(run: Callable[[Config, Path, Path], None]) -> Callable[[Path], float]:
        def measure(output: Path) -> float:
            began = time.perf_counter()
            run(config, inbox, output)
            seconds = time.perf_counter() - began
            files = output.glob("*.parquet")
            assert sum(pyarrow.parquet.read_metadata(file).num_rows for file in files) == images
            return images / seconds

        return measure

    timed(run_ours)(folder / "first")  # Ray's own first start is in neither
    compare(rounds, folder, timed(run_ours), timed(run_plain), "plain Ray Data")


def visiond(where: Path, *words: str) -> None:
    command = (sys.executable, "-P", "-m", "daemon", *words)
    subprocess.run(command, cwd=where, env=processes.environment(), check=True, stdout=2)


def measure_standard(folder: Path, place: Place, images: int, repeat: int, rounds: int) -> None:
    place.make_pack()
    inbox = place.make_inbox(place.make_images(images), repeat * max(1, len(MachineInfo.this().gpus)))

    def prepare(output: Path) -> Path:
        output.mkdir()
        place.prepare(inbox)
        return place.daemon_folder

    def ours(output: Path) -> float:
        visiond(prepare(output), "ray", "run", str(inbox), str(output / "rows"))
        return rate_of(output / "rows")

    def theirs(output: Path) -> float:
        where = prepare(output)
        visiond(where, "run", "--once")
        visiond(where, "export", str(output / "rows.parquet"))
        return rate_of(output / "rows.parquet")

    print(f"first run, not counted: the daemon {theirs(folder / 'first'):,.1f}/s", flush=True)
    compare(rounds, folder, ours, theirs, "the daemon")


def rate_of(place: Path) -> float:
    """Images/s between the first and the last tenth of the images, by their columns finished_at."""
    files = sorted(place.glob("part-*.parquet")) if place.is_dir() else [place]
    columns = [pyarrow.parquet.read_table(file, columns=["finished_at"]).column(0) for file in files]
    times = sorted(moment.timestamp() for column in columns for moment in column.to_pylist())
    first, last = len(times) // 10, len(times) * 9 // 10
    return float((last - first) / (times[last] - times[first]))


def main() -> None:
    options = read_options(__doc__, "what", images=0, rounds=3, repeat=10, folder=Path("bench"), pack="")
    with tempfile.TemporaryDirectory(prefix="visiond-cluster-") as folder:
        if options.what == "plain":
            measure_plain(Path(folder), options.images or 40_000, options.rounds)
        else:
            place = Place(options.folder, options.pack)
            measure_standard(Path(folder), place, options.images or 1000, options.repeat, options.rounds)


if __name__ == "__main__":
    main()
