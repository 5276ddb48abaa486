"""What the stages of transformers' vision models share: loading, preprocessing, batches, the first layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoImageProcessor

from stages.contract.base import Image, Stage, StageSpec, StageUnusable
from stages.contract.descriptor import SMALL, KnownModel
from stages.images.devices import dtype_of, hold_device, pixels_of, split_batches, synchronize, warm_up_size
from stages.images.resize import ImageProcessor
from stages.pretrained.checkpoints import load_known, load_part
from stages.pretrained.familiarity import Familiarity, load_familiarity
from stages.pretrained.recording import recording_single

Output = TypeVar("Output")

BLANK_SIZE = 480, 640  # of the images for warming up


class VisionStage(Stage, Generic[Output]):
    """A stage that runs batches of preprocessed images through a model with a vision tower."""

    models: ClassVar[tuple[KnownModel, ...]]  # those that it takes, as in its descriptor
    processor: ClassVar[Any] = ImageProcessor
    familiarity = Familiarity()

    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        cls.launch_resize(cls.load_processor(spec, "cpu"))

    @classmethod
    def launch_resize(cls, prepare: Any) -> None:
        """Launch the kernels of the preprocessing, as launch_kernels."""
        if isinstance(prepare, ImageProcessor) and prepare.antialias:
            prepare.prepare_with_kernels([torch.zeros(3, *BLANK_SIZE, dtype=torch.uint8)])

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        """The preprocessing of the model in the stage's folder. Raises StageUnusable."""
        folder = spec.files["model"]
        settings = load_part("image processor", AutoImageProcessor, folder, trust_remote_code=False)
        try:
            return cls.processor(settings, device, dtype_of(spec))
        except ValueError as error:
            raise StageUnusable(f"{spec.name}: the model in {folder} cannot be used: {error}") from error

    @abstractmethod
    def forward(self, pixels: Sequence[Tensor]) -> Output:
        """The model's answer for a batch of images, uint8 [3, height, width] each, copied to the host."""

    def load_vision_model(self) -> Any:
        """The model in the stage's folder; self.prepare becomes its preprocessing, and self.familiarity what its
        pack says about unfamiliar images. Raises StageUnusable."""
        self.prepare = self.load_processor(self.spec, self.device)
        self.familiarity = load_familiarity(self.spec, self.device, self.lock)
        spec = self.spec
        small = spec.dtype if spec.dtype in SMALL else ""
        return load_known(self.models, spec.files["model"], dtype_of(spec), self.device, spec.spread, small)

    def warm_up(self) -> None:
        """Run black images. Call it while the device is held."""
        blank = torch.zeros(3, *BLANK_SIZE, dtype=torch.uint8, device=self.device)
        self.forward([blank] * warm_up_size(self.device, self.spec.batch_size))
        with recording_single(self.spec, self.device) as records:
            if records:
                self.forward([blank])
        synchronize(self.device)

    def forward_batches(self, images: Sequence[Image]) -> Iterator[tuple[Sequence[Image], Output]]:
        """Batches of at most batch_size images, each with the model's answer. The device is free while a batch is used."""
        for batch in split_batches(images, self.spec.batch_size):
            with hold_device(self.lock):
                output = self.forward(pixels_of(batch))
            yield batch, output


class Patches(nn.Module):
    """The first layer of a vision tower as a matrix product: it is a convolution whose windows do not overlap.

    cuDNN takes at least four times as long for it, and plans it again for every thread and batch size. Its result also
    has the channels before the pixels in memory, which makes all that follows slower.
    """

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [batch, channels, (frames,) height, width]. Returns [batch, dim, (moments,) rows, columns]."""
        window, size = self.weight.shape[2:], pixels.shape[2:]
        counts = [length // side for length, side in zip(size, window, strict=True)]
        for dim, (count, side) in enumerate(zip(counts, window, strict=True), 2):
            pixels = pixels.narrow(dim, 0, count * side)  # as a convolution, which leaves the rest out
        tiles = pixels.reshape(
            *pixels.shape[:2], *(each for pair in zip(counts, window, strict=True) for each in pair)
        )
        places = range(2, tiles.ndim, 2)
        patches = tiles.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + len(counts))
        return F.linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


def is_patching(part: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Whether a part of a model is such a convolution."""
    return (
        isinstance(part, nn.Conv2d | nn.Conv3d)
        and part.kernel_size == part.stride
        and max(part.kernel_size) > 1
        and part.groups == 1
        and not any((0,) if isinstance(part.padding, str) else part.padding)
        and part.padding != "same"
        and {*part.dilation} == {1}
    )


def speed_up_patches(vision: Any) -> None:
    """Replace the first layer of a BlipVisionModel or a CLIP vision model by Patches with the same weights."""
    vision.embeddings.patch_embedding = Patches(vision.embeddings.patch_embedding)
