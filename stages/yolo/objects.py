"""From the boxes of a detector to the result of the stage. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from stages.contract.base import Image
from stages.contract.binning import measure_dispersion
from stages.yolo.descriptor import Detection, Objects


def describe(
    labels: Sequence[str], scores: Sequence[float], boxes: Sequence[Sequence[float]], image: Image
) -> Objects:
    """boxes: corners x0, y0, x1, y1 in pixels of the image."""
    detections = [
        Detection(label, round(score, 5), (round(x0, 2), round(y0, 2), round(x1, 2), round(y1, 2)))
        for label, score, (x0, y0, x1, y1) in zip(labels, scores, boxes, strict=True)
    ]
    detections.sort(key=lambda detection: -detection.score)
    unique = len({detection.label for detection in detections})
    dispersion = measure_dispersion([detection.box for detection in detections], image.width * image.height)
    return Objects(detections, len(detections), unique, round(dispersion, 6))
