"""Whether an image is of the kind that the models of a pack were trained on.

A model has only the words that it was trained with, and uses them for any image. A pack can have a file with a
linear classifier that separates the images of its own kind from all others, by the features of BLIP's vision tower.
A stage with this file in its manifest entry asks it about each image, so that all stages of a pack agree without
knowing each other. A stage without it does nothing more than before.

minipack/visiond_mini/familiarity.py fits the classifier.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stages.contract.base import Image, StageSpec, StageUnusable
from stages.images.devices import device_errors, hold_device, pixels_of, split_batches, synchronize

FILE = "familiarity.safetensors"
BLANK_SIZE = 480, 640
ROLES = {"familiarity": FILE, "familiarity_model": "blip"}  # in a pack, beside the files of each stage


class Familiarity:
    """What a pack knows: all images, unless it has a classifier."""

    def find_unfamiliar(self, images: Sequence[Image]) -> list[bool]:
        return [False] * len(images)


class Features:
    """What BLIP's vision tower sees in an image: the mean and the standard deviation of each value of its last
    layer over all patches.

    In float32 and without kernels of our own, so that the answers are the same on all devices.
    """

    def __init__(self, folder: str, device: str) -> None:
        """folder: of a BlipForConditionalGeneration. Raises StageUnusable."""
        # The stage YOLO needs transformers only for this.
        from transformers import AutoImageProcessor, BlipForConditionalGeneration

        from stages.images.resize import ImageProcessor
        from stages.pretrained.checkpoints import load_model, load_part

        settings = load_part("image processor", AutoImageProcessor, folder, trust_remote_code=False)
        self.processor = ImageProcessor(settings, device, torch.float32)
        self.vision = load_model(BlipForConditionalGeneration, folder, torch.float32, device).vision_model
        with torch.inference_mode(), device_errors():
            blank = torch.zeros(3, *BLANK_SIZE, dtype=torch.uint8, device=device)
            self.shape = self([blank])[0].shape  # of one image; this call also warms the model up
            synchronize(device)

    def __call__(self, pixels: Sequence[Tensor]) -> Tensor:
        """pixels: uint8 [3, height, width] each, on the device. Returns [images, 2 · dim]."""
        prepared = self.processor.prepare_in_torch(pixels)
        hidden: Tensor = self.vision(pixel_values=prepared).last_hidden_state
        patches = hidden[:, 1:]  # the first is the token for the whole image
        return torch.cat((patches.mean(dim=1), patches.std(dim=1)), dim=1)


# By folder and device. The stages of a worker share one model. Their threads may run it at the same time, so a call must change
# nothing in it.
_shared: WeakValueDictionary[tuple[str, str], Features] = WeakValueDictionary()
_sharing = threading.Lock()


def share_features(folder: str, device: str) -> Features:
    """Raises StageUnusable."""
    with _sharing:
        features = _shared.get((folder, device)) or Features(folder, device)
        return _shared.setdefault((folder, device), features)


class FittedFamiliarity(Familiarity):
    """The classifier of a pack."""

    def __init__(self, files: Mapping[str, str], device: str, lock: threading.Lock, batch_size: int) -> None:
        """lock: of the stage, held while the device is used. Raises StageUnusable."""
        self.file, self.lock, self.batch_size = files["familiarity"], lock, batch_size
        self.features = share_features(files["familiarity_model"], device)
        self.weight, self.bias = read_classifier(files["familiarity"], device)
        if self.features.shape != self.weight.shape:
            raise StageUnusable(
                f"{files['familiarity']} was not made for the model in {files['familiarity_model']}; fit it again with "
                "`python -m visiond_mini.familiarity PACK`."
            )

    def find_unfamiliar(self, images: Sequence[Image]) -> list[bool]:
        """Images that another stage of this process has asked about with the same classifier are not judged again."""
        new = [image for image in images if image.unfamiliar is None or image.unfamiliar[0] != self.file]
        for batch in split_batches(new, self.batch_size):
            with hold_device(self.lock):
                scores = self.features(pixels_of(batch)) @ self.weight + self.bias
                answers = (scores > 0).tolist()
            for image, answer in zip(batch, answers, strict=True):
                image.unfamiliar = self.file, answer
        return [image.unfamiliar == (self.file, True) for image in images]


def read_classifier(file: str, device: str) -> tuple[Tensor, Tensor]:
    """Weight [2 · dim] and bias []: a positive score means unfamiliar. Raises StageUnusable."""
    try:
        tensors = load_file(file, device=device)
        return tensors["weight"], tensors["bias"]
    except (OSError, SafetensorError, KeyError) as error:
        raise StageUnusable(f"{file} cannot be read: {error}. Copy or make the pack again.") from error


def load_familiarity(spec: StageSpec, device: str, lock: threading.Lock) -> Familiarity:
    """The classifier that the spec's files name, or one that knows all images. Raises StageUnusable."""
    if "familiarity" not in spec.files:
        return Familiarity()
    if "familiarity_model" not in spec.files:
        raise StageUnusable(
            f"{spec.name}: the pack has {spec.files['familiarity']}, but does not name the folder of its model."
        )
    return FittedFamiliarity(spec.files, device, lock, spec.batch_size)
