"""Detectors of transformers that answer with a fixed number of queries: RT-DETR, D-FINE, DEIMv2, RF-DETR, LW-DETR.

Reference: Carion et al., "End-to-End Object Detection with Transformers", 2020. No two queries stand for the same
object, so nothing is suppressed. The tests compare boxes, labels and scores with those of transformers' own
processor and model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.base import Image
from stages.devices import hold_device
from stages.options import read_options
from stages.pretrained.convolutions import fold_norms
from stages.yolo.candidates import Candidates, CandidateStage, corners_of
from stages.yolo.descriptor import DETECTORS, DetrOptions, Objects
from stages.yolo.objects import describe


class DetrStage(CandidateStage):
    models = DETECTORS

    def load(self) -> None:
        self.options = read_options(self.spec, DetrOptions)
        self.model = self.load_vision_model()
        fold_norms(self.model)
        self.model.to(memory_format=torch.channels_last)  # the order that tensor cores read
        self.labels = self.model.config.id2label
        with hold_device(self.lock):
            self.warm_up()

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best candidates, the highest score first. Corners are shares of the image's sides."""
        prepared = self.prepare(pixels).contiguous(memory_format=torch.channels_last)
        output = self.model(pixel_values=prepared)
        scores = output.logits.float().sigmoid()
        _, queries, classes = scores.shape
        best, places = scores.flatten(1).topk(min(self.options.max_det, queries))
        boxes = corners_of(output.pred_boxes).gather(1, (places // classes)[..., None].expand(-1, -1, 4))
        return best.cpu(), (places % classes).cpu(), boxes.cpu()

    def choose(self, scores: Tensor, numbers: Tensor, corners: Tensor, image: Image) -> Objects:
        kept = int((scores > self.options.conf).sum())
        labels = [self.labels[number] for number in numbers[:kept].tolist()]
        boxes = corners[:kept].clamp(0, 1) * torch.tensor([image.width, image.height] * 2)
        return describe(labels, scores[:kept].tolist(), boxes.tolist(), image)
