"""The training of a detector: what it learns from an image, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daemon.core.labels import Kind
from daemon.labels.metrics import Measure, ObjectMeasure
from stages.contract.base import Image, StageSpec
from stages.images.devices import pixels_of
from stages.yolo.descriptor import DETECTORS, DetrOptions
from stages.yolo.detr import DetrStage
from visiond.training.data import LabelledImage
from visiond.training.learning import Learner, TrainingImages, load_to_train

LEAST_SCORE = 0.01  # of answers that count for the scores
HEADS = ("class_embed", "bbox_embed", "enc_score_head", "enc_bbox_head", "enc_out_class", "enc_out_bbox")


class DetectorLearner(Learner):
    """RF-DETR, D-FINE and the others of transformers that the stage YOLO takes with images of one size. The loss is the
    model's own."""

    kind: ClassVar[Kind] = Kind.OBJECTS
    heads = HEADS
    skips_weights = True  # those that learn from objects, where a batch has none

    def __init__(self, base: Path, names: Sequence[str], device: torch.device) -> None:
        """names: of the classes. The head stays if it has just these, and is a new one otherwise."""
        super().__init__()
        spec = StageSpec("yolo", "transformers", {"model": str(base)}, options={"conf": LEAST_SCORE})
        self.detr = stage = DetrStage(spec, str(device))
        model = load_to_train(DETECTORS, base)
        if {str(each) for each in model.config.id2label.values()} != {*names}:
            numbered = dict(enumerate(names))
            model = load_to_train(
                DETECTORS, base, id2label=numbered, label2id={name: n for n, name in numbered.items()}
            )
        self.model = model.to(device)
        stage.options = DetrOptions(conf=LEAST_SCORE)
        stage.prepare = stage.load_processor(spec, str(device))
        stage.take_model(self.model)
        self.numbers = {label: number for number, label in stage.labels.items()}

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": self.model(**batch).loss}

    @torch.no_grad()
    def answer(self, images: Sequence[Image]) -> list[Any]:
        """Label, score and box of each object, of each image."""
        found = list[Any]()
        for image, scores, numbers, corners in zip(
            images, *self.detr.forward(pixels_of(images)), strict=True
        ):
            objects = self.detr.choose(scores, numbers, corners, image).detections
            found.append([(each.label, each.score, each.box) for each in objects])
        return found

    def measure(self, samples: Sequence[LabelledImage], answers: Sequence[Any]) -> Measure:
        return ObjectMeasure([each.objects for each in samples], answers)

    def batches(self, pictures: TrainingImages, *, flip: bool) -> ObjectBatches:
        return ObjectBatches(self, pictures, flip=flip)


class ObjectBatches:
    """Images and the objects in them, as transformers' detectors take them. flip: mirror half of the images."""

    def __init__(self, learner: DetectorLearner, pictures: TrainingImages, *, flip: bool) -> None:
        self.learner, self.pictures, self.flip = learner, pictures, flip

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
        images = self.pictures.read(places)
        pixels, mirrored = self.pictures.mirror(images, rng, flip=self.flip)
        labels = [
            self._targets(self.pictures.samples[place], image, mirrored=turned)
            for place, image, turned in zip(places, images, mirrored, strict=True)
        ]
        return {**self.learner.detr.inputs(pixels), "labels": labels}

    def _targets(self, sample: LabelledImage, image: Image, *, mirrored: bool) -> dict[str, Tensor]:
        """Centers and sizes as shares of the input. Crowds are no single objects."""
        objects = [each for each in sample.objects if not each.crowd]
        down, across = self.learner.detr.filled(image)
        corners = torch.tensor([each.box for each in objects], dtype=torch.float32).reshape(-1, 2, 2)
        corners = corners / torch.tensor([image.width, image.height])
        if mirrored:
            corners[:, :, 0] = 1 - corners[:, :, 0].flip(1)
        corners = corners * torch.tensor([across, down])
        boxes = torch.cat([corners.mean(1), corners[:, 1] - corners[:, 0]], dim=1)
        numbers = [self.learner.numbers[each.label] for each in objects]
        device = self.pictures.device
        return {
            "class_labels": torch.tensor(numbers, dtype=torch.int64).to(device),
            "boxes": boxes.to(device),
        }
