"""The child process of `python -m benchmarks.models` that measures a model with the original library.

It reads an Order from standard input; the last line of its standard output is a Measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor

from daemon.measure.alone import time_calls
from daemon.measure.models import GAIN, Measurement, ModelRate, RateRequest
from stages.blip.generation import TASKS
from stages.images.devices import dtype_of, pixels_of, synchronize
from stages.images.images import read_batches
from stages.pretrained.language import ask, do_without_num2words
from stages.yolo.library import make_predictor
from stages.yolo.weights import read_weights

Call = Callable[[Sequence[Tensor]], object]


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RateRequest)
    [images] = read_batches(list(map(Path, order.images)), len(order.images), "cpu")
    call = choose(order)
    print(msgspec.json.encode(try_sizes(order, pixels_of(images), call)).decode())


def try_sizes(order: RateRequest, images: Sequence[Tensor], call: Call) -> Measurement:
    """The rates at the batch sizes of the order, as long as a larger one is faster."""
    rates: list[ModelRate] = []
    for size in order.batch_sizes:
        batch = list(islice(cycle(images), size))

        def run(batch: Sequence[Tensor] = batch) -> None:
            call(batch)
            synchronize(order.device)

        try:
            with torch.inference_mode():
                rates.append(ModelRate(size, size / time_calls(run, order.seconds)))
        except Exception as error:  # noqa: BLE001 - a library may raise anything for a batch that it cannot do
            why = (str(error).splitlines() or [""])[0]
            return Measurement(rates, problem=f"{type(error).__name__}: {why}")
        if rates[-1].images_per_second < GAIN * max((r.images_per_second for r in rates[:-1]), default=0.0):
            break
    return Measurement(rates)


def detect_with_ultralytics(order: RateRequest) -> Call:
    state, config = read_weights(order.spec.files)
    detector = make_predictor(state, config)
    half = dtype_of(order.spec) != torch.float32
    options = {"imgsz": config["imgsz"], "device": order.device, "verbose": False, "half": half}

    def detect(batch: Sequence[Tensor]) -> object:
        arrays = [
            image.permute(1, 2, 0).flip(2).contiguous().numpy() for image in batch
        ]  # BGR, as OpenCV reads
        return [found.boxes.cpu() for found in detector.predict(arrays, batch=len(arrays), **options)]

    return detect


def detect_with_transformers(order: RateRequest) -> Call:
    model = load(transformers.AutoModelForObjectDetection, order)
    processor = transformers.AutoImageProcessor.from_pretrained(folder_of(order))

    def detect(batch: Sequence[Tensor]) -> object:
        inputs = processor(images=list(batch), return_tensors="pt").to(order.device, model.dtype)
        sizes = [tuple(image.shape[1:]) for image in batch]
        found = processor.post_process_object_detection(model(**inputs), threshold=0.25, target_sizes=sizes)
        return [{name: tensor.cpu() for name, tensor in boxes.items()} for boxes in found]

    return detect


def embed(order: RateRequest) -> Call:
    model = load(transformers.AutoModel, order)
    processor = transformers.AutoImageProcessor.from_pretrained(folder_of(order))

    def run(batch: Sequence[Tensor]) -> object:
        inputs = processor(images=list(batch), return_tensors="pt").to(order.device, model.dtype)
        return model.get_image_features(**inputs).pooler_output.float().cpu()

    return run


def write(order: RateRequest) -> Call:
    model = load(transformers.AutoModelForImageTextToText, order)
    do_without_num2words()
    processor = transformers.AutoProcessor.from_pretrained(folder_of(order))
    tokens = order.spec.options.get("force_tokens")
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens} if tokens else dict(order.spec.options)
    question = find_question(order, processor)

    def run(batch: Sequence[Tensor]) -> object:
        asked: dict[str, Any] = {"text": [question] * len(batch), "padding": True, "padding_side": "left"}
        images = [[image] for image in batch] if processor.chat_template else list(batch)
        inputs = processor(images=images, **(asked if question else {}), return_tensors="pt").to(
            order.device, model.dtype
        )
        answers = model.generate(**inputs, **limits, do_sample=False, num_beams=1)
        return processor.batch_decode(answers, skip_special_tokens=True)

    return run


def find_question(order: RateRequest, processor: Any) -> str:
    if order.spec.backend == "florence":
        return TASKS["caption"]
    if not processor.chat_template:
        return ""
    prompt = "" if order.spec.name == "ocr" else "Describe this image in one sentence."
    return ask(processor, prompt, folder_of(order))


def load(kind: Any, order: RateRequest) -> Any:
    return kind.from_pretrained(folder_of(order), dtype=dtype_of(order.spec)).eval().to(order.device)


def folder_of(order: RateRequest) -> str:
    return order.spec.files["model"]


def choose(order: RateRequest) -> Call:
    match order.spec.name, order.spec.backend:
        case "yolo", "ultralytics":
            return detect_with_ultralytics(order)
        case "yolo", _:
            return detect_with_transformers(order)
        case "clip", _:
            return embed(order)
    return write(order)


if __name__ == "__main__":
    main()
