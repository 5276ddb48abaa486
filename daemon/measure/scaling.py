"""`visiond bench --gpus 1,2,4,8`: the standard job on several numbers of GPUs of one machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.hints import quantity
from daemon.layout.layout import Layout
from daemon.measure.job import Print, Run, representative, run_job, time_one_at_a_time
from daemon.measure.place import Place, Report, describe_run
from daemon.system.gpus import Gpu, list_gpus

REPLICATED, PIPELINED = "replicated", "pipelined"


Section = Mapping[str, Any]

# What is compared: a section of the sidecar, and how its answer is read. A stage that is not in use has no section. Scores
# and other figures are left out: in half precision they depend a little on the batch.
ASPECTS: dict[str, tuple[str, Callable[[Section], object]]] = {
    "texts": ("ocr", lambda ocr: [line["text"] for line in ocr["lines"]]),
    "text boxes": ("ocr", lambda ocr: [line["box"] for line in ocr["lines"]]),
    "objects": ("objects", lambda objects: sorted(found["label"] for found in objects["detections"])),
    "tags": ("clip", lambda clip: [tag["label"] for tag in clip["tags"]]),
    "captions": ("caption", lambda caption: caption["text"]),
    "bins": ("bin", lambda bin: bin["name"]),
}


class Agreement(msgspec.Struct, frozen=True):
    """How many images were compared, and for how many of them each aspect of the answers is different."""

    images: int
    different: dict[str, int]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The job on a number of GPUs with a placement; rates are the medians of the runs, in images per second."""

    gpus: int  # 0: the CPU
    placement: str
    images: int  # of one run
    whole: float  # from the first loaded worker to the last sidecar
    least: float  # of `whole`, in all runs
    most: float
    middle: float  # of the steady part, the middle 70 % of the images
    times: float  # `whole`, compared with the first number of GPUs
    busy: float | None  # load of the GPUs in the middle, 0..1
    one_at_a_time: float  # one image at a time, in a process for each GPU
    # Seconds from the first loaded worker to the first image, and to a quarter, a half, three quarters and all of them.
    quarters: list[float]
    agreement: Agreement  # with the first point


class Scaling(Report, frozen=True, kw_only=True):
    pack: str
    points: list[Point]


def measure_scaling(
    bench: Place,
    numbers: Sequence[int],
    count: int,
    *,
    repeat: int,
    cold: int,
    warm: int,
    sample: int,
    progress: Print,
) -> Scaling:
    """numbers: of GPUs; 0 is the CPU. repeat: names of each image for each GPU, so that all runs take as long.

    Raises WrongArgument if the machine has fewer GPUs.
    """
    gpus = list_gpus()
    if max(numbers) > len(gpus):
        raise WrongArgument(
            f"--gpus names {max(numbers)}, but this machine has {quantity(len(gpus), 'GPU')}; 0 measures the CPU."
        )
    points: list[Point] = []
    first: dict[str, tuple[object, ...]] = {}
    alone: dict[int, float] = {}  # by number of GPUs, the rate of one image at a time
    for number in numbers:
        for placement in [REPLICATED, PIPELINED] if number > 1 else [REPLICATED]:
            place = bench.with_settings(choose(gpus[:number], placement))
            progress(f"{describe(number)}, {placement}: images and weights")
            place.make_pack()
            images = place.make_images(count)
            inbox = place.make_inbox(images, repeat * max(number, 1))
            runs: list[Run] = []
            for is_cold in [True] * (cold if not points else 0) + [False] * warm:
                progress(f"{describe(number)}, {placement}: run {len(runs) + 1}")
                runs.append(run_job(place, inbox, cold=is_cold))
            answers = read_answers(place.daemon_folder / "results")
            first = first or answers
            progress(f"{describe(number)}: one image at a time")
            if number not in alone:
                alone[number] = time_side_by_side(place, images[: 1 + sample], gpus[:number])
            agreement = compare_answers(first, answers)
            point = summarize(number, placement, representative(runs), alone[number], points, agreement)
            points.append(point)
            # Shown now, because the whole table may take hours, and a later run may fail.
            progress(
                f"{describe(number)}, {placement}: {point.whole:.1f} images/s, {point.times:.2f} times the first; "
                f"seconds until the first image, and each quarter: {', '.join(f'{at:.1f}' for at in point.quarters)}"
            )
    return Scaling(**describe_run(), pack=bench.pack, points=points)


def choose(gpus: Sequence[Gpu], placement: str) -> list[str]:
    """Lines for the table [pipeline]."""
    devices = [gpu.device for gpu in gpus] or ["cpu"]
    return [f"devices = {json.dumps(devices)}", f"placement = {json.dumps(placement)}"]


def describe(number: int) -> str:
    return quantity(number, "GPU") if number else "CPU"


def summarize(
    number: int,
    placement: str,
    runs: Sequence[Run],
    one_at_a_time: float,
    before: Sequence[Point],
    agreement: Agreement,
) -> Point:
    """before: the points so far; the first one is what this is compared with."""
    rates = [run.images_per_second for run in runs]
    whole = statistics.median(rates)
    loads = [run.steady.gpu_busy for run in runs if number and run.steady.gpu_busy is not None]
    return Point(
        gpus=number,
        placement=placement,
        images=len(runs[0].published_at),
        whole=whole,
        least=min(rates),
        most=max(rates),
        middle=statistics.median(run.steady.images_per_second for run in runs),
        times=whole / before[0].whole if before else 1.0,
        busy=statistics.median(loads) if loads else None,
        one_at_a_time=one_at_a_time,
        quarters=[statistics.median(at) for at in zip(*map(find_quarters, runs), strict=True)],
        agreement=agreement,
    )


def find_quarters(run: Run) -> list[float]:
    """As Point.quarters."""
    last = len(run.published_at) - 1
    return [run.published_at[last * part // 4] - run.load_seconds for part in range(5)]


def time_side_by_side(place: Place, images: Sequence[Path], gpus: Sequence[Gpu]) -> float:
    """Images per second, one image at a time, of a process for each GPU; all of them work at once."""
    layout = Layout.of(place.prepare(images[0].parent))  # once: it verifies the weights
    seen = [{"CUDA_VISIBLE_DEVICES": gpu.uuid} for gpu in gpus] or [{"CUDA_VISIBLE_DEVICES": ""}]
    with ThreadPoolExecutor(len(seen)) as threads:
        timings = threads.map(lambda only: time_one_at_a_time(layout, images, only), seen)
        return sum(timing.images_per_second for timing in timings)


def read_answers(results: Path) -> dict[str, tuple[object, ...]]:
    """The answers of all images whose sidecars are in a folder, by name."""
    answers = {}
    for file in results.glob("*.json"):
        sidecar = msgspec.json.decode(file.read_bytes())
        answers[file.name] = tuple(
            aspect(sidecar[section]) if sidecar.get(section) else None for section, aspect in ASPECTS.values()
        )
    return answers


def compare_answers(
    some: Mapping[str, tuple[object, ...]], others: Mapping[str, tuple[object, ...]]
) -> Agreement:
    """Compare the answers of the images that both have."""
    names = some.keys() & others.keys()
    different = {
        aspect: sum(some[name][index] != others[name][index] for name in names)
        for index, aspect in enumerate(ASPECTS)
    }
    return Agreement(len(names), different)
