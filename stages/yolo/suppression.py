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
    kept = scores.topk(min(most, scores.shape[1]), dim=1).indices
    return predictions.gather(2, kept[:, None].expand(-1, predictions.shape[1], -1))


def suppress(prediction: Tensor, confidence: float, overlap: float, most: int) -> Tensor:
    """The best boxes of an image: [boxes, 6], corners, score and class, the highest score first.

    prediction: [4 + classes, anchors], center and sides, and the score of each class. Of two boxes of a class that
    overlap by more (intersection over union) the better one stays.
    """
    scores, classes = prediction[4:].max(dim=0)
    sure = scores > confidence
    centers, sides = prediction[:4, sure].T.chunk(2, dim=1)
    corners = torch.cat((centers - sides / 2, centers + sides / 2), dim=1)
    scores, classes = scores[sure], classes[sure].float()
    kept = nms(corners + classes[:, None] * APART, scores, overlap)[:most]
    return torch.cat((corners[kept], scores[kept, None], classes[kept, None]), dim=1)


def choose(prediction: Tensor, confidence: float, most: int) -> Tensor:
    """As suppress, for a network that is end to end. prediction: [objects, 6], the highest score first."""
    return prediction[prediction[:, 4] > confidence][:most]
