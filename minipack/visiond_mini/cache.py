"""Draws scenes once, on all cores, and stores them: squares for CLIP and BLIP, and a dataset folder for ultralytics.

Most are drawn in miniature, which is fast. Some are drawn in full size and compressed as files,
as the models will get them in use, so that they learn both.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import cv2
import msgspec
import numpy as np
from PIL import Image, ImageOps

from stages.contract.processes import count_cores, die_with
from stages.scenes.composition import RECIPES, compose_crowded
from stages.scenes.drawing import COLORS, Pixels
from stages.scenes.generator import encode_scene, make_scene
from stages.scenes.shapes import LABELS
from stages.scenes.truth import TEXT_KINDS, Truth
from visiond_mini.examples import PIXELS, Example, Spot, open_pixels, squeeze, write_lines

CHUNK = 64  # scenes that a process makes between two checks of the time
VALIDATED_EVERY = 100  # one scene in this many is for ultralytics' own validation
PADDING = 114  # ultralytics' gray

CROWDED = 3.5  # times as often as in the samples: what is hard to learn needs more
LESSON_TOTALS = tuple(
    itertools.accumulate(
        recipe.weight * (CROWDED if recipe.compose is compose_crowded else 1.0) for recipe in RECIPES
    )
)

# The longest side of a drawn scene, and its share; None is full size. The detector gets more large ones,
# because its images are resized without antialiasing at inference.
SIDES: Sequence[tuple[int | None, float]] = ((320, 0.75), (640, 0.17), (None, 0.08))
DETECTOR_SIDES: Sequence[tuple[int | None, float]] = ((320, 0.4), (640, 0.3), (None, 0.3))


@dataclass(frozen=True)
class CachePlan:
    """What to make. seconds: when to stop, even if there are fewer scenes; 0: no limit.

    detector_scenes: the number of scenes that are also put into the detector's folder.
    """

    folder: Path
    seed: int
    scenes: int
    edge: int
    detector_scenes: int
    detector_edge: int
    seconds: float = 0

    @property
    def detector_folder(self) -> Path:
        return self.folder / "detector"


def write_cache(plan: CachePlan, progress: Callable[[int], None] = lambda _: None) -> int:
    """Make the scenes 0, 1, … of the plan's seed. Returns their number.
    progress: called with the number so far."""
    open_pixels(plan.folder, plan.scenes, plan.edge)
    open_dataset(plan.detector_folder, train="train")
    lines: list[bytes] = []
    for chunk in map_chunks(plan):
        lines += chunk
        progress(len(lines))
    write_lines(plan.folder, lines)
    return len(lines)


def open_dataset(folder: Path, train: str) -> None:
    """Make an empty dataset for ultralytics. train: the part to train on; "val" always exists."""
    for kind in ("images", "labels"):
        for split in {train, "val"}:
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
    names = "\n".join(f"  {number}: {label}" for number, label in enumerate(LABELS))
    (folder / "data.yaml").write_text(
        f"path: {folder.absolute()}\ntrain: images/{train}\nval: images/val\nnames:\n{names}\n"
    )


def map_chunks(plan: CachePlan) -> Iterator[list[bytes]]:
    """The chunks in order, made by one process for each core, until all are made or the time is up."""
    began = time.monotonic()
    starts = iter(range(0, plan.scenes, CHUNK))
    processes = min(count_cores(), -(-plan.scenes // CHUNK))
    context = multiprocessing.get_context("spawn")  # a process that has touched CUDA must not fork
    with ProcessPoolExecutor(processes, context, start_worker, (os.getpid(),)) as pool:
        waiting: list[Future[list[bytes]]] = []
        for _ in range(2 * processes):
            waiting += [
                pool.submit(write_chunk, plan, start) for start in [next(starts, None)] if start is not None
            ]
        while waiting:
            yield waiting.pop(0).result()
            start = next(starts, None)
            if start is not None and not (plan.seconds and time.monotonic() - began > plan.seconds):
                waiting.append(pool.submit(write_chunk, plan, start))


def start_worker(parent: int) -> None:
    die_with(parent)
    cv2.setNumThreads(1)


def write_chunk(plan: CachePlan, start: int) -> list[bytes]:
    """The examples of CHUNK scenes as lines; writes their pixels."""
    pixels = np.load(plan.folder / PIXELS, mmap_mode="r+")
    lines = []
    for index in range(start, min(start + CHUNK, plan.scenes)):
        detected = index < plan.detector_scenes
        scene, truth = draw(plan.seed, index, DETECTOR_SIDES if detected else SIDES)
        pixels[index] = squeeze(scene, plan.edge)
        # A detector learns little from pages without objects; a third of them is enough.
        if detected and (truth.objects or truth.kind not in TEXT_KINDS or index % 3 == 0):
            write_detected(plan, index, scene, truth)
        lines.append(msgspec.json.encode(tell_example(truth, Random(f"captions {plan.seed} {index}"))))
    return lines


def draw(seed: int, index: int, sides: Sequence[tuple[int | None, float]]) -> tuple[Pixels, Truth]:
    """A training scene of one of these sizes. A scene of full size is encoded as a file and decoded again."""
    choices, weights = zip(*sides, strict=True)
    side = Random(f"side {seed} {index}").choices(choices, weights)[0]
    scene = make_scene(seed, index, side, LESSON_TOTALS)
    if side is not None:
        return scene.pixels, scene.truth
    return read_upright(encode_scene(scene)[1]), scene.truth


def read_upright(data: bytes) -> Pixels:
    """A file's pixels, uint8 [height, width, 3], with its EXIF orientation applied."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def write_detected(plan: CachePlan, index: int, scene: Pixels, truth: Truth) -> None:
    """One image and its labels on the detector's canvas."""
    split = "val" if index % VALIDATED_EVERY == 0 else "train"
    canvas, ratio, left, top = fit_square(scene, plan.detector_edge)
    image = plan.detector_folder / "images" / split / f"{index:06}.jpg"
    cv2.imwrite(str(image), cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 95])
    boxes = [np.array(thing.box) * ratio + (left, top, left, top) for thing in truth.objects]
    lines = [
        label_line(thing.label, box, *canvas.shape[1::-1])
        for thing, box in zip(truth.objects, boxes, strict=True)
    ]
    (plan.detector_folder / "labels" / split / f"{index:06}.txt").write_text("\n".join(lines))


