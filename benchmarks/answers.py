"""How equal the answers are: of an image alone and in a full batch, and beside the libraries that the stages are held against.

    python -m benchmarks.answers --count 1000 --reference 200 [--pack mini] [--device cuda:0] [--dtype half]

On scenes of `visiond samples`, through the stages as a worker runs them. Counted are images whose answers differ. The
references are transformers' processors, models and generate and ultralytics' predict, in float32 on the same device and of the
same pixels: nvJPEG decodes a little otherwise than libjpeg, which tests/stages/decoding/test_images.py measures. OCR's,
rapidocr, is in tests/stages/ocr/test_stage.py.
"""

from __future__ import annotations

import argparse
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

from stages import binning, registry
from stages.base import Stage
from stages.baseline import OneAtATime, Task, open_image
from stages.blip.descriptor import BlipOptions
from stages.clip.embeddings import decode_embedding
from stages.training.scenes import write_samples
from stages.training.score import UNSEEN_SEED, load_stages, read_batches, run_batch
from stages.training.truth import TRUTH
from stages.weights.packs import open_pack
from stages.yolo.descriptor import Objects

Answers = Mapping[str, Any]  # by stage
FOUND_IOU = 0.9  # with which a box is one of predict's

ASPECTS: dict[str, Callable[[Answers], object]] = {
    "texts": lambda found: [line.text for line in found["ocr"].lines],
    "text boxes": lambda found: [line.box for line in found["ocr"].lines],
    "objects": lambda found: sorted(detection.label for detection in found["yolo"].detections),
    "object boxes": lambda found: [detection.box for detection in found["yolo"].detections],
    "tags": lambda found: [tag.label for tag in found["clip"].tags],
    "captions": lambda found: found["blip"].text,
    "bins": lambda found: (
        binning.judge({stage: msgspec.json.encode(answer) for stage, answer in found.items()}, binning.Thresholds()).name
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="where the scenes are kept")
    parser.add_argument("--pack", default="mini")
    parser.add_argument("--count", type=int, default=1000, help="images that are answered alone and in full batches")
    parser.add_argument("--reference", type=int, default=200, help="how many of them are held against the libraries")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="of all stages; half: as the daemon chooses, by stage")
    options = parser.parse_args()
    files = make_scenes(options.folder, options.count)
    stages = load(options.pack, options.dtype, options.batch, options.device)
    print(f"{options.pack}, {options.dtype}, {options.device}, batches of {options.batch}", flush=True)
    together = list(answer(stages, files, options.batch, options.device))
    for name, different in count_different(together, list(answer(stages, files, 1, options.device))).items():
        print(f"{name}: {different} of {len(files)} differ alone and in a batch", flush=True)
    if options.reference:
        seen = compare(together, list(refer(stages, files[: options.reference], options.device)))
        print(f"captions: {seen.captions} of {seen.images} are generate's")
        print(f"CLIP: least cosine to transformers' embedding {seen.cosine:.6f}")
        print(f"YOLO: {seen.boxes} boxes, {seen.found} of predict's {seen.predicted} found, least IoU {seen.overlap:.4f}")


def make_scenes(folder: Path, count: int) -> list[Path]:
    """Scenes never trained on, kept for the next time."""
    scenes = folder / f"scenes-{count}"
    if not (scenes / TRUTH).is_file():
        write_samples(scenes, count, UNSEEN_SEED)
    return sorted(path for path in scenes.iterdir() if path.name != TRUTH)


def load(pack: str, dtype: str, batch_size: int, device: str) -> list[Stage]:
    overrides = {
        name: {"dtype": kind.half if dtype == "half" else dtype, "batch_size": batch_size}
        for name, kind in registry.STAGES.items()
    }
    return load_stages(open_pack(pack, Path("models")), overrides, device)


def answer(stages: Sequence[Stage], files: Sequence[Path], size: int, device: str) -> Iterator[Answers]:
    spent = Counter[str]()
    for images in read_batches(files, size, device):
        yield from run_batch(stages, images, spent)


def count_different(some: Sequence[Answers], others: Sequence[Answers]) -> dict[str, int]:
    """Images of which they differ, by aspect."""
    return {
        name: sum(aspect(one) != aspect(other) for one, other in zip(some, others, strict=True))
        for name, aspect in ASPECTS.items()
    }


@dataclass(frozen=True)
class Reference:
    """What the libraries say of an image."""

    caption: str
    embedding: torch.Tensor  # [numbers], float32
    boxes: torch.Tensor  # [boxes, 4]: corners in pixels of the image
    labels: list[str]


@torch.inference_mode()
def refer(stages: Sequence[Stage], files: Sequence[Path], device: str) -> Iterator[Reference]:
    """An image at a time, with the weights of these stages, whatever their dtypes."""
    models = OneAtATime(Task([stage.spec for stage in stages], [], device, BlipOptions().max_new_tokens))
    torch.backends.cudnn.allow_tf32 = False  # equal answers are asked for here, not quick ones
    with TemporaryDirectory() as folder:
        path = f"{folder}/image.bmp"  # which keeps each pixel
        for [image] in read_batches(files, 1, device):
            assert image.pixels is not None
            PIL.Image.fromarray(image.pixels.permute(1, 2, 0).cpu().numpy()).save(path)
            models.clip(path)
            boxes = models.yolo(path)
            labels = [models.names[int(label)] for label in boxes.cls]
            yield Reference(caption(models, path), models.embedding[0].cpu(), boxes.xyxy.float(), labels)


def caption(models: OneAtATime, path: str) -> str:
    pixels = models.blip_processor(images=open_image(path), return_tensors="pt")["pixel_values"].to(models.device)
    tokens = models.blip_model.generate(pixel_values=pixels, max_new_tokens=models.new_tokens, do_sample=False, num_beams=1)
    return str(models.blip_tokenizer.batch_decode(tokens, skip_special_tokens=True)[0]).strip()


@dataclass
class Agreement:
    """With the libraries' answers. captions: those that are the same. predicted: predict's boxes; found: those of them that
    have one of ours with the same label and an IoU of FOUND_IOU. cosine, overlap: the least of an embedding, and of a box that
    is predicted with the one of ours that is nearest; 1 where there is none."""

    images: int = 0
    captions: int = 0
    cosine: float = 1.0
    boxes: int = 0
    predicted: int = 0
    found: int = 0
    overlap: float = 1.0


def compare(answers: Sequence[Answers], references: Sequence[Reference]) -> Agreement:
    """answers: to the images that are referred to, and perhaps to more."""
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
    """How much each of predict's boxes overlaps with each of ours: IoU [theirs, ours], 0 for another label."""
    boxes = torch.tensor([detection.box for detection in ours.detections]).reshape(-1, 4)
    same = [[label == detection.label for detection in ours.detections] for label in theirs.labels]
    return box_iou(theirs.boxes, boxes) * torch.tensor(same).reshape(len(theirs.labels), len(boxes))


if __name__ == "__main__":
    main()
