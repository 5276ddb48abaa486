"""Captioners that transformers' own `generate` runs: greedily, one token after another, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stages.blip.captions import CaptionStage
from stages.pretrained.checkpoints import load_tokenizer
from stages.pretrained.language import LanguageStage


class GenerateStage(LanguageStage, CaptionStage):
    text_name = "caption"

    def load_captioner(self, max_new_tokens: int, force_tokens: int) -> None:
        """Load the model, its preprocessing and its tokenizer. The numbers are the options of these names."""
        self.model = self.load_vision_model()
        self.tokenizer = load_tokenizer(self.spec.files["model"])
        self.tower = self.load_tower()
        self.limits = {"max_new_tokens": force_tokens or max_new_tokens}
        if force_tokens:
            self.limits["min_new_tokens"] = force_tokens


class PromptStage(GenerateStage):
    """A captioner with the same prompt for all images."""

    prompt: Tensor  # token ids, [1, tokens]

    def prepare_inputs(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": self.prepare(pixels), "input_ids": self.prompt.expand(len(pixels), -1)}
