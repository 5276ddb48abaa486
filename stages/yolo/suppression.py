"""From the predictions of a YOLO network to the boxes of each image."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms

# Boxes of different classes are this far apart, so that none suppresses another: more than any canvas has pixels.
APART = 7680


def keep_confident(predictions: Tensor, confidence: float) -> Tensor:
    """The anchors of [images, 4 + classes, anchors] that any image may need, the highest score first.

    It is faster to process the few hundred boxes above the threshold on the host, while the device runs the next batch.
    """
    scores = predictions[:, 4:].amax(dim=1)
    most = int((scores > confidence).sum(dim=1).max())
    kept = scores.topk(most, dim=1).indices
    return predictions.gather(2, kept[:, None].expand(-1, predictions.shape[1], -1))


def suppress(predictions: Tensor, confidence: float, overlap: float, most: int) -> list[Tensor]:
    """The best boxes of each image: [boxes, 6], corners, score and class, the highest score first.

    predictions: [images, 4 + classes, anchors], center and sides, and the score of each class. Of two boxes of a class
    that overlap by more (intersection over union) the one with the higher score stays.
    """
    scores, classes = predictions[:, 4:].max(dim=1, keepdim=True)
    centers, halves = predictions[:, :2], predictions[:, 2:4] / 2
    boxes = torch.cat((centers - halves, centers + halves, scores, classes), dim=1).transpose(1, 2)
    places = boxes[..., :4] + boxes[..., 5:] * APART
    found = []
    for rows, apart, sure in zip(boxes, places, scores[:, 0] > confidence, strict=True):
        kept = sure.nonzero()[:, 0]
        if len(kept) > 1:
            kept = kept[nms(apart[kept], rows[kept, 4], overlap)]
        found.append(rows[kept[:most]])
    return found


def select(predictions: Tensor, confidence: float, most: int) -> list[Tensor]:
    """As suppress, for a network that is end to end. predictions: [images, objects, 6], the highest score first."""
    return [rows[rows[:, 4] > confidence][:most] for rows in predictions]
