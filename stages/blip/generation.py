"""Captioners that transformers' own `generate` runs: greedily, one token after another, for a whole batch at once.

References: Li et al., "BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large Language Models",
2023; Xiao et al., "Florence-2: Advancing a Unified Representation for a Variety of Vision Tasks", 2024; and transformers'
processors and `generate` for each of the models, with whose tokens the tests compare these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor

from stages.blip.captions import CaptionStage
from stages.blip.descriptor import BLIP2, CHAT, FLORENCE, Blip2Options, ChatOptions, FlorenceOptions
from stages.contract.base import StageSpec
from stages.contract.options import read_options
from stages.images.devices import hold_device
from stages.pretrained.checkpoints import load_part, load_tokenizer
from stages.pretrained.language import LanguageStage, ask, load_chat_processor
from stages.pretrained.questions import Questions

# What Florence-2 was trained with, by the option `task`.
TASKS = {"caption": "<CAPTION>", "detailed": "<DETAILED_CAPTION>", "more detailed": "<MORE_DETAILED_CAPTION>"}


class GenerateStage(LanguageStage, CaptionStage):
    text_name = "caption"

    def load_captioner(self, max_new_tokens: int, force_tokens: int) -> None:
        """Load the model, its preprocessing and its tokenizer. The numbers are the options of these names."""
        self.model = self.load_vision_model()
        self.tokenizer = load_tokenizer(self.spec.files["model"])
        self.text_encoder = self.load_text_encoder()
        self.limits = {"max_new_tokens": force_tokens or max_new_tokens}
        if force_tokens:
            self.limits["min_new_tokens"] = force_tokens


class PromptStage(GenerateStage):
    """A captioner with the same prompt for all images."""

    prompt: Tensor  # token ids, [1, tokens]

    def prepare_inputs(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": self.prepare(pixels), "input_ids": self.prompt.expand(len(pixels), -1)}


class Blip2Stage(PromptStage):
    """BLIP-2: a large language model that sees an image as a few query tokens."""

    models = BLIP2

    def load(self) -> None:
        options = read_options(self.spec, Blip2Options)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        config = self.model.config
        # As Blip2Processor writes it; it leaves the images out if its folder does not name the number of queries.
        prompt = options.prompt
        words = self.tokenizer(prompt)["input_ids"] if prompt else [config.text_config.bos_token_id]
        ids = [config.image_token_index] * config.num_query_tokens + words
        self.prompt = torch.tensor([ids], device=self.device)
        self.check_length(1 if config.is_encoder_decoder else len(ids))
        with hold_device(self.lock):
            self.warm_up()
            self.record_steps()


class FlorenceStage(PromptStage):
    """Florence-2: short or detailed captions, by the prompts that the model was trained with."""

    models = FLORENCE

    def load(self) -> None:
        options = read_options(self.spec, FlorenceOptions)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        self.check_length(1)
        self.prompt = make_prompt(self.spec.files["model"], options.task).to(self.device)
        with hold_device(self.lock):
            self.warm_up()


def make_prompt(folder: str, task: str) -> Tensor:
    """Florence-2's token ids [1, tokens], the same for all images. task: of TASKS. Raises StageUnusable."""
    processor = load_part("processor", AutoProcessor, folder, trust_remote_code=False)
    blank = torch.zeros(3, 32, 32, dtype=torch.uint8)
    ids: Tensor = processor(images=[blank], text=[TASKS[task]], return_tensors="pt")["input_ids"]
    return ids


class ChatStage(GenerateStage):
    """Image-text-to-text models: the answer to a question about each image, in the form of the model's own chat template. The
    processor resizes and cuts the images on the device."""

    models = CHAT

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        return load_chat_processor(spec.files["model"])

    def load(self) -> None:
        options = read_options(self.spec, ChatOptions)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        self.check_length(0)
        question = ask(self.prepare, options.prompt, self.spec.files["model"])
        self.questions = Questions(self.prepare, question)
        with hold_device(self.lock):
            self.warm_up()
            self.record_steps()
