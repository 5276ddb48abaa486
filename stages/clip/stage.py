"""CLIP: an embedding of each image, and the labels nearest to it.

Reference: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, and
transformers' CLIPModel and CLIPImageProcessor, with which the tests compare this stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPModel

from stages.base import Image, ImageError, Result
from stages.clip.descriptor import Clip, ClipOptions, Tag
from stages.clip.embeddings import TextTower, encode_embedding
from stages.devices import hold_device
from stages.options import read_options
from stages.vision import VisionStage, speed_up_patches


class ClipStage(VisionStage[tuple[Tensor, Tensor, Tensor]]):
    def load(self) -> None:
        self.options = read_options(self.spec, ClipOptions)
        model = self.load_vision_model(CLIPModel)
        speed_up_patches(model.vision_model)
        self.vision, self.projection = model.vision_model, model.visual_projection
        self.labels = self._read_labels()
        with hold_device(self.lock):
            self.label_logits = self._embed_labels(model) * model.logit_scale.exp().float()
            self.warm_up()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for _, (embeddings, scores, places) in self.forward_batches(images):
            for embedding, row, indices in zip(embeddings, scores.tolist(), places.tolist(), strict=True):
                tags = [
                    Tag(self.labels[index], round(score, 6))
                    for score, index in zip(row, indices, strict=True)
                ]
                results.append(Clip(encode_embedding(embedding), tags))
        return results

    def forward(self, pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """On the host: unit embeddings [images, dim], and the
        scores and indices of the most likely labels [images, k]."""
        features = self.projection(self.vision(pixel_values=self.prepare(pixels)).pooler_output)
        embeddings = F.normalize(features.float(), dim=-1)
        likelihoods = (embeddings @ self.label_logits.T).softmax(dim=-1)
        scores, places = likelihoods.topk(min(self.options.top_k, len(self.labels)))
        return embeddings.cpu(), scores.cpu(), places.cpu()

    def _read_labels(self) -> list[str]:
        labels = self.options.labels
        if labels is None and "labels" in self.spec.files:
            labels = Path(self.spec.files["labels"]).read_text(encoding="utf-8").splitlines()
        return [label.strip() for label in labels or [] if label.strip()]

    def _embed_labels(self, model: CLIPModel) -> Tensor:
        """Unit text embeddings of the labels, [labels, dim]."""
        texts = [self.options.template.replace("{}", label) for label in self.labels]
        return TextTower(model, self.spec.files["model"]).embed_texts(texts)
