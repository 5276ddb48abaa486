"""Our captioners, and those of transformers beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from stages.blip.captions import CaptionStage
from stages.blip.descriptor import CHAT, Caption, ChatOptions
from stages.contract.base import Image
from stages.images.devices import pixels_of
from stages.registry import registry
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners

NEW_TOKENS = 17  # which no captioner has by default
CHATTING = {model.type for model in CHAT}


def make_stage(
    folder: Path,
    models: Path,
    *,
    batch_size: int = 10,
    dtype: str = "float32",
    clip: str = "",
    device: str = "cpu",
    spread: Sequence[str] = (),
    **options: Any,
) -> CaptionStage:
    """clip: the folder of a model for the stage CLIP. spread: as in the stage's spec."""
    settings = {
        "batch_size": batch_size,
        "dtype": dtype,
        "options": {"max_new_tokens": NEW_TOKENS, **options},
    }
    files = {"clip": Path(clip)} if clip else {}
    spec = resolve(open_pack(folder, models), "blip", settings, files=files)
    stage = registry.build(msgspec.structs.replace(spec, spread=list(spread)), device)
    assert isinstance(stage, CaptionStage)
    stage.load()
    return stage


@functools.cache
def share_stage(folder: Path) -> CaptionStage:
    """A stage with the default options, loaded once in a process. A test must not change it."""
    return make_stage(folder, folder.parent / "none")


def write(stage: CaptionStage, images: Sequence[Image]) -> list[list[int]]:
    """The tokens of each image, when all are one batch."""
    pixels = [each.to(stage.device) for each in pixels_of(images)]
    with torch.inference_mode():
        tokens: list[list[int]] = stage.forward(pixels).tolist()
    return tokens


def run(stage: CaptionStage, images: list[Image]) -> list[str]:
    answers = stage.run(images)
    assert all(isinstance(answer, Caption) for answer in answers)
    return [answer.text for answer in answers]  # type: ignore[union-attr]


@functools.cache
def share_stock(folder: Path) -> Stock:
    """Loaded once in a process."""
    return Stock(folder)


class Stock:
    """The processor and the model of transformers, for one image at a time."""

    def __init__(self, folder: Path) -> None:
        self.kind = folder.name
        self.ends = captioners.ENDS_OF.get(self.kind, captioners.ENDS)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()

    def write(self, image: Image, text: str | None = None, **limits: int) -> list[int]:
        """The new tokens. text: for the processor; None: as ours is by default."""
        asked = self.ask() if text is None else text
        words = {"text": [asked]} if asked else {}
        inputs = self.processor(
            images=[image.pixels], input_data_format="channels_first", return_tensors="pt", **words
        )
        with torch.inference_mode():
            tokens = self.model.generate(
                **inputs, do_sample=False, num_beams=1, **{"max_new_tokens": NEW_TOKENS, **limits}
            )
        config = self.model.config
        if config.is_encoder_decoder or self.kind == "blip":
            return list(tokens[0, 1:].tolist())
        alone = getattr(config, "num_query_tokens", 0) + 1  # BLIP-2 without words
        return list(tokens[0, inputs["input_ids"].shape[1] if asked else alone :].tolist())

    def ask(self, prompt: str = ChatOptions().prompt) -> str:
        """The processor's text for an image."""
        if self.kind not in CHATTING:
            return "<CAPTION>" if self.kind == "florence2" else ""
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        chat = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(chat, add_generation_prompt=True))

    def read(self, tokens: list[int]) -> str:
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def cut(self, tokens: list[int]) -> list[int]:
        """Up to the first end token: what follows is padding."""
        ended = [place for place, token in enumerate(tokens) if token in self.ends]
        return tokens[: ended[0] + 1] if ended else tokens
