"""The rate of `visiond train` on one GPU and on several, with models of published sizes and random weights.

    python -m benchmarks.training --gpus 1 2 --model rf-detr-small    on GPUs
    python -m benchmarks.training --gpus 1 --model clip-b32 --batch 64 --images 64 --steps 4 --head-only      on a CPU

Trains on drawn scenes, whose truth is their label, with the same batch for each GPU; nothing is held out. The images are read,
decoded and resized as in any training. The rate is the median of the log's lines after the first fifth of the steps.
"""

from __future__ import annotations

import hashlib
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.architectures import ARCHITECTURES
from benchmarks.harness import TEMPORARY, read_options, work_folder
from daemon.core.labels import Kind, ObjectLabel
from daemon.system.gpus import list_gpus
from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH, read_truth
from visiond.training.data import Data, LabelledImage, split
from visiond.training.job import DEFAULTS, KINDS, STAGES, Task, TrainingJob
from visiond.training.launch import train
from visiond.training.log import read_log
from visiond.training.settings import LOG, TrainingPlace


def label_scenes(folder: Path, count: int, kind: Kind) -> Data:
    write_samples(folder, count, seed=1)
    samples = []
    for truth in read_truth(folder / TRUTH):
        file = folder / truth.file
        objects = [ObjectLabel(each.label, tuple(map(float, each.box))) for each in truth.objects]  # type: ignore[arg-type]
        words = truth.tags if kind is Kind.TAGS else truth.captions[:1]
        said = (objects, []) if kind is Kind.OBJECTS else ([], words)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        samples.append(LabelledImage(str(file), digest, truth.width, truth.height, *said))
    return split(kind, samples, Counter(), share=0)


def find_task(model: str) -> Task:
    return next(task for task, stage in STAGES.items() if model in ARCHITECTURES[stage])


def measure(
    options: Namespace, task: Task, data: Data, base: Path, work: Path, places: Sequence[TrainingPlace]
) -> dict[str, Any]:
    """Of one training: images/s, memory of a GPU in bytes, and the examples at once."""
    settings = msgspec.structs.replace(
        DEFAULTS[task],
        batch_size=options.batch * len(places),
        steps=options.steps,
        epochs=0,
        log_every=max(options.steps // 20, 1),
        checkpoint_every=0,
        precision=options.precision,
    )
    job = TrainingJob(
        task=task,
        base=str(base),
        base_name=options.model,
        out=str(work / "out"),
        work=str(work),
        settings=settings,
        head_only=options.head_only,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    train(job, data, places, lambda text: print(f"  {text}", flush=True))
    entries = [entry for entry in read_log(work / LOG) if entry["step"] > options.steps / 5]
    return {
        "rate": statistics.median(entry["images_per_second"] for entry in entries),
        "memory": max(entry["memory_bytes"] for entry in entries),
        "micro_batch": entries[-1]["micro_batch"],
    }


def main() -> None:
    options = read_options(
        __doc__,
        gpus=[1, 2],
        model="rf-detr-small",
        images=1024,
        batch=16,
        steps=100,
        precision="auto",
        head_only=False,
        gradient_checkpointing=False,
        temporary=str(TEMPORARY),
    )
    gpus = [TrainingPlace(gpu.uuid, f"GPU {gpu.number} ({gpu.name})") for gpu in list_gpus()]
    if gpus and max(options.gpus) > len(gpus):
        raise SystemExit(f"there are {len(gpus)} GPUs here: --gpus {max(options.gpus)} needs more.")
    with work_folder(Path(options.temporary)) as folder:
        task = find_task(options.model)
        data = label_scenes(folder / "images", options.images, KINDS[task])
        ARCHITECTURES[STAGES[task]][options.model](folder / "base")
        rates: dict[int, float] = {}
        for count in options.gpus:
            places = gpus[:count] or [TrainingPlace("", "CPU")] * count
            print(f"{count} × {places[0].name}, {options.batch} images each", flush=True)
            found = measure(options, task, data, folder / "base", folder / f"work-{count}", places)
            rates[count] = found["rate"]
            print(
                f"{count} × {places[0].name}: {found['rate']:.1f} images/s, {found['memory'] / (1 << 30):.1f} GiB each, "
                f"{found['micro_batch']} at once, {found['rate'] / rates[options.gpus[0]]:.2f} × the first",
                flush=True,
            )


if __name__ == "__main__":
    main()
