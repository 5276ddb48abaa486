"""CLIP, MetaCLIP 2 and SigLIP: an embedding of each image, and the labels nearest to it.

Reference: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021; Zhai et
al., "Sigmoid Loss for Language Image Pre-Training", 2023. The tests compare this stage with transformers' own
models and processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.clip.descriptor import MODELS, Clip, ClipOptions, Tag
from stages.clip.embeddings import TextEncoder, encode_embedding, is_sigmoid
from stages.contract.base import UNFAMILIAR, Image, ImageError, Result
from stages.contract.descriptor import KnownModel
from stages.contract.options import read_options
from stages.images.devices import hold_device, pad_batch
from stages.images.sharpness import measure_sharpness
from stages.pretrained.recording import Recorded
from stages.pretrained.vision import VisionStage, speed_up_patches

TEMPLATE, SIGMOID_TEMPLATE = "a photo of a {}", "This is a photo of {}."


class ClipStage(VisionStage[tuple[Tensor, Tensor, Tensor, list[float]]]):
    models: ClassVar[tuple[KnownModel, ...]] = MODELS

    def load(self) -> None:
        self.options, folder = read_options(self.spec, ClipOptions), self.spec.files["model"]
        model = self.load_vision_model()
        self.vision = self.speed_up(model.vision_model)
        self.tower = Recorded(lambda pixels: self.vision(pixel_values=pixels).pooler_output)
        # SigLIP's vision tower ends with its projection.
        self.projection = getattr(model, "visual_projection", nn.Identity())
        self.labels = self._read_labels()
        self.sigmoid = is_sigmoid(model)
        with hold_device(self.lock):
            scale = model.logit_scale.exp().float()
            self.label_weights = TextEncoder(model, folder).embed_texts(self._label_texts()) * scale
            self.label_bias = model.logit_bias.float() if self.sigmoid else torch.zeros_like(scale)
            self.warm_up()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch, (embeddings, scores, places, sharpness) in self.forward_batches(images):
            unfamiliar = self.familiarity.find_unfamiliar(batch)
            for embedding, row, indices, unknown, figure in zip(
                embeddings, scores.tolist(), places.tolist(), unfamiliar, sharpness, strict=True
            ):
                tags = [
                    Tag(self.labels[index], round(score, 6))
                    for score, index in zip(row, indices, strict=True)
                ]
                if tags and unknown:
                    tags = [Tag(UNFAMILIAR, 1.0)]
                results.append(Clip(encode_embedding(embedding), tags, figure))
        return results

    def forward(self, pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[float]]:
        """On the host: unit embeddings [images, dim], the scores and indices of the most likely labels [images, k], and how
        sharp the images are."""
        embeddings = F.normalize(self.projection(self.embed(pixels)).float(), dim=-1)
        if not self.labels:
            nothing = torch.empty(len(pixels), 0)
            return embeddings.cpu(), nothing, nothing.long(), measure_sharpness(pixels)
        logits = embeddings @ self.label_weights.T + self.label_bias
        likelihoods = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        scores, places = likelihoods.topk(min(self.options.top_k, len(self.labels)))
        return embeddings.cpu(), scores.cpu(), places.cpu(), measure_sharpness(pixels)

    def embed(self, pixels: Sequence[Tensor]) -> Tensor:
        """The vision tower's answer for each image, [images, dim], before its projection."""
        return self.tower(pad_batch(self.prepare(pixels), self.spec.batch_size, self.name))[: len(pixels)]

    def speed_up(self, vision: Any) -> Any:
        speed_up_patches(vision)
        return vision

    def _read_labels(self) -> list[str]:
        labels = self.options.labels
        if labels is None and "labels" in self.spec.files:
            labels = Path(self.spec.files["labels"]).read_text(encoding="utf-8").splitlines()
        return [label.strip() for label in labels or [] if label.strip()]

    def _label_texts(self) -> list[str]:
        template = self.options.template or (SIGMOID_TEMPLATE if self.sigmoid else TEMPLATE)
        return [template.replace("{}", label) for label in self.labels]
