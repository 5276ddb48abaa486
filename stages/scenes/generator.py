"""Synthetic scenes with their truth, one at a time or as folders of files.

    scene = make_scene(seed=1, index=0)        # pixels and truth
    write_samples(Path("inbox"), 200, seed=1)  # files, and .truth.jsonl beside them

The same seed and index give the same scene on the same library versions, whatever else is made before or at the same time.
Every scene keeps a distance from the thresholds of the binning rule, so that a few pixels never decide its bin.
"""

from __future__ import annotations

import bisect
import functools
import io
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

import cv2
import msgspec
from PIL import ExifTags, Image

from stages.contract.processes import count_cores
from stages.scenes.composition import RECIPES, Draft, Recipe, compose_poster
from stages.scenes.drawing import Pixels, add_camera, add_grain, add_light
from stages.scenes.truth import TEXT_KINDS, TRUTH, TrueLine, Truth, choose_bin, describe_photo, describe_text


@dataclass(frozen=True)
class Scene:
    """pixels: upright, uint8 [height, width, 3], RGB. format ("JPEG", "PNG", "WEBP") and quality: for the file."""

    pixels: Pixels
    truth: Truth
    format: str
    quality: int


TOTALS = tuple(itertools.accumulate(recipe.weight for recipe in RECIPES))


def choose_recipe(seed: int, index: int, totals: Sequence[float] = TOTALS) -> Recipe:
    """Steps of the golden ratio through the recipes: any range of scenes has nearly its share of each. totals: the sums of
    the shares."""
    turn = (Random(f"recipes {seed}").random() + index * 0.6180339887498949) % 1.0
    return RECIPES[bisect.bisect_right(totals, turn * totals[-1])]


RATIOS = (1.0, 5 / 4, 4 / 3, 4 / 3, 3 / 2, 3 / 2, 16 / 9)


def choose_size(rng: Random, kind: str) -> tuple[int, int]:
    """Width and height: 320..2000 px, text scenes 440 or more. Small ones are more frequent."""
    least = 440 if kind in TEXT_KINDS else 320
    ratio = rng.choice(RATIOS)
    long = 2000 * (least * ratio / 2000) ** rng.random()
    sides = (round(long), max(least, round(long / ratio)))
    upright = rng.random() < (0.85 if kind == "receipt" else 0.15 if kind == "slide" else 0.4)
    return sides[::-1] if upright else sides


def choose_format(rng: Random, kind: str, pixels: int) -> tuple[str, int]:
    """Pillow's name of the file format, and its quality. PNG and WebP, slow to write, are for small images."""
    quality = rng.randint(80, 95) if kind in TEXT_KINDS else rng.randint(70, 95)
    dice = rng.random()
    if dice < 0.16 and pixels < 700_000:
        return ("PNG", 0) if dice < 0.09 else ("WEBP", quality)
    return "JPEG", quality


def make_scene(seed: int, index: int, max_side: int | None = None, totals: Sequence[float] = TOTALS) -> Scene:
    """The scene of this seed and index; with max_side, in miniature, with the truth of that size.

    totals: of the mixture of recipes; by default that of the samples.
    """
    rng, recipe = Random(f"scene {seed} {index}"), choose_recipe(seed, index, totals)
    kind, is_text = recipe.kind, recipe.kind in TEXT_KINDS
    width, height = choose_size(rng, kind)
    format_, quality = choose_format(rng, kind, width * height)
    orientation = rng.randint(2, 8) if rng.random() < 0.35 else 1
    draft, scale = Draft(rng, width, height), min(1.0, (max_side or math.inf) / max(width, height))
    draft.scale = max(scale, draft.drawable_scale) if is_text else scale
    recipe.compose(draft)
    if scale < draft.scale:
        draft.shrink(scale)
    if rng.random() < 0.6:
        add_light(draft.pixels, rng)
    if format_ != "PNG":
        draft.pixels = add_camera(draft.pixels, rng, draft.scale, keep_text=is_text)
    name = f"{seed}-{index:06}-{kind.replace(' ', '-')}{SUFFIXES[format_]}"
    return Scene(draft.pixels, tell_truth(draft, name, kind, orientation), format_, quality)


