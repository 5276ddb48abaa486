"""Labelled images, and trainings of small models on them, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import ExifTags, Image
from safetensors.numpy import load_file

from stages.contract.base import Stage
from stages.contract.manifest import Manifest
from stages.registry.registry import build
from stages.weights.packs import Pack, resolve
from tests.forked import Forked
from visiond.training.data import Data
from visiond.training.job import DEFAULTS, STAGES, Task, TrainingJob, write_job
from visiond.training.launch import train
from visiond.training.run import run
from visiond.training.settings import TrainingPlace

COLORS = {"circle": (220, 20, 40), "tree": (30, 180, 60)}  # words that the small models know
CAPTIONS = {"circle": "w3 w4 w5", "tree": "w6 w7"}
END = " w28"  # the word that the small BLIP ends a caption with
IMAGES = 16
PATIENCE = 200  # seconds, of a training of a few steps on a busy machine
ONE = [TrainingPlace("", "the CPU")]


def draw_labelled(place: Path) -> Path:
    """Images with one square each, and their labels: coco.json, tags.csv and captions.csv. Each second one is stored turned by
    its EXIF orientation."""
    chance, images, annotations = np.random.default_rng(1), [], []
    tags, captions = ["file_name,tags"], ["file_name,caption"]
    for number in range(IMAGES):
        name, color = [*COLORS.items()][number % 2]
        pixels = np.full((96, 144, 3), 90, np.uint8) + chance.integers(0, 9, (96, 144, 3), np.uint8)
        side = int(chance.integers(24, 48))
        x, y = int(chance.integers(0, 144 - side)), int(chance.integers(0, 96 - side))
        pixels[y : y + side, x : x + side] = color
        image, exif = Image.fromarray(pixels), Image.Exif()
        if number % 2:
            image, exif[ExifTags.Base.Orientation] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(place / f"{number}.png", exif=exif)
        images.append({"id": number, "file_name": f"{number}.png", "width": 144, "height": 96})
        annotations.append({"image_id": number, "category_id": number % 2, "bbox": [x, y, side, side]})
        tags.append(f"{number}.png,{name}")
        captions.append(f"{number}.png,{CAPTIONS[name]}")
    categories = [{"id": n, "name": name} for n, name in enumerate(COLORS)]
    said = {"images": images, "annotations": annotations, "categories": categories}
    (place / "coco.json").write_text(json.dumps(said))
    (place / "tags.csv").write_text("\n".join(tags))
    (place / "captions.csv").write_text("\n".join(captions))
    return place


def make_job(base: Path, work: Path, task: Task = "detector", **changes: object) -> TrainingJob:
    settings = msgspec.structs.replace(
        DEFAULTS[task],
        **{"batch_size": 4, "epochs": 0, "steps": 4, "log_every": 1, "checkpoint_every": 1, **changes},
    )
    return TrainingJob(
        task=task, base=str(base), base_name="small", out=f"{work}-out", work=str(work), settings=settings
    )


def train_now(job: TrainingJob, data: Data, places: Sequence[TrainingPlace] = ONE) -> dict[str, np.ndarray]:
    """The weights. What one process trains on the CPU is trained in this one, which has imported everything."""
    if places == ONE and not torch.cuda.is_available():
        run(write_job(job, data), lambda _: None)
    else:
        train(job, data, places, lambda _: None)
    return load_file(Path(job.out) / "model.safetensors")


def start_forked(command: Sequence[str], output: Path, environment: Mapping[str, str], _: int = 0) -> Forked:
    """As `start_child` of visiond.training.children, for `python -P -c PROGRAM ...` and without the lock: imports are
    most of what a process of a small training does, and this one begins with them."""
    program, *arguments = command[command.index("-c") + 1 :]
    with output.open("wb") as file:
        return Forked(arguments, Path.cwd(), environment, file, file, session=True, program=program)


def load_stage(folder: Path, task: Task, **options: object) -> Stage:
    """The stage with the model in a folder, as `model =` takes it."""
    nothing = Pack(folder, Manifest(name="none"), folder.parent, folder.parent, base=folder)
    stage = build(resolve(nothing, STAGES[task], {"model": str(folder), "options": options}), "cpu")
    stage.load()
    return stage
