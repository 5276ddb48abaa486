"""Our page readers, and those of transformers beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor

from stages.contract.base import Image
from stages.images.devices import pixels_of
from stages.ocr.descriptor import Ocr
from stages.reading.stage import ReaderStage
from stages.registry import registry
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners

NEW_TOKENS = 16  # which is not the default
# As in transformers' documentation of each model.
PROMPTS = {"paddleocr_vl": "OCR:", "glm_ocr": "Text Recognition:", "deepseek_ocr2": "Free OCR."}
LIGHTON = ("lighton_ocr", "mistral3")


def make_stage(
    folder: Path,
    models: Path,
    *,
    batch_size: int = 10,
    dtype: str = "float32",
    device: str = "cpu",
    spread: Sequence[str] = (),
    **options: Any,
) -> ReaderStage:
    """spread: as in the stage's spec."""
    settings = {
        "batch_size": batch_size,
        "dtype": dtype,
        "options": {"max_new_tokens": NEW_TOKENS, **options},
    }
    spec = resolve(open_pack(folder, models), "ocr", settings)
    stage = registry.build(msgspec.structs.replace(spec, spread=list(spread)), device)
    assert isinstance(stage, ReaderStage)
    stage.load()
    return stage


@functools.cache
def share_stage(folder: Path) -> ReaderStage:
    """A stage with the default options, loaded once in a process. A test must not change it."""
    return make_stage(folder, folder.parent / "none")


def write(stage: ReaderStage, images: Sequence[Image]) -> list[list[int]]:
    """The tokens of each image, when all are one batch."""
    pixels = [each.to(stage.device) for each in pixels_of(images)]
    with torch.inference_mode():
        tokens: list[list[int]] = stage.forward(pixels).tolist()
    return tokens


def run(stage: ReaderStage, images: Sequence[Image]) -> list[Ocr]:
    answers = stage.run(images)
    assert all(isinstance(answer, Ocr) for answer in answers)
    return answers  # type: ignore[return-value]


def cut(tokens: list[int]) -> list[int]:
    """Up to the first end token: what follows is padding."""
    ended = [place for place, token in enumerate(tokens) if token in captioners.ENDS]
    return tokens[: ended[0] + 1] if ended else tokens


@functools.cache
def share_stock(folder: Path) -> Stock:
    """Loaded once in a process."""
    return Stock(folder)


class Stock:
    """The processor and the model of transformers, for one image at a time."""

    def __init__(self, folder: Path) -> None:
        self.kind = folder.name
        processor, model = (
            (transformers.LightOnOcrProcessor, transformers.LightOnOcrForConditionalGeneration)
            if self.kind in LIGHTON
            else (AutoProcessor, AutoModelForImageTextToText)
        )
        self.processor = processor.from_pretrained(folder)
        self.model = model.from_pretrained(folder).eval()

    def write(self, image: Image, prompt: str | None = None) -> list[int]:
        """The new tokens. prompt: None for that of the documentation."""
        asked = self.ask(PROMPTS.get(self.kind, "") if prompt is None else prompt)
        inputs = self.processor(
            images=[image.pixels], text=[asked], input_data_format="channels_first", return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
        return cut(tokens[0, inputs["input_ids"].shape[1] :].tolist())

    def ask(self, prompt: str) -> str:
        if self.kind == "deepseek_ocr2":
            return f"<image>\n{prompt}"
        words = [{"type": "text", "text": prompt}] if prompt else []
        chat = [{"role": "user", "content": [{"type": "image"}, *words]}]
        return str(self.processor.apply_chat_template(chat, add_generation_prompt=True))

    def read(self, tokens: list[int]) -> str:
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
