"""YOLO's files and the networks in them.

Weights are a safetensors file and a JSON file beside it: {"model": the name or the content of one of ultralytics'
model YAMLs, "nc", "names", "imgsz"}. A .pt file is a pickle. It is read only if that is allowed. Both have the same
weights by the same names, whether visiond or ultralytics builds the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contract.base import StageUnusable
from stages.contract.manifest import PackError
from stages.contract.recognition import read_config
from stages.pretrained.soundness import check_shapes, refuse_nan
from stages.yolo.network import YoloNetwork
from stages.yolo.recognition import check_library, refuse_pickle
from stages.yolo.structure import find_size, list_layers
from stages.yolo.yolov8 import YoloV8


def load_network(
    files: Mapping[str, str], *, allow_pickle: bool = False
) -> tuple[YoloNetwork, dict[str, Any]]:
    """A network in eval mode and its config. files: "weights" and "config", or "weights" alone for a .pt file.

    Raises StageUnusable if the weights may not be read, or are those of another model.
    """
    weights = files["weights"]
    state, config = read_weights(files, allow_pickle=allow_pickle)
    try:
        network = build_network(config, weights)
        check_shapes(network.holder, state, weights, "Copy the two files of one model again.")
        network.holder.load_state_dict(state)
    except StageUnusable:
        raise
    # Whatever ultralytics raises for a wrong config.
    except (RuntimeError, LookupError, TypeError, ValueError, OSError) as error:
        what = " ".join(str(error).split())
        raise StageUnusable(
            f"{weights} does not hold the weights of the model in its config: {what}"
        ) from error
    refuse_nan(network.holder, weights)
    return network, config


def read_weights(
    files: Mapping[str, str], *, allow_pickle: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and config. files, errors: as of load_network."""
    weights = Path(files["weights"])
    if weights.suffix != ".pt":
        return read_files(weights, Path(files["config"]))
    refuse_pickle(weights, allow_pickle=allow_pickle)
    return read_checkpoint(weights)


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As library.read_checkpoint. Raises StageUnusable, too, if ultralytics is not installed."""
    check_library(checkpoint)
    from stages.yolo import library

    return library.read_checkpoint(checkpoint)


def read_files(weights: Path, config: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and config from a safetensors file and the JSON file beside it. Raises StageUnusable."""
    try:
        return load_file(weights), read_config(config)
    except (SafetensorError, ValueError, OSError, PackError) as error:
        raise StageUnusable(
            f"{weights} or {config.name} cannot be read: {error}. Copy them again."
        ) from error


def build_network(config: Mapping[str, Any], source: str = "the model") -> YoloNetwork:
    """The network in a config, with random weights, in eval mode. source: what has the config, for errors."""
    if size := find_size(config["model"]):
        return YoloV8(size, config["nc"])
    check_library(source, list_layers(config["model"]))
    from stages.yolo import library

    return library.LibraryNetwork(library.check_class(library.build(config), source))


def save_network(state: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write yolo.safetensors and yolo.json. Matrices are saved in float16, other tensors unchanged."""
    write_files({name: halve(tensor) for name, tensor in state.items()}, config, folder)


def halve(tensor: Tensor) -> Tensor:
    """Contiguous, and in float16 if it is a matrix; norms and biases are small, and need the range."""
    return tensor.detach().to(torch.float16 if tensor.ndim > 1 else tensor.dtype).contiguous()


def convert_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Convert an ultralytics .pt file to yolo.safetensors and yolo.json. Raises the errors of `read_checkpoint`."""
    state, config = read_checkpoint(checkpoint)
    write_files({name: tensor.contiguous() for name, tensor in state.items()}, config, folder)


def write_files(state: dict[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "yolo.safetensors")
    (folder / "yolo.json").write_text(json.dumps(config, indent=1) + "\n")
