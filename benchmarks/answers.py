"""Compares the answers for an image alone with those in a full batch, and with those of the reference libraries.

    python -m benchmarks.answers --count 1000 --reference 200 [--pack mini] [--device cuda:0] [--dtype half]

It runs the stages as a worker does, on scenes of `visiond samples`, and counts images whose answers differ.
The references are transformers' processors, models and generate, and ultralytics' predict, in float32 on the
same device with the same pixels (nvJPEG decodes slightly differently from libjpeg;
tests/stages/images/test_images.py measures that). The reference of OCR, rapidocr, is in
tests/stages/ocr/test_stage.py. There are references only for the models of the standard job; `visiond compare` compares any
model in two dtypes.

--reference: number of images to compare with the libraries. --dtype: of all stages; half: the half precision of each, as the
daemon chooses; int8, float8, int4: the weights of the stages that can have them, all else in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import PIL.Image
import torch
from torch.nn.functional import cosine_similarity
from torchvision.ops import box_iou

from benchmarks.harness import read_options
from stages.blip.descriptor import BlipOptions
from stages.clip.embeddings import decode_embedding
from stages.contract import binning
from stages.contract.base import Stage
from stages.contract.descriptor import SMALL
from stages.images.images import read_batches
from stages.registry import registry
from stages.registry.baseline import OneAtATime, Task, open_image
from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH
from stages.weights.packs import Pack, open_pack, resolve
from stages.yolo.descriptor import Objects
from visiond_mini.score import UNSEEN_SEED, load_stages, run_batch

Answers = Mapping[str, Any]  # by stage
FOUND_IOU = 0.9  # from which a box counts as one of predict's

ASPECTS: dict[str, Callable[[Answers], object]] = {
    "texts": lambda found: [line.text for line in found["ocr"].lines],
    "text boxes": lambda found: [line.box for line in found["ocr"].lines],
    "objects": lambda found: sorted(detection.label for detection in found["yolo"].detections),
    "object boxes": lambda found: [detection.box for detection in found["yolo"].detections],
    "tags": lambda found: [tag.label for tag in found["clip"].tags],
    "captions": lambda found: found["blip"].text,
    "bins": lambda found: (
        binning.judge(
            {stage: msgspec.json.encode(answer) for stage, answer in found.items()}, binning.Thresholds()
        ).name
    ),
}


def main() -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    options = read_options(
        __doc__,
        folder=Path("bench"),
        pack="mini",
        count=1000,
        reference=200,
        batch=64,
        device=device,
        dtype="float32",
    )
    files = make_scenes(options.folder, options.count)
    stages = load(options.pack, options.dtype, options.batch, options.device)
    print(f"{options.pack}, {options.dtype}, {options.device}, batches of {options.batch}", flush=True)
    together = list(answer(stages, files, options.batch, options.device))
    for name, different in count_different(together, list(answer(stages, files, 1, options.device))).items():
        print(f"{name}: {different} of {len(files)} differ alone and in a batch", flush=True)
    if options.reference:
        seen = compare(together, list(refer(stages, files[: options.reference], options.device)))
        print(f"captions: {seen.captions} of {seen.images} are equal to generate's")
        print(f"CLIP: smallest cosine to transformers' embedding {seen.cosine:.6f}")
        print(
            f"YOLO: {seen.boxes} boxes, {seen.found} of predict's {seen.predicted} found, smallest IoU {seen.overlap:.4f}"
        )


def make_scenes(folder: Path, count: int) -> list[Path]:
    """Scenes that were not used in training; kept for the next time."""
    scenes = folder / f"scenes-{count}"
    if not (scenes / TRUTH).is_file():
        write_samples(scenes, count, UNSEEN_SEED)
    return sorted(path for path in scenes.iterdir() if path.name != TRUTH)


def load(pack: str, dtype: str, batch_size: int, device: str) -> list[Stage]:
    opened = open_pack(pack, Path("models"))
    overrides = {
        name: {"dtype": choose_dtype(opened, name, dtype), "batch_size": batch_size}
        for name in registry.ORDER
    }
    return load_stages(opened, overrides, device)


def choose_dtype(pack: Pack, stage: str, dtype: str) -> str:
    """Stages whose models cannot have weights in int8, float8 or int4 stay in float32."""
    backend = registry.find_backend(stage, resolve(pack, stage).backend)
    return "float32" if dtype in SMALL and dtype not in backend.small else dtype


def answer(stages: Sequence[Stage], files: Sequence[Path], size: int, device: str) -> Iterator[Answers]:
    spent = Counter[str]()
    for images in read_batches(files, size, device):
        yield from run_batch(stages, images, spent)


def count_different(some: Sequence[Answers], others: Sequence[Answers]) -> dict[str, int]:
    """The number of images whose answers differ, by aspect."""
    return {
        name: sum(aspect(one) != aspect(other) for one, other in zip(some, others, strict=True))
        for name, aspect in ASPECTS.items()
    }


@dataclass(frozen=True)
class Reference:
    """The libraries' answers for an image."""

    caption: str
    embedding: torch.Tensor  # [numbers], float32
    boxes: torch.Tensor  # [boxes, 4]: corners in pixels of the image
    labels: list[str]


