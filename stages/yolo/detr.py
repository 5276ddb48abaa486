"""Detectors of transformers that answer with a fixed number of queries: RT-DETR, D-FINE, DEIMv2, RF-DETR, LW-DETR.

Reference: Carion et al., "End-to-End Object Detection with Transformers", 2020. No two queries stand for the same
object, so nothing is suppressed. The tests compare boxes, labels and scores with those of transformers' own
processor and model.
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
from stages.images.devices import hold_device
from stages.images.geometry import BoxGeometry
from stages.pretrained.convolutions import fold_norms
from stages.yolo.candidates import Candidates, CandidateStage, corners_of
from stages.yolo.descriptor import DETECTORS, DetrOptions, Objects
from stages.yolo.objects import describe
from stages.yolo.recognition import has_name

WITH_MASKS = ("rf_detr", "lw_detr")  # whose attention must not see padding; the others of transformers see it


class DetrStage(CandidateStage):
    models = DETECTORS

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        prepare, folder = super().load_processor(spec, device), spec.files["model"]
        if isinstance(prepare.geometry, BoxGeometry) and name_model(Path(folder))[0] in WITH_MASKS:
            raise StageUnusable(
                f"{spec.name}: the model in {folder} cannot be used: its preprocessor_config.json asks for padding, which "
                "visiond does not hide from models of this type. Train and save it with a height and a width as size."
            )
        return prepare

    def load(self) -> None:
        self.options = read_options(self.spec, DetrOptions)
        self.model = self.load_vision_model()
        fold_norms(self.model)
        self.model.to(memory_format=torch.channels_last)  # the order that tensor cores read
        labels = self.model.config.id2label.items()
        self.labels = {number: "" if label is None else str(label) for number, label in labels}
        with hold_device(self.lock):
            self.warm_up()

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best candidates, the highest score first. Corners are shares of the image's sides."""
        prepared = self.prepare(pixels).contiguous(memory_format=torch.channels_last)
        output = self.model(pixel_values=prepared)
        scores = output.logits.float().sigmoid()
        _, queries, classes = scores.shape
        best, places = scores.flatten(1).topk(queries)
        boxes = corners_of(output.pred_boxes).gather(1, (places // classes)[..., None].expand(-1, -1, 4))
        return best.cpu(), (places % classes).cpu(), boxes.cpu()

    def choose(self, scores: Tensor, numbers: Tensor, corners: Tensor, image: Image) -> Objects:
        count = int((scores > self.options.conf).sum())
        labels = [self.labels.get(number, "") for number in numbers[:count].tolist()]
        kept = [place for place, label in enumerate(labels) if has_name(label)][: self.options.max_det]
        geometry = self.prepare.geometry
        resized = geometry.place(image.height, image.width).resized
        # The model sees padding below and to the right of the image, where its processor asks for that.
        down, across = (whole / part for whole, part in zip(geometry.kept, resized, strict=True))
        shares = (corners[kept] * torch.tensor([across, down] * 2)).clamp(0, 1)
        boxes = shares * torch.tensor([image.width, image.height] * 2)
        return describe([labels[place] for place in kept], scores[kept].tolist(), boxes.tolist(), image)
