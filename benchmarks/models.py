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

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from benchmarks.architectures import ARCHITECTURES
from benchmarks.harness import read_options
from daemon.layout.models import natural_dtype
from daemon.measure.models import CPU_BATCHES, GPU_BATCHES, IMAGES, RateRequest, measure
from daemon.measure.place import Place, make_once
from daemon.system.gpus import list_gpus
from stages.contract.base import StageSpec
from stages.weights.packs import open_pack, resolve

OPTIONS = {"blip": {"force_tokens": 20}, "ocr": {"max_new_tokens": 256}}
MAKERS = 4  # processes that make weights at once
HEAD = "| model | images/s | at batch | original library | times as fast | GB | load, s |"
LINE = "\n|---|---|---|---|---|---|---|"


def main() -> None:
    # stock_best: measure the original library at its best batch size, not at ours; alone: only visiond
    given = read_options(
        __doc__,
        folder=Path("bench"),
        only="",
        batches=[0],
        seconds=3.0,
        dtype="",
        stock_best=False,
        alone=False,
    )
    only = set(filter(None, given.only.split(",")))
    gpus = list_gpus()[:1]
    device = gpus[0].device if gpus else "cpu"
    images = [str(path) for path in Place(given.folder).make_images(IMAGES)]
    sizes = tuple(filter(None, given.batches)) or (GPU_BATCHES if gpus else CPU_BATCHES)
    with ProcessPoolExecutor(MAKERS, get_context("spawn")) as pool:  # before anything is measured
        made = {
            (stage, name): pool.submit(make_model, stage, name, given.folder / name)
            for stage, models in ARCHITECTURES.items()
            for name in models
            if not only or name in only
        }
    print(HEAD + LINE, flush=True)
    for (stage, name), folder in made.items():
        spec = describe(stage, folder.result(), given.folder, given.dtype or natural_dtype(gpus))
        order = RateRequest(spec, device, images, sizes, given.seconds)
        print(describe_rates(name, order, alone=given.alone, at_its_best=given.stock_best), flush=True)


def make_model(stage: str, name: str, folder: Path) -> Path:
    return make_once(folder, ARCHITECTURES[stage][name])


def describe(stage: str, folder: Path, models: Path, dtype: str) -> StageSpec:
    settings = {"dtype": dtype, "options": OPTIONS.get(stage, {})}
    if stage == "clip":
        settings["options"] = {"labels": [f"thing {number}" for number in range(100)]}
    return resolve(open_pack(folder, models), stage, settings)


def describe_rates(name: str, order: RateRequest, *, alone: bool, at_its_best: bool = False) -> str:
    """A line of the table. at_its_best: whether the original library may choose another batch size than ours."""
    ours = measure(order)
    if not (best := ours.best):
        return f"| {name} | {ours.problem} | | | | | |"
    stock, times = "", ""
    if not alone:
        sizes = order.batch_sizes if at_its_best else (best.batch_size,)
        theirs = measure(msgspec.structs.replace(order, batch_sizes=sizes), "benchmarks.stock")
        stock = f"{theirs.best.images_per_second:,.4g}" if theirs.best else theirs.problem
        if theirs.best and at_its_best:
            stock += f" at {theirs.best.batch_size}"
        times = f"{best.images_per_second / theirs.best.images_per_second:.1f}" if theirs.best else ""
    own = f"{best.images_per_second:,.4g} | {best.batch_size}"
    return f"| {name} | {own} | {stock} | {times} | {ours.memory_bytes / 1e9:.1f} | {ours.load_seconds:.1f} |"


if __name__ == "__main__":
    main()
