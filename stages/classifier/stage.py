"""Classifiers of transformers: the score of each label.

The tests compare labels and scores with those of transformers' own processors and models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from stages.classifier.descriptor import Classes, ClassifierOptions
from stages.classifier.recognition import CLASSIFIERS, list_labels
from stages.contract.base import Image, ImageError, Reason, Result, StageUnusable
from stages.contract.descriptor import KnownModel
from stages.contract.options import read_options
from stages.images.devices import hold_device, pad_batch
from stages.images.resize import ImageProcessor
from stages.pretrained.vision import VisionStage

# Image processors whose pixels are those of transformers here. Others do more than what their settings say.
PROCESSORS = {
    "BeitImageProcessor", "BitImageProcessor", "CLIPImageProcessor", "ConvNextImageProcessor", "DeiTImageProcessor",
    "EfficientNetImageProcessor", "LevitImageProcessor", "MobileNetV1ImageProcessor", "MobileNetV2ImageProcessor",
    "MobileViTImageProcessor", "PoolFormerImageProcessor", "PvtImageProcessor", "SegformerImageProcessor",
    "SiglipImageProcessor", "ViTImageProcessor",
}  # fmt: skip
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "none": torch.clone,
}
BY_PROBLEM = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


TIMM_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # as Pillow numbers them


class ClassifierProcessor(ImageProcessor):
    def __init__(self, settings: Any, device: str, dtype: torch.dtype) -> None:
        if asked := getattr(settings, "data_config", None):  # timm's
            settings.resample = TIMM_FILTERS.get(asked["interpolation"], asked["interpolation"])
            settings.image_mean, settings.image_std = asked["mean"], asked["std"]
            settings.do_normalize, settings.do_rescale, settings.rescale_factor = True, True, 1 / 255
        elif (name := type(settings).__name__) not in PROCESSORS:
            raise ValueError(
                f"preprocessor_config.json asks for {name}, which visiond does not have for classifiers. It has "
                f"{', '.join(sorted(PROCESSORS))}."
            )
        super().__init__(settings, device, dtype)


class ClassifierStage(VisionStage[Tensor]):
    models: ClassVar[tuple[KnownModel, ...]] = CLASSIFIERS
    processor = ClassifierProcessor

    def load(self) -> None:
        self.options, folder = read_options(self.spec, ClassifierOptions), Path(self.spec.files["model"])
        self.model = self.load_vision_model()
        self.labels = list_labels(folder)
        self.activation = self.options.activation or choose_activation(self.model.config)
        with hold_device(self.lock):
            self._try(folder)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for _, batch in self.forward_batches(images):
            count = min(self.options.top_k, len(self.labels))
            results += [self._describe(*best) for best in zip(*batch.topk(count), strict=True)]
        return results

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """The score of each label, [images, labels], float32 on the host."""
        prepared = pad_batch(self.prepare(pixels), self.spec.batch_size, self.name)
        numbers: Tensor = self.model(pixel_values=prepared).logits[: len(pixels)].float()
        return ACTIVATE[self.activation](numbers).cpu()

    def _describe(self, scores: Tensor, places: Tensor) -> Result | ImageError:
        if not scores.isfinite().all():
            return ImageError(Reason.STAGE, "the classifier's scores are no numbers")
        found = {
            self.labels[place]: round(score, 6)
            for score, place in zip(scores.tolist(), places.tolist(), strict=True)
        }
        label, score = next(iter(found.items()))
        return Classes(label, score, found)

    def _try(self, folder: Path) -> None:
        """Warm up. Raises StageUnusable if the model takes other images than its processor makes, or has other labels."""
        if (count := self.model.config.num_labels) != len(self.labels):
            raise StageUnusable(
                f"{self.name}: the model in {folder} has {count} labels, and its config.json names {len(self.labels)}."
            )
        try:
            self.warm_up()
        except ValueError as error:
            height, width = self.prepare.geometry.kept
            raise StageUnusable(
                f"{self.name}: the model in {folder} refuses the images of {height} × {width} pixels that its "
                f"preprocessor_config.json asks for: {error} Copy both files again, from the same model."
            ) from error


def choose_activation(config: Any) -> str:
    """As the model was trained, by transformers' own losses."""
    return BY_PROBLEM.get(str(config.problem_type)) or ("none" if config.num_labels == 1 else "softmax")
