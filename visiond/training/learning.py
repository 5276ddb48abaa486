"""What the trainings of all models share: a model that learns, and the images that it learns from."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind
from daemon.labels.metrics import Measure
from stages.contract.base import Image, ImageError, Limits, OutOfMemory
from stages.contract.descriptor import KnownModel
from stages.contract.folders import remove_folder
from stages.contract.recognition import MODEL_PARTS
from stages.images.decoder import Decoders
from stages.images.devices import pixels_of
from stages.images.images import read_images
from stages.pretrained.checkpoints import find_kind
from visiond.training.data import LabelledImage
from visiond.training.hardware import TrainingBatches

KEPT = {  # files of the base that the result has too
    *(name for names in MODEL_PARTS.values() for name in names),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("generation_config.json", "chat_template.json", "chat_template.jinja"),
}


def load_to_train(models: Sequence[KnownModel], base: Path, **changes: Any) -> Any:
    """The model in a folder, in float32. changes: of its configuration; weights that then have another shape are new ones."""
    return find_kind(models, str(base)).from_pretrained(
        base,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=bool(changes),
        **changes,
    )


class TrainingImages:
    """Reads the images of samples as a worker does: upright, RGB, in the full size."""

    def __init__(self, samples: Sequence[LabelledImage], device: torch.device, decoders: Decoders) -> None:
        self.samples, self.device, self.decoders = samples, device, decoders

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, places: Sequence[int] | npt.NDArray[np.int64]) -> list[Image]:
        """Raises WrongArgument for a file that has gone or cannot be decoded."""
        files = [Path(self.samples[place].file) for place in places]
        try:
            return read_images(files, self.device, self.decoders, Limits())
        except OutOfMemory as error:  # the stages' name for it
            raise torch.OutOfMemoryError(str(error)) from error
        except (OSError, ImageError):
            for file in files:
                self._check(file)
            raise

    def _check(self, file: Path) -> None:
        """Raises WrongArgument for a file that has gone or cannot be decoded."""
        try:
            read_images([file], self.device, self.decoders, Limits())
        except (OSError, ImageError) as error:
            raise WrongArgument(
                f"{file} cannot be read any more: {error}. Remove its labels, or restore it."
            ) from error

    def mirror(
        self, images: Sequence[Image], rng: np.random.Generator, *, flip: bool
    ) -> tuple[list[Tensor], list[bool]]:
        """The pixels; with flip, of half of the images mirrored: of which ones."""
        turned = ((rng.random(len(images)) < 0.5) & flip).tolist()
        pixels = zip(pixels_of(images), turned, strict=True)
        return [each.flip(2) if turn else each for each, turn in pixels], turned


class Learner(nn.Module):
    """A model that learns from batches. heads: parts of the names of the weights that alone are trained with --head-only."""

    kind: ClassVar[Kind]  # of labels
    heads: ClassVar[tuple[str, ...]]
    skips_weights = False
    model: Any

    @abstractmethod
    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Losses by name; "loss" is the sum of all."""

    @abstractmethod
    def answer(self, images: Sequence[Image]) -> list[Any]:
        """Of each image, what is compared with its label."""

    @abstractmethod
    def measure(self, samples: Sequence[LabelledImage], answers: Sequence[Any]) -> Measure: ...

    @abstractmethod
    def batches(self, pictures: TrainingImages, *, flip: bool) -> TrainingBatches: ...

    def freeze_body(self) -> None:
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(any(part in name for part in self.heads))

    def save_memory(self) -> None:
        """Compute the activations of each layer again for the gradient, instead of keeping them."""
        for layer in _layers(self.model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def save(self, base: Path, folder: Path) -> None:
        """The whole folder that `model =` takes, in the place of an earlier one."""
        remove_folder(folder)
        self.model.save_pretrained(folder)
        for file in base.iterdir():
            if file.name in KEPT and not (folder / file.name).exists():
                shutil.copy(file, folder)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Those that follow each other in the outermost lists, but for such as keep statistics of what they see."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (
                each for each in child if not any(isinstance(m, nn.BatchNorm2d) for m in each.modules())
            )
        else:
            yield from _layers(child)