@torch.inference_mode()
def refer(stages: Sequence[Stage], files: Sequence[Path], device: str) -> Iterator[Reference]:
    """One image at a time, in float32, with the weights of these stages."""
    models = OneAtATime(Task([stage.spec for stage in stages], [], device, BlipOptions().max_new_tokens))
    torch.backends.cudnn.allow_tf32 = False  # exact answers matter here, not speed
    with TemporaryDirectory() as folder:
        path = f"{folder}/image.bmp"  # lossless
        for [image] in read_batches(files, 1, device):
            assert image.pixels is not None
            PIL.Image.fromarray(image.pixels.permute(1, 2, 0).cpu().numpy()).save(path)
            models.clip(path)
            boxes = models.yolo(path)
            labels = [models.names[int(label)] for label in boxes.cls]
            yield Reference(caption(models, path), models.embedding[0].cpu(), boxes.xyxy.float(), labels)


def caption(models: OneAtATime, path: str) -> str:
    pixels = models.blip_processor(images=open_image(path), return_tensors="pt")["pixel_values"].to(
        models.device
    )
    tokens = models.blip_model.generate(
        pixel_values=pixels, max_new_tokens=models.new_tokens, do_sample=False, num_beams=1
    )
    return str(models.blip_tokenizer.batch_decode(tokens, skip_special_tokens=True)[0]).strip()


@dataclass
class Agreement:
    """Agreement with the libraries' answers."""

    images: int = 0
    captions: int = 0  # that are equal
    cosine: float = 1.0  # the smallest of an embedding
    boxes: int = 0
    predicted: int = 0  # boxes of predict
    found: int = 0  # those with one of our boxes of the same label and an IoU of at least FOUND_IOU
    overlap: float = 1.0  # the smallest IoU of a box of predict with our nearest box


def compare(answers: Sequence[Answers], references: Sequence[Reference]) -> Agreement:
    """answers: for the images of the references, and possibly more."""
    seen = Agreement()
    for ours, theirs in zip(answers, references, strict=False):
        seen.images += 1
        seen.captions += ours["blip"].text == theirs.caption
        embedding = decode_embedding(ours["clip"].embedding)
        seen.cosine = min(seen.cosine, float(cosine_similarity(embedding, theirs.embedding, dim=0)))
        near = match(theirs, ours["yolo"])
        nearest = near.amax(dim=1).tolist() if near.numel() else [0.0] * len(near)
        seen.predicted += near.shape[0]
        seen.boxes += near.shape[1]
        seen.found += sum(overlap >= FOUND_IOU for overlap in nearest)
        seen.overlap = min([seen.overlap, *nearest])
    return seen


def match(theirs: Reference, ours: Objects) -> torch.Tensor:
    """IoU of each box of predict with each of ours [theirs, ours]; 0 for different labels."""
    boxes = torch.tensor([detection.box for detection in ours.detections]).reshape(-1, 4)
    same = [[label == detection.label for detection in ours.detections] for label in theirs.labels]
    overlaps: torch.Tensor = box_iou(theirs.boxes, boxes)
    return overlaps * torch.tensor(same).reshape(len(theirs.labels), len(boxes))


if __name__ == "__main__":
    main()
