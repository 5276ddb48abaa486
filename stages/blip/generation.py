"""Captioners that transformers' own `generate` runs: greedily, one token after another, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stages.base import StageUnusable
from stages.blip.captions import CaptionStage
from stages.checkpoints import load_tokenizer


class GenerateStage(CaptionStage):
    def load_captioner(self, max_new_tokens: int, force_tokens: int) -> None:
        """Load the model, its preprocessing and its tokenizer. The numbers are the options of these names."""
        self.model = self.load_vision_model()
        self.tokenizer = load_tokenizer(self.spec.files["model"])
        self.tower = self.load_tower()
        self.limits = {"max_new_tokens": force_tokens or max_new_tokens}
        if force_tokens:
            self.limits["min_new_tokens"] = force_tokens

    def check_length(self, before: int) -> None:
        """before: the tokens before the first new one. Raises StageUnusable if the model has too few positions: a
        GPU would be lost at the first token without one."""
        text = self.model.config.get_text_config(decoder=True)
        positions, new = getattr(text, "max_position_embeddings", None), self.limits["max_new_tokens"]
        if positions and before + new > positions:
            raise StageUnusable(
                f"{self.name}: a caption of {new} tokens after {before} others does not fit into the model's {positions} "
                "positions; lower max_new_tokens."
            )

    def generate(self, inputs: Mapping[str, Any], before: int) -> Tensor:
        """New tokens on the host, [images, tokens]. before: the number of tokens that `generate` repeats first."""
        tokens: Tensor = self.model.generate(**inputs, **self.limits, do_sample=False, num_beams=1)
        return tokens[:, before:].cpu()
