"""The child process of `python -m benchmarks.models --pipeline` that measures `transformers.pipeline`, with PIL images, as its
documentation shows.

It reads an Order from standard input; the last line of its standard output is a Measurement. It tries larger batch sizes
as long as they are faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import PIL.Image
import transformers

from benchmarks.stock import folder_of, try_sizes
from daemon.measure.models import RateRequest
from stages.blip.generation import TASKS as QUESTIONS
from stages.images.devices import dtype_of
from stages.pretrained.language import do_without_num2words

QUESTION = "Describe this image in one sentence."
TASKS = {
    "yolo": "object-detection",
    "clip": "zero-shot-image-classification",
    "blip": "image-text-to-text",
    "ocr": "image-text-to-text",
}
Call = Callable[[Sequence[PIL.Image.Image], int], object]  # images, size of a batch


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RateRequest)
    images = [PIL.Image.open(path).convert("RGB") for path in order.images]
    print(msgspec.json.encode(try_sizes(order, images, choose(order))).decode())


def choose(order: RateRequest) -> Call:
    do_without_num2words()
    dtype = dtype_of(order.spec)
    pipe: Any = transformers.pipeline(
        TASKS[order.spec.name], model=folder_of(order), dtype=dtype, device=order.device
    )
    options = order.spec.options
    match order.spec.name:
        case "yolo":
            return lambda images, size: pipe(list(images), batch_size=size, threshold=0.25)
        case "clip":
            labels = options["labels"]
            return lambda images, size: pipe(list(images), candidate_labels=labels, batch_size=size)
    tokens = options.get("force_tokens")
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens} if tokens else dict(options)
    limits |= {"do_sample": False, "num_beams": 1}
    if not pipe.processor.chat_template:
        text = QUESTIONS["caption"] if order.spec.backend == "florence" else "a photo of"
        return lambda images, size: pipe(
            images=list(images), text=[text] * len(images), batch_size=size, generate_kwargs=limits
        )
    question = [{"type": "text", "text": QUESTION}] if order.spec.name == "blip" else []

    def ask(images: Sequence[PIL.Image.Image], size: int) -> object:
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": image}, *question]}] for image in images
        ]
        return pipe(text=chats, batch_size=size, generate_kwargs=limits, return_full_text=False)

    return ask


if __name__ == "__main__":
    main()
