"""Faults that give wrong answers without an error: each makes the right `run` of a stage a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from stages.clip.embeddings import encode_embedding
from stages.contract.base import Image

Run = Callable[[Sequence[Any]], list[Any]]


def give_one_answer(run: Run) -> Run:
    return lambda images: [run(images)[0]] * len(images)


def give_one_embedding(run: Run) -> Run:
    """It differs in the last bits, as sums in another order do."""

    def run_with_noise(images: Sequence[Any]) -> list[Any]:
        torch.manual_seed(0)
        vector = torch.nn.functional.normalize(torch.rand(128), dim=0)
        near = [vector + 1e-4 * torch.rand(128) for _ in images]
        pairs = zip(run(images), near, strict=True)
        return [msgspec.structs.replace(answer, embedding=encode_embedding(each)) for answer, each in pairs]

    return run_with_noise


def give_embedding(value: float) -> Callable[[Run], Run]:
    wrong = encode_embedding(torch.full((128,), value))

    def plant(run: Run) -> Run:
        return lambda images: [msgspec.structs.replace(answer, embedding=wrong) for answer in run(images)]

    return plant


def shift_answers(run: Run) -> Run:
    """As a batch that is read from the wrong place."""
    return lambda images: [*run(images)[1:], run(images)[0]]


def answer_late(run: Run) -> Run:
    """Each image gets the answers of the image before, as from a buffer that is read before the GPU has written it."""

    def run_late(images: Sequence[Any]) -> list[Any]:
        blank = torch.zeros(3, 240, 320, dtype=torch.uint8, device=images[0].pixels.device)
        return [*run([Image(memoryview(b""), 320, 240, blank)]), *run(images)[:-1]]

    return run_late


def read_nothing(run: Run) -> Run:
    return lambda images: [
        msgspec.structs.replace(answer, lines=[], count=0, area_ratio=0.0) for answer in run(images)
    ]


def map_found(change: Callable[[Any], Any]) -> Callable[[Run], Run]:
    def plant(run: Run) -> Run:
        return lambda images: [
            msgspec.structs.replace(answer, detections=[change(found) for found in answer.detections])
            for answer in run(images)
        ]

    return plant


def forget_the_scale(found: Any) -> Any:
    """The box is of the image as the network saw it, which was smaller."""
    return msgspec.structs.replace(found, box=tuple(0.5 * place for place in found.box))


def permute_labels(found: Any) -> Any:
    turned = {"circle": "star", "star": "square", "square": "triangle", "triangle": "circle"}
    return msgspec.structs.replace(found, label=turned[found.label])


def score_one(found: Any) -> Any:
    return msgspec.structs.replace(found, score=1.0)


def permute_tags(run: Run) -> Run:
    def turn(answer: Any) -> Any:
        labels = [tag.label for tag in answer.tags]
        turned = zip(answer.tags, labels[1:] + labels[:1], strict=True)
        tags = [msgspec.structs.replace(tag, label=label) for tag, label in turned]
        return msgspec.structs.replace(answer, tags=tags)

    return lambda images: list(map(turn, run(images)))


def change_pixels(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[Run], Run]:
    """A fault of the decoder, for all stages after it."""

    def plant(run: Run) -> Run:
        def run_on_others(images: Sequence[Any]) -> list[Any]:
            pixels = change([image.pixels for image in images])
            return run(
                [Image(i.data, i.width, i.height, p, i.results) for i, p in zip(images, pixels, strict=True)]
            )

        return run_on_others

    return plant


def keep_pixels_of_the_image_before(pixels: list[torch.Tensor]) -> list[torch.Tensor]:
    return pixels[-1:] + pixels[:-1]


def fail(run: Run) -> Run:
    def raise_error(images: Sequence[Any]) -> list[Any]:
        raise RuntimeError("a kernel")

    return raise_error


black = change_pixels(lambda pixels: [torch.zeros_like(each) for each in pixels])
turn_colors = change_pixels(lambda pixels: [each.flip(0) for each in pixels])

FAULTS: dict[str, tuple[str, Callable[[Run], Run]]] = {
    "one embedding for all images": ("clip", give_one_embedding),
    "the answers of one image for all": ("clip", give_one_answer),
    "embeddings of NaN": ("clip", give_embedding(float("nan"))),
    "embeddings of zeros": ("clip", give_embedding(0.0)),
    "red and blue are swapped": ("clip", turn_colors),
    "the decoder gives black": ("clip", black),
    "the decoder gives black to YOLO": ("yolo", black),
    "the decoder gives the image before": ("clip", change_pixels(keep_pixels_of_the_image_before)),
    "answers are shifted by one": ("clip", shift_answers),
    "answers are those of the image before": ("clip", answer_late),
    "captions are shifted by one": ("blip", shift_answers),
    "one caption for all images": ("blip", give_one_answer),
    "no text is read": ("ocr", read_nothing),
    "boxes are not scaled back": ("yolo", map_found(forget_the_scale)),
    "labels are permuted": ("yolo", map_found(permute_labels)),
    "tags are permuted": ("clip", permute_tags),
    "all scores are 1": ("yolo", map_found(score_one)),
    "nothing can be processed any more": ("yolo", fail),
}
