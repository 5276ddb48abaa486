"""OWLv2: objects of any names, from a list of words.

Reference: Minderer et al., "Scaling Open-Vocabulary Object Detection", 2023. The words are embedded once; each patch
of an image then has a box and a score for each of them. The tests compare boxes, labels and scores with those of
transformers' own processor and model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contract.base import Image
from stages.contract.options import read_options
from stages.images.devices import group_places, hold_device, split_batches
from stages.images.resize import PIXELS_AT_ONCE
from stages.pretrained.checkpoints import load_tokenizer
from stages.yolo.candidates import Candidates, CandidateStage, corners_of
from stages.yolo.descriptor import OPEN_VOCABULARY, Objects, Owlv2Options

CACHED_AXES = 8  # their weights stay on the device, 5 MB for an axis of 1,280 pixels


class SquareProcessor:
    """The inputs of transformers' Owlv2ImageProcessor: an image is padded to a square, smoothed, and resized by
    interpolation between the nearest pixels."""

    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        """settings: an Owlv2ImageProcessor."""
        self.dtype, self.edge = dtype, (settings.size.height, settings.size.width)
        self.mean = torch.tensor(settings.image_mean, device=device).view(3, 1, 1)
        self.deviation = torch.tensor(settings.image_std, device=device).view(3, 1, 1)
        self._weigh = lru_cache(CACHED_AXES)(lambda *axis: weigh_inputs(*axis).to(device))

    def __call__(self, pixels: Sequence[Tensor]) -> Tensor:
        """pixels: uint8 [3, height, width] each, on the device, of any sizes."""
        batch = torch.empty(len(pixels), 3, *self.edge, dtype=self.dtype, device=self.mean.device)
        for size, places in group_places((image.shape[1], image.shape[2]) for image in pixels).items():
            for part in split_batches(places, max(PIXELS_AT_ONCE // math.prod(size), 1)):
                resized = self._resize(torch.stack([pixels[place] for place in part]).float() / 255)
                batch[part] = ((resized - self.mean) / self.deviation).to(self.dtype)
        return batch

    def _resize(self, images: Tensor) -> Tensor:
        """Images of one size. Each output is a sum over inputs of its row and of its column; the padding of the
        square is zero, so that it does not have to be there."""
        height, width = images.shape[2:]
        side = max(height, width)
        smoothed = side > max(self.edge)  # as transformers does: along both axes, or not at all
        rows, columns = (
            self._weigh(length, side, edge, smoothed)
            for length, edge in zip((height, width), self.edge, strict=True)
        )
        resized: Tensor = rows @ (images @ columns.T)
        return resized


def weigh_inputs(length: int, side: int, outputs: int, smoothed: bool) -> Tensor:
    """The weight of each input in each output along an axis, [outputs, length].

    The axis has `side` inputs, of which those from `length` on are zero. They are smoothed by a Gaussian and
    mirrored at the ends; an output is interpolated between the two inputs nearest to its center.
    """
    scale = side / outputs
    centers = ((torch.arange(outputs) + 0.5) * scale - 0.5).clamp(min=0)
    first = centers.long()
    share = centers - first
    sigma = (scale - 1) / 2
    taps = (
        torch.arange(-math.ceil(3 * sigma), math.ceil(3 * sigma) + 1) if smoothed else torch.zeros(1).long()
    )
    gaussian = torch.exp(-0.5 * (taps / sigma) ** 2) if smoothed else torch.ones(1)
    gaussian /= gaussian.sum()
    weights = torch.zeros(outputs, side)
    for nearest, part in ((first, 1 - share), ((first + 1).clamp(max=side - 1), share)):
        inputs = (nearest[:, None] + taps).abs()
        inputs = side - 1 - (side - 1 - inputs).abs()
        weights.scatter_add_(1, inputs, part[:, None] * gaussian)
    return weights[:, :length].contiguous()


class Owlv2Stage(CandidateStage):
    models = OPEN_VOCABULARY
    processor = SquareProcessor

    def load(self) -> None:
        self.options = read_options(self.spec, Owlv2Options)
        self.model = self.load_vision_model()
        texts = [self.options.template.replace("{}", label) for label in self.options.labels]
        with hold_device(self.lock):
            self.queries = self._embed_words(texts)
            self.warm_up()

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best label of each patch. Corners are shares of the image's longer side."""
        features, _ = self.model.image_embedder(self.prepare(pixels))
        patches = features.flatten(1, 2)
        queries = self.queries.expand(len(pixels), -1, -1)
        logits, _ = self.model.class_predictor(patches, queries)
        best, labels = logits.float().max(dim=-1)
        corners = corners_of(self.model.box_predictor(patches, features))
        return best.sigmoid().cpu(), labels.cpu(), corners.cpu()

    def _embed_words(self, texts: Sequence[str]) -> Tensor:
        """[texts, dim]."""
        towers = self.model.owlv2
        longest = self.model.config.text_config.max_position_embeddings
        tokens = load_tokenizer(self.spec.files["model"])(
            list(texts), padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
        )
        pooled = towers.text_model(
            tokens["input_ids"].to(self.device), attention_mask=tokens["attention_mask"].to(self.device)
        ).pooler_output
        return F.normalize(towers.text_projection(pooled), dim=-1)

    def choose(self, scores: Tensor, numbers: Tensor, corners: Tensor, image: Image) -> Objects:
        [kept] = (scores > self.options.conf).nonzero(as_tuple=True)
        kept = kept[scores[kept].argsort(descending=True, stable=True)][: self.options.max_det]
        limit = torch.tensor([image.width, image.height] * 2)
        boxes = (corners[kept] * max(image.width, image.height)).clamp(torch.zeros(4), limit)
        words = [self.options.labels[number] for number in numbers[kept].tolist()]
        return Objects.of(words, scores[kept].tolist(), boxes.tolist(), image)
