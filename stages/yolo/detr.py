"""Detectors of transformers that answer with a fixed number of queries: DETR and its descendants, and YOLOS.

Reference: Carion et al., "End-to-End Object Detection with Transformers", 2020. No two queries stand for the same object, so
nothing is suppressed. The tests compare boxes, labels and scores with those of transformers' own processor and model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contract.base import Image, StageSpec, StageUnusable
from stages.contract.options import read_options
from stages.contract.recognition import name_model
from stages.images.devices import group_places, hold_device
from stages.images.geometry import BoxGeometry, EdgeGeometry
from stages.images.resize import ImageProcessor
from stages.pretrained.convolutions import fold_norms
from stages.yolo.candidates import Candidates, CandidateStage, corners_of
from stages.yolo.descriptor import DETECTORS, OF_ANY_SHAPE, DetrOptions, Objects
from stages.yolo.recognition import has_name

# Types whose attention leaves padding out; the others see it.
WITH_MASKS = ("rf_detr", "lw_detr", "detr", "conditional_detr", "deformable_detr", "dab-detr")
WITH_NOTHING = ("detr", "yolos")  # whose last class is "no object", so that each query has one class


class DetectorProcessor(ImageProcessor):
    geometries = EdgeGeometry


class DetrStage(CandidateStage):
    models = DETECTORS
    processor = DetectorProcessor

    def load(self) -> None:
        self.options = read_options(self.spec, DetrOptions)
        self.take_model(self.load_vision_model())
        fold_norms(self.model)
        self.model.to(memory_format=torch.channels_last)  # the order that tensor cores read
        with hold_device(self.lock):
            self.warm_up()

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        prepare, folder = super().load_processor(spec, device), spec.files["model"]
        if isinstance(prepare.geometry, EdgeGeometry) and name_model(Path(folder))[0] not in OF_ANY_SHAPE:
            raise StageUnusable(
                f"{spec.name}: the model in {folder} takes images of one size, and its preprocessor_config.json asks for a "
                "shortest_edge and a longest_edge. Write a height and a width there, as size."
            )
        return prepare

    def take_model(self, model: Any) -> None:
        """self.prepare is its preprocessing."""
        self.model, kind = model, model.config.model_type
        self.masks = kind in WITH_MASKS and isinstance(self.prepare.geometry, BoxGeometry)
        self.has_nothing = kind in WITH_NOTHING
        labels = model.config.id2label.items()
        self.labels = {number: "" if label is None else str(label) for number, label in labels}

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best candidates, the highest score first. Corners are shares of the image's sides.

        Images whose inputs have different sizes run one size after another: padding would change their answers a little.
        """
        groups = group_places(map(self.prepare.size_for, pixels)).values()
        parts = [self._detect([pixels[place] for place in places]) for places in groups]
        order = torch.tensor([place for places in groups for place in places]).argsort()
        best, numbers, boxes = (torch.cat(part)[order] for part in zip(*parts, strict=True))
        return best, numbers, boxes

    def _detect(self, pixels: Sequence[Tensor]) -> Candidates:
        """As `forward`, of images whose inputs have one size."""
        output = self.model(**self.inputs(pixels))
        logits = output.logits.float()
        if self.has_nothing:
            scores, classes = logits.softmax(-1)[..., :-1].max(-1)
            best, queries = scores.sort(descending=True)
            numbers = classes.gather(1, queries)
        else:
            _, count, width = logits.shape
            best, places = logits.sigmoid().flatten(1).topk(count)
            queries, numbers = places // width, places % width
        boxes = corners_of(output.pred_boxes).gather(1, queries[..., None].expand(-1, -1, 4))
        return best.cpu(), numbers.cpu(), boxes.cpu()

    def inputs(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the model gets of images whose inputs have one size."""
        prepared = self.prepare(pixels).contiguous(memory_format=torch.channels_last)
        return {"pixel_values": prepared} | ({"pixel_mask": self.mask(pixels)} if self.masks else {})

    def mask(self, pixels: Sequence[Tensor]) -> Tensor:
        """Where each image is in its box: int64 [images, height, width], 1 for a pixel of the image and 0 for padding."""
        geometry = self.prepare.geometry
        masks = torch.zeros(len(pixels), *geometry.kept, dtype=torch.int64, device=self.device)
        for mask, image in zip(masks, pixels, strict=True):
            height, width = geometry.place(*image.shape[1:]).resized
            mask[:height, :width] = 1
        return masks

    def choose(self, scores: Tensor, numbers: Tensor, corners: Tensor, image: Image) -> Objects:
        count = int((scores > self.options.conf).sum())
        labels = [self.labels.get(number, "") for number in numbers[:count].tolist()]
        kept = [place for place, label in enumerate(labels) if has_name(label)][: self.options.max_det]
        down, across = self.filled(image)
        shares = (corners[kept] / torch.tensor([across, down] * 2)).clamp(0, 1)
        boxes = shares * torch.tensor([image.width, image.height] * 2)
        return Objects.of([labels[place] for place in kept], scores[kept].tolist(), boxes.tolist(), image)

    def filled(self, image: Image) -> tuple[float, float]:
        """The shares of the input's height and width that the image fills.

        Boxes are shares of the whole input, with the padding below and to the right of the image where its processor asks
        for that: so are those that transformers trains with, also for models that leave padding out.
        """
        geometry = self.prepare.geometry
        resized = geometry.place(image.height, image.width).resized
        down, across = (part / whole for whole, part in zip(geometry.kept or resized, resized, strict=True))
        return down, across
