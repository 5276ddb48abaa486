"""Spreads a model over several devices: each layer is on one of them, and what a layer gets is copied there.

Only the weights are divided. A batch goes through the layers one after another, so one device works at a time: this is
for models that are too large for one device, and makes none faster.

accelerate chooses the places, by sizes ("balanced"), and its hooks copy. On the CPU the devices are pretended ones,
"cpu:0" and "cpu:1": the places and the hooks are those of GPUs, but nothing has to be copied.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import accelerate
import psutil
import torch
from accelerate.utils import get_balanced_memory
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from stages.contract.base import OutOfMemory
from stages.images.devices import device_errors

# accelerate warns that the GPUs of a map are missing where they are pretended ones.
logging.getLogger("accelerate").setLevel(logging.ERROR)

WEIGHTS_SHARE = 0.9  # of the free memory; the rest is for what a batch needs, as in transformers

Model = TypeVar("Model", bound=PreTrainedModel)


def map_layers(
    kind: type[PreTrainedModel], folder: str, dtype: torch.dtype, devices: Sequence[str]
) -> dict[str, str]:
    """The device of each part of the model in a folder, by its name. Reads no weights.

    Raises OutOfMemory if they have too little free memory for the weights, and transformers' errors for a config.json
    that it cannot use.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = kind(config).to(dtype)
    model.tie_weights()
    whole = list(find_whole(model))
    with device_errors():
        free = [int(WEIGHTS_SHARE * bytes_) for bytes_ in measure_free(devices)]
    most = get_balanced_memory(model, dict(enumerate(free)), no_split_module_classes=whole)
    places = accelerate.infer_auto_device_map(model, most, no_split_module_classes=whole)
    if not all(isinstance(number, int) for number in places.values()):  # the rest would be on the disk
        needed = sum(weight.nbytes for weight in model.parameters()) >> 20
        shares = ", ".join(
            f"{size >> 20:,} MiB on {device}" for device, size in zip(devices, free, strict=True)
        )
        raise OutOfMemory(
            f"out of memory: the weights in {folder} need {needed:,} MiB, and there is room for {shares}"
        )
    return {name: devices[number] for name, number in places.items()}


def find_whole(model: PreTrainedModel) -> set[str]:
    """The classes of modules that must each be on one device, because they combine the outputs of their parts: a layer
    adds its input to its output, and a gate multiplies two outputs. transformers names only some of these classes, so this
    adds all that are repeated in a list, as layers are, and all that contain no list of layers."""
    layers, divided = set[str](), set[str]()
    for module in model.modules():
        if any(isinstance(part, nn.ModuleList) for part in module.modules()):
            divided.add(type(module).__name__)
        if isinstance(module, nn.ModuleList):
            layers |= {type(layer).__name__ for layer in module if not isinstance(layer, nn.ModuleList)}
    parts = {type(module).__name__ for module in model.modules() if next(module.children(), None) is not None}
    return layers | (parts - divided) | set(model._no_split_modules or ())


def measure_free(devices: Sequence[str]) -> list[int]:
    """Bytes that each device has for a model; pretended ones divide what the host has."""
    if devices[0].startswith("cpu"):
        return [psutil.virtual_memory().available // len(devices)] * len(devices)
    return [
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)  # by PyTorch for this process
        - torch.cuda.memory_allocated(device)
        for device in devices
    ]


def name_for_transformers(places: dict[str, str]) -> dict[str, Any]:
    """The places as from_pretrained takes them."""
    return {name: "cpu" if place.startswith("cpu") else int(place[5:]) for name, place in places.items()}


def finish_spreading(model: Model, places: dict[str, str]) -> Model:
    """A model that from_pretrained has loaded to its places, ready to run; hf_device_map has their names."""
    if next(iter(places.values())).startswith("cpu"):
        # pretended devices are one for from_pretrained, so it has added no hooks
        with quiet_about_parameters():
            accelerate.dispatch_model(
                model,
                dict.fromkeys(places, "cpu"),
                skip_keys=model._skip_keys_device_placement,
                force_hooks=True,
            )
    model.hf_device_map = dict(places)
    model.eval()
    return model


@contextlib.contextmanager
def quiet_about_parameters() -> Iterator[None]:
    """A map also places parameters that are in no module, of which accelerate warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
        yield
