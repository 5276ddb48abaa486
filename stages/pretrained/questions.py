"""The same question about each image of a batch, in the form of a model's own chat template.

transformers' processor turns it into tokens for each image again, although they depend only on the image's size: for
1,200 tokens about one image that takes two milliseconds, which is a tenth of the time of a fast model. Here they are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BatchFeature

SIZES_KEPT = 1024  # a few kB each


class Questions:
    """What a model's `generate` gets for a batch of images and a question about each of them."""

    def __init__(self, processor: Any, question: str) -> None:
        self.processor, self.question = processor, question
        self.padding = {"input_ids": processor.tokenizer.pad_token_id}  # all else has zeros
        self.reads_images_alone = self._reads_images_alone()
        self.find_text = lru_cache(SIZES_KEPT)(self._find_text)

    def __call__(self, pixels: Sequence[Tensor]) -> BatchFeature:
        """pixels: uint8 [3, height, width] each. Texts are on the host, [images, tokens], padded on the left."""
        if not self.reads_images_alone:
            return self._process(pixels, self.question)
        images = self._process(pixels)
        texts = [self.find_text(*image.shape[1:], str(image.device)) for image in pixels]
        tokens = max(len(text["input_ids"]) for text in texts)
        padded = {
            name: torch.stack(
                [
                    F.pad(text[name], (tokens - len(text[name]), 0), value=self.padding.get(name, 0))
                    for text in texts
                ]
            )
            for name in texts[0]
        }
        return BatchFeature({**padded, **images})

    def _find_text(self, height: int, width: int, device: str) -> dict[str, Tensor]:
        """The tokens of the question about an image of this size, and what else belongs to each, by name."""
        blank = [torch.zeros(3, height, width, dtype=torch.uint8, device=device)]
        whole, image = self._process(blank, self.question), self._process(blank)
        return {name: values[0] for name, values in whole.items() if name not in image}

    def _reads_images_alone(self) -> bool:
        """Some processors cannot: their code needs a text."""
        try:
            self._process([torch.zeros(3, 64, 64, dtype=torch.uint8)])
        except (TypeError, ValueError):
            return False
        return True

    def _process(self, pixels: Sequence[Tensor], question: str = "") -> BatchFeature:
        asked = {
            "text": [question] * len(pixels),
            "padding": True,
            "padding_side": "left",  # so that the first new token of all texts is at the same place
        }
        inputs: BatchFeature = self.processor(
            images=[[image] for image in pixels],
            **(asked if question else {}),
            input_data_format="channels_first",
            device=pixels[0].device,
            return_tensors="pt",
        )
        return inputs
