"""Detectors of transformers that answer with a fixed number of queries: RT-DETR, D-FINE, DEIMv2, RF-DETR, LW-DETR.

Reference: Carion et al., "End-to-End Object Detection with Transformers", 2020. No two queries stand for the same
object, so nothing is suppressed. The tests compare boxes, labels and scores with those of transformers' own
processor and model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.base import Image, ImageError, Result
from stages.devices import hold_device
from stages.options import read_options
from stages.vision import VisionStage
from stages.yolo.descriptor import DETECTORS, DetrOptions, Objects
from stages.yolo.objects import describe

# Of each image, the highest score first: scores [images, n], classes [images, n], and corners of boxes as
# shares of the image's sides [images, n, 4].
Candidates = tuple[Tensor, Tensor, Tensor]


class DetrStage(VisionStage[Candidates]):
    models = DETECTORS

    def load(self) -> None:
        self.options = read_options(self.spec, DetrOptions)
        self.model = self.load_vision_model()
        self.labels = self.model.config.id2label
        with hold_device(self.lock):
            self.warm_up()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch, candidates in self.forward_batches(images):
            for image, scores, classes, corners in zip(batch, *candidates, strict=True):
                results.append(self._describe(scores, classes, corners, image))
        return results

    def forward(self, pixels: Sequence[Tensor]) -> Candidates:
        """The best candidates, on the host."""
        output = self.model(pixel_values=self.prepare(pixels))
        scores = output.logits.float().sigmoid()
        _, queries, classes = scores.shape
        best, places = scores.flatten(1).topk(min(self.options.max_det, queries))
        centers, sides = output.pred_boxes.float().split(2, dim=-1)
        corners = torch.cat((centers - 0.5 * sides, centers + 0.5 * sides), dim=-1)
        boxes = corners.gather(1, (places // classes)[..., None].expand(-1, -1, 4))
        return best.cpu(), (places % classes).cpu(), boxes.cpu()

    def _describe(self, scores: Tensor, classes: Tensor, corners: Tensor, image: Image) -> Objects:
        kept = int((scores > self.options.conf).sum())
        labels = [self.labels[number] for number in classes[:kept].tolist()]
        boxes = corners[:kept].clamp(0, 1) * torch.tensor([image.width, image.height] * 2)
        return describe(labels, scores[:kept].tolist(), boxes.tolist(), image)
