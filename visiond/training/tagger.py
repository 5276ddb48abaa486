"""The training of CLIP or SigLIP on tags: an image is compared with the texts of all tags, as the stage CLIP does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from daemon.core.labels import Kind
from daemon.labels.metrics import Measure, measure_tags
from stages.clip.descriptor import MODELS, ClipOptions
from stages.clip.embeddings import TextEncoder, is_sigmoid
from stages.clip.stage import SIGMOID_TEMPLATE, TEMPLATE, ClipStage
from stages.contract.base import Image, StageSpec
from stages.contract.binning import likely_tags
from stages.contract.manifest import LABELS
from stages.images.devices import pixels_of
from visiond.training.data import LabelledImage
from visiond.training.learning import Learner, TrainingImages, load_to_train

LARGEST_SCALE = 100.0  # of CLIP's logits, as in its paper


class TagLearner(Learner):
    """Radford et al., 2021, with the tags of an image as equally likely answers, or Zhai et al., 2023, where each tag is true
    or false by itself. The other tags are what an image is not, whichever images are in its batch."""

    kind: ClassVar[Kind] = Kind.TAGS
    heads = (
        *("visual_projection", "text_projection", "logit_scale", "logit_bias"),
        *("vision_model.head", "text_model.head"),
    )

    def __init__(self, base: Path, names: Sequence[str], device: torch.device) -> None:
        """names: all tags."""
        super().__init__()
        self.names = list(names)
        self.model = load_to_train(MODELS, base).to(device)
        self.prepare = ClipStage.load_processor(
            StageSpec("clip", "transformers", {"model": str(base)}), str(device)
        )
        self.encoder = TextEncoder(self.model, str(base))
        self.sigmoid = is_sigmoid(self.model)
        template = SIGMOID_TEMPLATE if self.sigmoid else TEMPLATE
        self.tokens = self.encoder.tokenize([template.replace("{}", name) for name in names])
        self.texts: Tensor | None = None  # while the model does not change

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """batch: pixel_values, and tags [images, tags], 1 for those that are true."""
        self.texts = None
        logits, tags = self._compare(batch["pixel_values"], self.encoder.embed(self.tokens)), batch["tags"]
        if self.sigmoid:
            return {"loss": F.binary_cross_entropy_with_logits(logits, tags, reduction="sum") / len(tags)}
        return {"loss": F.cross_entropy(logits, tags / tags.sum(1, keepdim=True))}

    def _compare(self, pixels: Tensor, texts: Tensor) -> Tensor:
        """Logits [images, tags], in float32."""
        seen = self.model.vision_model(pixel_values=pixels).pooler_output
        if not self.sigmoid:  # SigLIP's vision tower ends with its projection
            seen = self.model.visual_projection(seen)
        with torch.autocast(pixels.device.type, enabled=False):
            cosines = F.normalize(seen.float(), dim=-1) @ texts.float().T
            scale = self.model.logit_scale.exp()
            logits: Tensor = cosines * (scale if self.sigmoid else scale.clamp(max=LARGEST_SCALE))
            return logits + self.model.logit_bias if self.sigmoid else logits

    @torch.no_grad()
    def answer(self, images: Sequence[Image]) -> list[Any]:
        """The tags of each image that count."""
        if self.texts is None:
            self.texts = self.encoder.embed(self.tokens)
        logits = self._compare(self.prepare(pixels_of(images)), self.texts)
        likelihoods = logits.sigmoid() if self.sigmoid else logits.softmax(1)
        scores, places = likelihoods.topk(min(ClipOptions().top_k, len(self.names)))
        return [
            likely_tags([(self.names[place], score) for place, score in zip(row, column, strict=True)])
            for row, column in zip(places.tolist(), scores.tolist(), strict=True)
        ]

    def measure(self, samples: Sequence[LabelledImage], answers: Sequence[Any]) -> Measure:
        return measure_tags([each.words for each in samples], answers)

    def batches(self, pictures: TrainingImages, *, flip: bool) -> TagBatches:
        return TagBatches(self, pictures, flip=flip)

    def save(self, base: Path, folder: Path) -> None:
        super().save(base, folder)
        (folder / LABELS).write_text("".join(f"{name}\n" for name in self.names))


class TagBatches:
    def __init__(self, learner: TagLearner, pictures: TrainingImages, *, flip: bool) -> None:
        self.learner, self.pictures, self.flip = learner, pictures, flip
        self.columns = {name: column for column, name in enumerate(learner.names)}

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        pixels, _ = self.pictures.mirror(self.pictures.read(places), rng, flip=self.flip)
        tags = torch.zeros(len(places), len(self.columns))
        for row, place in enumerate(places):
            tags[row, [self.columns[word] for word in self.pictures.samples[place].words]] = 1
        return {"pixel_values": self.learner.prepare(pixels), "tags": tags.to(self.pictures.device)}