def make_standard(seed: int, index: int) -> Scene:
    """An image of the standard job: 1280×960, JPEG of quality 90, about 260 KB, 12 lines of text."""
    draft = Draft(Random(f"standard {seed} {index}"), 1280, 960)
    compose_poster(draft, rows=12)
    add_grain(draft.pixels, draft.rng, 0.1)
    return Scene(draft.pixels, tell_truth(draft, f"standard-{seed}-{index:06}.jpg", "poster", 1), "JPEG", 90)


def tell_truth(draft: Draft, name: str, kind: str, orientation: int) -> Truth:
    height, width = draft.pixels.shape[:2]
    lines = [
        TrueLine(text, tuple((round(x, 1), round(y, 1)) for x, y in box.tolist()))
        for text, box in draft.lines
    ]
    if kind in TEXT_KINDS or draft.backdrop is None:
        captions, tags = describe_text(kind, draft.objects)
    else:
        captions, tags = describe_photo(draft.objects, draft.backdrop)
    chosen = choose_bin(width, height, draft.objects, lines)
    return Truth(name, kind, width, height, orientation, draft.objects, lines, captions, tags, chosen)


# Files.

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}
TURNS = {  # how an upright image is stored for each EXIF orientation: the inverse of what a viewer does
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def encode_scene(scene: Scene) -> tuple[str, bytes]:
    """The file's name and its bytes, stored turned; its EXIF orientation turns it upright again."""
    image, exif = Image.fromarray(scene.pixels), Image.Exif()
    orientation = scene.truth.orientation
    if orientation != 1:
        image = image.transpose(TURNS[orientation])
        exif[ExifTags.Base.Orientation] = orientation
    options = {"PNG": {"compress_level": 1}, "WEBP": {"quality": scene.quality, "method": 0}}
    buffer = io.BytesIO()
    image.save(buffer, scene.format, exif=exif, **options.get(scene.format, {"quality": scene.quality}))
    return scene.truth.file, buffer.getvalue()


Progress = Callable[[int], None]
Made = TypeVar("Made")


def write_samples(folder: Path, count: int, seed: int, progress: Progress | None = None) -> None:
    """Write `count` scenes and their .truth.jsonl; truth of other files that is already there is kept.

    Large counts are made by several processes. progress: called with the number of images written so far.
    """
    _write_scenes(make_scene, folder, count, seed, progress)


def standard_job(folder: Path, count: int, seed: int) -> None:
    """Write the images of the standard job, all different, and their .truth.jsonl."""
    _write_scenes(make_standard, folder, count, seed)


Make = Callable[[int, int], Scene]


class _Name(msgspec.Struct):
    file: str


def _write_scenes(make: Make, folder: Path, count: int, seed: int, progress: Progress | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / TRUTH
    old = file.read_bytes().splitlines() if file.exists() else []
    truths = {msgspec.json.decode(line, type=_Name).file: line for line in old}
    for done, (name, line) in enumerate(
        map_processes(functools.partial(_write_scene, make, folder, seed), count), 1
    ):
        truths[name] = line
        if progress:
            progress(done)
    part = file.with_suffix(".part")
    part.write_bytes(b"".join(line + b"\n" for line in truths.values()))
    part.replace(file)


def _write_scene(make: Make, folder: Path, seed: int, index: int) -> tuple[str, bytes]:
    """The file's name and its line of truth."""
    scene = make(seed, index)
    name, data = encode_scene(scene)
    (folder / name).write_bytes(data)
    return name, msgspec.json.encode(scene.truth)


WORTH_A_PROCESS = 100  # images; starting one takes as long as making thirty


def map_processes(
    work: Callable[[int], Made], count: int, worth_a_process: int = WORTH_A_PROCESS
) -> Iterator[Made]:
    """work(0), work(1), … in order, in as many processes as pay for their start."""
    processes = min(count_cores(), count // worth_a_process)
    if processes < 2:
        yield from map(work, range(count))
        return
    context = multiprocessing.get_context("spawn")  # a process that has touched CUDA must not fork
    with ProcessPoolExecutor(processes, context, cv2.setNumThreads, (1,)) as pool:
        yield from pool.map(work, range(count), chunksize=max(1, min(8, worth_a_process // 8)))