def fit_square(pixels: Pixels, edge: int) -> tuple[Pixels, float, int, int]:
    """As the detector's letterbox, but always a square. Returns the canvas, the scale and the image's corner."""
    height, width = pixels.shape[:2]
    ratio = min(edge / height, edge / width)
    size = (round(width * ratio), round(height * ratio))
    canvas = np.full((edge, edge, 3), PADDING, np.uint8)
    left, top = (edge - size[0]) // 2, (edge - size[1]) // 2
    canvas[top : top + size[1], left : left + size[0]] = cv2.resize(
        pixels, size, interpolation=cv2.INTER_LINEAR
    )
    return canvas, ratio, left, top


def label_line(label: str, box: Iterable[float], width: int, height: int) -> str:
    """One object in YOLO's text format: class, center and size as fractions of the image's sides."""
    x0, y0, x1, y1 = box
    figures = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height)
    return " ".join([str(LABELS.index(label)), *(f"{figure:.6f}" for figure in figures)])


MOST_CAPTIONS = 4  # of all true ones; four groups of objects have sixty
COLOR_NAMES = tuple(COLORS)


def tell_example(truth: Truth, rng: Random) -> Example:
    others = truth.captions[1:]
    captions = [truth.captions[0], *rng.sample(others, min(len(others), MOST_CAPTIONS - 1))]
    counts = Counter((thing.color, thing.label) for thing in truth.objects)
    spots = []
    for thing in truth.objects:
        x0, y0, x1, y1 = thing.box
        x, y = (x0 + x1) / 2 / truth.width, (y0 + y1) / 2 / truth.height
        color = COLOR_NAMES.index(thing.color)
        count = counts[thing.color, thing.label]
        spots.append(Spot(LABELS.index(thing.label), color, count, round(x, 4), round(y, 4)))
    mirror = truth.kind not in TEXT_KINDS
    return Example(min(truth.captions), captions, share_tags(truth), spots, mirror)


def share_tags(truth: Truth) -> dict[str, float]:
    """The weight of each true tag: objects by their area, the kind of a text scene more, and a backdrop less."""
    areas: Counter[str] = Counter()
    for thing in truth.objects:
        x0, y0, x1, y1 = thing.box
        areas[thing.label] += (x1 - x0) * (y1 - y0)
    rest = truth.tags[0 if truth.kind in TEXT_KINDS else -1]
    if not areas:
        return {rest: 1.0}
    share = 0.3 if truth.kind in TEXT_KINDS else 0.9
    total = sum(areas.values())
    return {rest: round(1 - share, 4)} | {
        label: round(share * area / total, 4) for label, area in areas.items()
    }
