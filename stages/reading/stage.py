"""Page readers: vision-language models that write the text of a page, mostly as Markdown.

Reference: transformers' processor and `generate` for each of the models, with whose tokens the tests compare these. The
processor resizes and cuts the images on the device. The prompts are those of transformers' documentation of each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from stages.contract.base import Image, ImageError, Result, StageSpec
from stages.contract.options import read_options
from stages.contract.recognition import name_model
from stages.images.devices import hold_device
from stages.ocr.descriptor import READERS, Ocr, ReaderOptions
from stages.pretrained.language import LanguageStage, ask, load_chat_processor, load_processor
from stages.pretrained.questions import Questions

# By model_type. LightOnOCR is asked nothing.
PROMPTS = {"paddleocr_vl": "OCR:", "glm_ocr": "Text Recognition:", "deepseek_ocr2": "Free OCR."}
TILES = 8  # that DeepSeek-OCR 2's tower sees at once
WARM_UP_TOKENS = 8  # what a model writes about a black image may be as long as it is allowed to be


class ReaderStage(LanguageStage):
    models = READERS

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        folder = spec.files["model"]
        match name_model(Path(folder))[0]:
            case "deepseek_ocr2":
                return load_processor(folder)
            case "lighton_ocr" | "mistral3":  # their files name a class that transformers does not have
                return load_chat_processor(folder, transformers.LightOnOcrProcessor)
        return load_chat_processor(folder)

    def load(self) -> None:
        options = read_options(self.spec, ReaderOptions)
        self.model = self.load_vision_model()
        read_in_parts(self.model)
        self.limits = {"max_new_tokens": options.max_new_tokens}
        self.check_length(0)
        self.questions = Questions(self.prepare, self._ask(options.prompt))
        self.ends = list_ends(self.model.generation_config.eos_token_id)
        with hold_device(self.lock):
            self.warm_up()
            self.record_steps()

    def warm_up(self) -> None:
        limits, self.limits = self.limits, {"max_new_tokens": WARM_UP_TOKENS}
        super().warm_up()
        self.limits = limits

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        return [self._read(row) for _, tokens in self.forward_batches(images) for row in tokens.tolist()]

    def _ask(self, prompt: str) -> str:
        folder = self.spec.files["model"]
        model_type, _ = name_model(Path(folder))
        prompt = prompt or PROMPTS.get(model_type, "")
        if model_type == "deepseek_ocr2":  # it was not trained for chats, and has no template
            return f"{self.prepare.image_token}\n{prompt}"
        return ask(self.prepare, prompt, folder)

    def _read(self, tokens: list[int]) -> Ocr:
        """tokens: of one text. One that was finished has an end token, before padding if the batch has longer ones."""
        text = self.prepare.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Ocr([], 0, 0.0, text.strip(), self.ends.isdisjoint(tokens))


def list_ends(tokens: int | list[int] | None) -> set[int]:
    """The tokens that end a text, from a configuration's eos_token_id."""
    return {*tokens} if isinstance(tokens, list) else set() if tokens is None else {tokens}


class PageByPage(nn.Module):
    """LightOnOCR's vision encoder, a PixtralVisionModel."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, image_sizes: Any, **options: Any) -> BaseModelOutputWithPooling:
        """pixel_values: [pages, 3, height, width], padded. image_sizes: height and width of each page."""
        sizes = image_sizes.tolist() if isinstance(image_sizes, Tensor) else image_sizes
        hidden = [
            self.tower(page[None, :, :height, :width], image_sizes=[(height, width)], **options)
            for page, (height, width) in zip(pixel_values, sizes, strict=True)
        ]
        return BaseModelOutputWithPooling(
            last_hidden_state=torch.cat([each.last_hidden_state for each in hidden], dim=1)
        )


class TilesInParts(nn.Module):
    """DeepSeek-OCR 2's vision tower."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, **options: Any) -> BaseModelOutput:
        """pixel_values: [tiles, 3, side, side]."""
        parts = [self.tower(part, **options).last_hidden_state for part in torch.split(pixel_values, TILES)]
        return BaseModelOutput(last_hidden_state=torch.cat(parts))


def read_in_parts(model: Any) -> None:
    """Replace the vision tower of a reader whose memory would grow with the square of a batch, or faster than it, by one that
    reads a batch in parts, with the same answers.

    A page has thousands of patches. In LightOnOCR, transformers makes one sequence of all pages of a batch, with a mask of
    all patches times all patches: 170 GB for 32 pages. In DeepSeek-OCR 2, each tile has a bias of that form. One page, or a
    few tiles, keep a GPU busy.
    """
    match type(model).__name__:
        case "LightOnOcrForConditionalGeneration":
            model.model.vision_encoder = PageByPage(model.model.vision_encoder)
        case "DeepseekOcr2ForConditionalGeneration":
            model.model.vision_tower = TilesInParts(model.model.vision_tower)
