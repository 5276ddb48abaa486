"""Detectors of transformers that answer with a fixed number of queries: RT-DETR, D-FINE, DEIMv2, RF-DETR, LW-DETR.

Reference: Carion et al., "End-to-End Object Detection with Transformers", 2020. No two queries stand for the same
object, so nothing is suppressed. The tests compare boxes, labels and scores with those of transformers' own
processor and model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.contract.base import Image
from stages.contract.options import read_options
from stages.images.devices import hold_device
from stages.images.geometry import BoxGeometry
from stages.pretrained.convolutions import fold_norms
from stages.yolo.candidates import Candidates, CandidateStage, corners_of
from stages.yolo.descriptor import DETECTORS, DetrOptions, Objects
from stages.yolo.objects import describe
from stages.yolo.recognition import has_name

WITH_MASKS = ("rf_detr", "lw_detr")  # whose attention leaves padding out; the others see it


class DetrStage(CandidateStage):
    models = DETECTORS

    def load(self) -> None:
        self.options = read_options(self.spec, DetrOptions)
        self.take_model(self.load_vision_model())
        fold_norms(self.model)
        self.model.to(memory_format=torch.channels_last)  # the order that tensor cores read
        with hold_device(self.lock):
            self.warm_up()

    def take_model(self, model: Any) -> None:
        """self.prepare is its preprocessing."""
        self.model = model
        self.masks = model.config.model_type in WITH_MASKS and isinstance(self.prepare.geometry, BoxGeometry)
        labels = model.config.id2label.items()
        self.labels = {number: "" if label is None else str(label) for number, label in labels}

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best candidates, the highest score first. Corners are shares of the image's sides."""
        output = self.model(**self.inputs(pixels))
        scores = output.logits.float().sigmoid()
        _, queries, classes = scores.shape
        best, places = scores.flatten(1).topk(queries)
        boxes = corners_of(output.pred_boxes).gather(1, (places // classes)[..., None].expand(-1, -1, 4))
        return best.cpu(), (places % classes).cpu(), boxes.cpu()

    def inputs(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the model gets of images."""
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
        return describe([labels[place] for place in kept], scores[kept].tolist(), boxes.tolist(), image)

    def filled(self, image: Image) -> tuple[float, float]:
        """The shares of the input's height and width that the image fills.

        Boxes are shares of the whole input, with the padding below and to the right of the image where its processor asks
        for that: so are those that transformers trains with, also for models that leave padding out.
        """
        geometry = self.prepare.geometry
        resized = geometry.place(image.height, image.width).resized
        down, across = (part / whole for whole, part in zip(geometry.kept, resized, strict=True))
        return down, across
