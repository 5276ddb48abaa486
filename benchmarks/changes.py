"""Compares a model's answers in one dtype with those in another.

    python -m benchmarks.changes qwen3-vl-2b --dtype int4 --beside bfloat16 --count 100
    python -m benchmarks.changes ./my-clip ./my-reader --dtype int8

A model is named as in daemon.toml. It runs as in a worker, first in one dtype and then in the other, on scenes of
`visiond samples` or on your images (--images). This prints what has changed. Texts: how many are equal, and which share of
their words comes before the first difference. Embeddings: the cosines, and for how many images the first tag is the same.
Objects: how many boxes are found again.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from torchvision.ops import box_iou

from benchmarks.answers import FOUND_IOU, make_scenes
from stages.clip.embeddings import decode_embedding
from stages.contract.base import ImageError, StageSpec
from stages.images.images import read_batches
from stages.registry import registry
from stages.weights.packs import open_pack, resolve
from visiond_mini.score import run_batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="names or folders, of models or packs")
    parser.add_argument("--dtype", required=True, help="for example int8")
    parser.add_argument("--beside", default="float32", help="the dtype to compare with; default: float32")
    parser.add_argument("--images", type=Path, help="a folder of images; default: scenes")
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="folder for the scenes")
    parser.add_argument("--models-folder", type=Path, default=Path("models"), help="as [models] folder")
    parser.add_argument("--count", type=int, default=40, help="number of images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    files = (
        sorted(filter(Path.is_file, given.images.iterdir()))
        if given.images
        else make_scenes(given.folder, given.count)
    )
    chosen = files[: given.count]
    for name in given.models:
        for stage in stages_of(name, given.models_folder):
            title = f"{name}, {stage}, {given.dtype} beside {given.beside}, {given.device}"
            dtypes = (given.beside, given.dtype)
            if missing := set(dtypes) - set(list_dtypes(name, stage, given.models_folder)):
                print(f"{title}: the model cannot have {', '.join(sorted(missing))}", flush=True)
                continue
            before, after = (
                answer(specify(name, stage, given.models_folder, dtype, given.batch), chosen, given.device)
                for dtype in dtypes
            )
            print(f"{title}: {describe(before, after)}", flush=True)


def stages_of(name: str, models: Path) -> list[str]:
    return list(open_pack(name, models).manifest.stages)


def specify(name: str, stage: str, models: Path, dtype: str, batch_size: int) -> StageSpec:
    return resolve(open_pack(name, models), stage, {"dtype": dtype, "batch_size": batch_size})


def list_dtypes(name: str, stage: str, models: Path) -> list[str]:
    """The dtypes that a model can have."""
    spec = resolve(open_pack(name, models), stage)
    return ["float32", "bfloat16", "float16", *registry.find_backend(stage, spec.backend).small]


def answer(spec: StageSpec, files: Sequence[Path], device: str) -> list[Any]:
    """The stage's answers, without keeping its model."""
    stage = registry.build(spec, device)
    stage.load()
    found: list[Any] = []
    for images in read_batches(files, spec.batch_size, device):
        found += [answers[spec.name] for answers in run_batch([stage], images, Counter[str]())]
    del stage
    gc.collect()
    torch.cuda.empty_cache()
    return found


def describe(before: Sequence[Any], after: Sequence[Any]) -> str:
    """What changed, in words. Answers of one stage, image by image."""
    pairs = [
        (one, other)
        for one, other in zip(before, after, strict=True)
        if not isinstance(one, ImageError) and not isinstance(other, ImageError)
    ]
    failed = f", {len(before) - len(pairs)} failed" if len(pairs) < len(before) else ""
    if not pairs:
        return "no image has an answer"
    compare: Callable[[Sequence[tuple[Any, Any]]], str] = {
        "Objects": compare_objects,
        "Clip": compare_embeddings,
    }.get(type(pairs[0][0]).__name__, compare_texts)
    return f"{len(pairs)} images{failed}: {compare(pairs)}"


def compare_texts(pairs: Sequence[tuple[Any, Any]]) -> str:
    texts = [(text_of(one), text_of(other)) for one, other in pairs]
    equal = sum(one == other for one, other in texts)
    kept = statistics.fmean(share_kept(*pair) for pair in texts)
    return f"{equal} texts equal, {kept:.1%} of the words until the first difference"


def text_of(answer: Any) -> str:
    """A caption, a page's text, or the text of all lines."""
    text = answer.text
    return "\n".join(line.text for line in answer.lines) if text is None else str(text)


def share_kept(one: str, other: str) -> float:
    """The share of the longer text's words that come before the first difference."""
    words = one.split(), other.split()
    same = next(
        (place for place, (a, b) in enumerate(zip(*words, strict=False)) if a != b), min(map(len, words))
    )
    return same / longest if (longest := max(map(len, words))) else 1.0


def compare_embeddings(pairs: Sequence[tuple[Any, Any]]) -> str:
    cosines = []
    for pair in pairs:
        one, other = (decode_embedding(answer.embedding).float() for answer in pair)
        cosines.append(float(cosine_similarity(one, other, dim=0)))
    tags = sum(
        [tag.label for tag in one.tags[:1]] == [tag.label for tag in other.tags[:1]] for one, other in pairs
    )
    return f"cosine {statistics.median(cosines):.5f}, smallest {min(cosines):.5f}; the first tag equal for {tags}"


def compare_objects(pairs: Sequence[tuple[Any, Any]]) -> str:
    overlaps = [overlap for one, other in pairs for overlap in find_again(one, other)]
    kept = [overlap for overlap in overlaps if overlap >= FOUND_IOU]
    more = sum(len(other.detections) for _, other in pairs)
    least = f", smallest IoU {min(kept):.3f}" if kept else ""
    return f"{len(kept)} of {len(overlaps)} boxes found again{least}, {more} in all"


def find_again(before: Any, after: Any) -> Iterator[float]:
    """For each object, the overlap with the nearest one of the same label."""
    for object in before.detections:
        boxes = [other.box for other in after.detections if other.label == object.label]
        yield float(box_iou(torch.tensor([object.box]), torch.tensor(boxes)).max()) if boxes else 0.0


if __name__ == "__main__":
    main()
