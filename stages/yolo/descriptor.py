"""Describes the stage YOLO for the rest of the program. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from stages.contract.base import Image
from stages.contract.binning import measure_dispersion
from stages.contract.descriptor import Backend, Descriptor, KnownModel
from stages.contract.invented import LABELS
from stages.contract.options import Count, Fraction
from stages.contract.recognition import make_backend
from stages.yolo import recognition

FILES = {"weights": "yolo.safetensors", "config": "yolo.json"}  # by role, in a pack
DETECTORS = tuple(
    KnownModel(kind, f"{name}ForObjectDetection", description, parts=("image processor",))
    for kind, name, description in (
        ("rt_detr", "RTDetr", "RT-DETR"),
        ("rt_detr_v2", "RTDetrV2", "RT-DETRv2"),
        ("d_fine", "DFine", "D-FINE"),
        ("deimv2", "Deimv2", "DEIMv2"),
        ("rf_detr", "RfDetr", "RF-DETR"),
        ("lw_detr", "LwDetr", "LW-DETR"),
        ("detr", "Detr", "DETR"),
        ("conditional_detr", "ConditionalDetr", "Conditional DETR"),
        ("deformable_detr", "DeformableDetr", "Deformable DETR"),
        ("dab-detr", "DabDetr", "DAB-DETR"),
        ("yolos", "Yolos", "YOLOS"),
    )
)
# Types whose images keep their proportions.
OF_ANY_SHAPE = ("detr", "conditional_detr", "deformable_detr", "dab-detr", "yolos")
OPEN_VOCABULARY = (KnownModel("owlv2", "Owlv2ForObjectDetection", "OWLv2", has_size=True),)

LeastScore = Annotated[Fraction, Meta(description="Objects with a lower score are not in the result.")]
MostObjects = Annotated[
    Count, Meta(description="Most objects of an image; those with the highest scores are kept.")
]


Box = tuple[float, float, float, float]  # x0, y0, x1, y1


def overlap(one: Box, other: Box) -> float:
    """Intersection over union."""
    shared = max(0.0, min(one[2], other[2]) - max(one[0], other[0])) * max(
        0.0, min(one[3], other[3]) - max(one[1], other[1])
    )
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / (areas - shared) if areas > shared else 0.0


class Detection(msgspec.Struct, frozen=True):
    """One object."""

    label: str
    score: float
    box: Box


class Objects(msgspec.Struct, frozen=True):
    """The objects in an image."""

    detections: list[Detection]  # highest score first
    count: int
    unique: int  # distinct labels
    dispersion: float  # bounding box of the detections' centers / area of the image

    @classmethod
    def of(
        cls, labels: Sequence[str], scores: Sequence[float], boxes: Sequence[Sequence[float]], image: Image
    ) -> Objects:
        """boxes: corners x0, y0, x1, y1 in pixels of the image."""
        detections = [
            Detection(label, round(score, 5), (round(x0, 2), round(y0, 2), round(x1, 2), round(y1, 2)))
            for label, score, (x0, y0, x1, y1) in zip(labels, scores, boxes, strict=True)
        ]
        detections.sort(key=lambda detection: -detection.score)
        unique = len({detection.label for detection in detections})
        dispersion = measure_dispersion([each.box for each in detections], image.width * image.height)
        return cls(detections, len(detections), unique, round(dispersion, 6))


class YoloOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As ultralytics' options of the same names."""

    conf: LeastScore = 0.25
    iou: Annotated[
        Fraction,
        Meta(
            description="If two boxes of a class overlap by more (intersection over union), the better one stays."
        ),
    ] = 0.7
    max_det: MostObjects = 300
    imgsz: Annotated[
        Count | None,
        Meta(
            description="Pixels of the longer side for the network, a multiple of its stride; not set: as the weights say."
        ),
    ] = None
    allow_pickle: Annotated[
        bool,
        Meta(
            description="Whether a .pt file may be read. It can run code: allow it only for files that you trust."
        ),
    ] = False


class DetrOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Detectors without suppression."""

    conf: LeastScore = 0.5
    max_det: MostObjects = 300


class Owlv2Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Objects of any names."""

    labels: Annotated[
        list[str],
        Meta(min_length=1, description="What to look for: the words that become the labels of objects."),
    ]
    template: Annotated[
        str,
        Meta(pattern=r"\{\}", description="The text that stands for a label; {} is replaced by the label."),
    ] = "a photo of a {}"
    conf: LeastScore = 0.1
    max_det: MostObjects = 300


def find(path: Path) -> dict[str, str]:
    """A .pt file, or a safetensors file with a yolo.json."""
    if path.is_dir():
        return FILES if all((path / file).is_file() for file in FILES.values()) else {}
    if path.suffix == ".pt":
        return {"weights": path.name}
    if path.suffix == ".safetensors" and (path.parent / FILES["config"]).is_file():
        return {"weights": path.name, "config": FILES["config"]}
    return {}


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Objects:
    """0 to 6 objects on the image's diagonal, each with a tenth of its width and height."""
    count = variant % 7
    corners = [0.12 * index for index in range(count)]
    detections = [
        Detection(
            LABELS[(variant + index) % (1 + variant % len(LABELS))],
            0.9 - 0.1 * index,
            (corner * width, corner * height, (corner + 0.1) * width, (corner + 0.1) * height),
        )
        for index, corner in enumerate(corners)
    ]
    unique = len({detection.label for detection in detections})
    return Objects(detections, count, unique, (corners[-1] if corners else 0.0) ** 2)


YOLO = Descriptor(
    name="yolo",
    key="objects",
    result=Objects,
    backends={
        "ultralytics": Backend(
            place="stages.yolo.stage:YoloStage",
            options=YoloOptions,
            silent=frozenset({"allow_pickle"}),
            version=2,
            find=find,
            check=recognition.check,
            find_license=recognition.find_license,
        ),
        "transformers": make_backend("stages.yolo.detr:DetrStage", DetrOptions, DETECTORS, version=2),
        "owlv2": make_backend("stages.yolo.owlv2:Owlv2Stage", Owlv2Options, OPEN_VOCABULARY),
    },
    half="float16",  # bfloat16 loses some objects
    cost=0.08,
    takes_memory=True,
    fake=fake,
)
