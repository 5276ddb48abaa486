"""What the detectors of transformers share: from candidates on the host to the objects of each image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stages.contract.base import Image, ImageError, Result
from stages.pretrained.vision import VisionStage
from stages.yolo.descriptor import Objects

# Of each image: scores [images, n], numbers of labels [images, n], and corners of boxes as shares [images, n, 4].
Candidates = tuple[Tensor, Tensor, Tensor]


class CandidateStage(VisionStage[Candidates]):
    """A detector. `forward` returns its candidates on the host."""

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch, candidates in self.forward_batches(images):
            for image, scores, numbers, corners in zip(batch, *candidates, strict=True):
                results.append(self.choose(scores, numbers, corners, image))
        return results

    @abstractmethod
    def choose(self, scores: Tensor, numbers: Tensor, corners: Tensor, image: Image) -> Objects:
        """The objects of one image, from its candidates."""


def corners_of(boxes: Tensor) -> Tensor:
    """Center and sides [..., 4] to the corners x0, y0, x1, y1, in float32."""
    centers, sides = boxes.float().chunk(2, dim=-1)
    return torch.cat((centers - 0.5 * sides, centers + 0.5 * sides), dim=-1)
