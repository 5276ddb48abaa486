"""The rates of models in visiond and in the original library, on the first GPU (or the CPU).

    python -m benchmarks.models --folder /tmp/models
    python -m benchmarks.models --folder /tmp/models --only clip-b32,qwen3-vl-2b --seconds 1

The models have the sizes of the published ones and random weights. Captions have exactly 20 tokens, and pages up to 256.
Each model is measured as by `visiond bench --models`, and then with the original library: transformers, or ultralytics for
YOLO, used as its documentation shows, with the image processor on the CPU and the whole batch at once. Images are decoded
before the clock starts: for visiond to the device, because its decoder puts them there, and for the original library to host
memory. Prints a Markdown table, one row as soon as each model is measured.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from benchmarks.architectures import ARCHITECTURES
from daemon.bench.job import Place, make_once
from daemon.bench.models import CPU_BATCHES, GPU_BATCHES, IMAGES, Order, measure
from daemon.layout import natural_dtype
from daemon.system.gpus import list_gpus
from stages.base import StageSpec
from stages.weights.packs import open_pack, resolve

OPTIONS = {"blip": {"force_tokens": 20}, "ocr": {"max_new_tokens": 256}}
MAKERS = 4  # processes that make weights at once
HEAD = "| model | images/s | at batch | original library | times as fast | GB | load, s |\n|---|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("bench"), help="folder where weights and images are created"
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--batches", type=int, nargs="*", help="batch sizes to try")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="minimum duration of each measurement, in seconds"
    )
    parser.add_argument("--dtype", default="", help="for example int8")
    parser.add_argument("--alone", action="store_true", help="measure only visiond")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    gpus = list_gpus()[:1]
    device = gpus[0].device if gpus else "cpu"
    images = [str(path) for path in Place(given.folder).make_images(IMAGES)]
    sizes = tuple(given.batches or (GPU_BATCHES if gpus else CPU_BATCHES))
    with ProcessPoolExecutor(MAKERS, get_context("spawn")) as pool:  # before anything is measured
        made = {
            (stage, name): pool.submit(make_model, stage, name, given.folder / name)
            for stage, models in ARCHITECTURES.items()
            for name in models
            if not only or name in only
        }
    print(HEAD, flush=True)
    for (stage, name), folder in made.items():
        spec = describe(stage, folder.result(), given.folder, given.dtype or natural_dtype(gpus))
        order = Order(spec, device, images, sizes, given.seconds)
        print(describe_rates(name, order, alone=given.alone), flush=True)


def make_model(stage: str, name: str, folder: Path) -> Path:
    return make_once(folder, ARCHITECTURES[stage][name])


def describe(stage: str, folder: Path, models: Path, dtype: str) -> StageSpec:
    settings = {"dtype": dtype, "options": OPTIONS.get(stage, {})}
    if stage == "clip":
        settings["options"] = {"labels": [f"thing {number}" for number in range(100)]}
    return resolve(open_pack(folder, models), stage, settings)


def describe_rates(name: str, order: Order, *, alone: bool) -> str:
    """A line of the table."""
    ours = measure(order)
    if not (best := ours.best):
        return f"| {name} | {ours.problem} | | | | | |"
    stock, times = "", ""
    if not alone:
        theirs = measure(msgspec.structs.replace(order, batch_sizes=(best.batch_size,)), "benchmarks.stock")
        stock = f"{theirs.best.images_per_second:,.4g}" if theirs.best else theirs.problem
        times = f"{best.images_per_second / theirs.best.images_per_second:.1f}" if theirs.best else ""
    own = f"{best.images_per_second:,.4g} | {best.batch_size}"
    return f"| {name} | {own} | {stock} | {times} | {ours.memory_bytes / 1e9:.1f} | {ours.load_seconds:.1f} |"


if __name__ == "__main__":
    main()
