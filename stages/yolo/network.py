"""The only module that imports ultralytics. Loads its networks from weights that are not pickles.

Importing ultralytics changes the process: it patches PIL.Image.open and torch.save, sets the threads of cv2
and OpenMP, and would install packages and use the network. Settings prevent what they can; the rest is undone
after the import.

Weights are a safetensors file and a JSON file beside it: {"model": the name or the content of an ultralytics
model YAML, "nc", "names", "imgsz"}. A .pt file is a pickle. It is read only if that is allowed, and only by
torch's restricted loader with ultralytics' list of known classes.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import cv2
import PIL.Image
import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  ultralytics' non_max_suppression uses torchvision's if it is imported
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.base import StageUnusable
from stages.pretrained.soundness import check_shapes, refuse_nan
from stages.recognition import YOLO_CLASSES, YOLO_HEADS, YOLO_MODELS, YOLO_TAKEN, explain_pickle

_SETTINGS = {
    "YOLO_AUTOINSTALL": "false",
    "YOLO_OFFLINE": "true",
    "YOLO_VERBOSE": "false",
    "ULTRALYTICS_SAFE_LOAD": "true",
}


@contextmanager
def _unpatched() -> Iterator[None]:
    open_image, save, threads = PIL.Image.open, torch.save, cv2.getNumThreads()
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NUMEXPR_MAX_THREADS")}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        PIL.Image.open, torch.save = open_image, save
        cv2.setNumThreads(threads)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


with _unpatched():
    from ultralytics.nn.modules import Conv
    from ultralytics.nn.tasks import DetectionModel, torch_safe_load, yaml_model_load
    from ultralytics.utils.nms import non_max_suppression as non_max_suppression  # for stage.py
    from ultralytics.utils.ops import scale_boxes as scale_boxes


def load_network(
    files: Mapping[str, str], *, allow_pickle: bool = False
) -> tuple[DetectionModel, dict[str, Any]]:
    """A network in eval mode and its config. files: "weights" and "config",
    or "weights" alone for a .pt file.

    Raises StageUnusable if the weights may not be read, or are those of another model.
    """
    weights = files["weights"]
    if weights.endswith(".pt"):
        if not allow_pickle:
            raise StageUnusable(explain_pickle(weights))
        state, config = read_checkpoint(Path(weights))
    else:
        state, config = read_files(Path(weights), Path(files["config"]))
    try:
        model = build_network(config)
        check_shapes(model, state, weights, "Copy the two files of one model again.")
        model.load_state_dict(state)
    except StageUnusable:
        raise
    # Whatever ultralytics raises for a wrong config.
    except (RuntimeError, LookupError, TypeError, ValueError, OSError) as error:
        what = " ".join(str(error).split())
        raise StageUnusable(
            f"{weights} does not hold the weights of the model in its config: {what}"
        ) from error
    refuse_nan(model, weights)
    return take_detection_model(model, weights), config


def read_files(weights: Path, config: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and config from a safetensors file and the JSON file beside it. Raises StageUnusable."""
    try:
        return load_file(weights), json.loads(config.read_text())
    except (SafetensorError, ValueError, OSError) as error:
        raise StageUnusable(
            f"{weights} or {config.name} cannot be read: {error}. Copy them again."
        ) from error


def take_detection_model(model: object, source: str | Path) -> DetectionModel:
    """Raises StageUnusable for any model but a plain detection
    model: a derived class or head has other answers."""
    kind = type(model).__name__
    if kind not in YOLO_MODELS or not isinstance(model, DetectionModel):
        raise StageUnusable(
            f"{source} is {YOLO_CLASSES.get(kind, 'not a YOLO model')} ({kind}); {YOLO_TAKEN}."
        )
    if (head := type(model.model[-1]).__name__) not in YOLO_HEADS:
        raise StageUnusable(f"{source} is a YOLO model with a {head} head; {YOLO_TAKEN}.")
    return model


def speed_up_convolutions(model: nn.Module) -> None:
    """On a GPU, in half precision: compute a convolution's bias and SiLU in one pass instead of two."""
    for module in convolutions_with_silu(model):
        # Ultralytics' own fusing does the same.
        module.forward = functools.partial(conv2d_silu, module.conv)


def convolutions_with_silu(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if isinstance(module, Conv) and isinstance(module.act, nn.SiLU)
    ]


def conv2d_silu(layer: nn.Conv2d, pixels: Tensor) -> Tensor:
    from stages.kernels.launch import add_bias_silu

    assert layer.bias is not None  # from the batch norm, which ultralytics has fused into it
    values = F.conv2d(pixels, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return add_bias_silu(values.contiguous(memory_format=torch.channels_last), layer.bias)


def build_network(config: Mapping[str, Any]) -> DetectionModel:
    """The network in a config, with random weights, in eval mode."""
    return DetectionModel(copy.deepcopy(config["model"]), nc=config["nc"], verbose=False).eval()


def read_structure(name: str) -> dict[str, Any]:
    """The content of one of ultralytics' model YAMLs, "yolov8n.yaml" for example."""
    structure: dict[str, Any] = yaml_model_load(name)
    structure.pop("yaml_file")
    return structure


def save_network(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Write yolo.safetensors and yolo.json. Matrices are saved in float16, other tensors unchanged."""
    write_files({name: halve(tensor) for name, tensor in model.state_dict().items()}, config, folder)


def halve(tensor: Tensor) -> Tensor:
    """Contiguous, and in float16 if it is a matrix; norms and biases are small, and need the range."""
    return tensor.detach().to(torch.float16 if tensor.ndim > 1 else tensor.dtype).contiguous()


def convert_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Convert an ultralytics .pt file to yolo.safetensors and yolo.json.
    Raises the errors of `read_checkpoint`."""
    state, config = read_checkpoint(checkpoint)
    write_files({name: tensor.contiguous() for name, tensor in state.items()}, config, folder)


def write_files(state: dict[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "yolo.safetensors")
    (folder / "yolo.json").write_text(json.dumps(config, indent=1) + "\n")


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and config of a detection model's .pt file.

    Raises FileNotFoundError, or StageUnusable if it is not a detection checkpoint of known classes.
    """
    if not checkpoint.is_file():  # ultralytics would try to download it
        raise FileNotFoundError(f"there is no file {checkpoint}.")
    try:
        content, _ = torch_safe_load(str(checkpoint), safe_only=True)
    except (TypeError, RuntimeError, ImportError, AttributeError, pickle.UnpicklingError) as error:
        what = " ".join(str(error).split()).removeprefix("ERROR ❌️ ")
        raise StageUnusable(f"{checkpoint} is not an ultralytics checkpoint: {what}") from error
    held = (content.get("ema") or content.get("model")) if isinstance(content, dict) else content
    model = take_detection_model(held, checkpoint)
    size = content.get("train_args", {}).get("imgsz", 640)
    structure = {key: value for key, value in model.yaml.items() if key not in ("yaml_file", "channels")}
    names = [model.names[index] for index in range(len(model.names))]
    config = {"model": structure, "nc": len(names), "names": names, "imgsz": size}
    return dict(model.float().state_dict()), config


def decode_in_float32(head: Any) -> None:
    """Let a half-precision Detect head compute its boxes in float32: bfloat16 rounds 600 pixels by up to 2."""
    decode = type(head)._inference

    def inference_in_float32(self: nn.Module, raw: dict[str, Any]) -> Tensor:
        # Only the shapes of the feature maps are used.
        features = [feature[:, :1].float() for feature in raw["feats"]]
        boxes: Tensor = decode(
            self, {"boxes": raw["boxes"].float(), "scores": raw["scores"].float(), "feats": features}
        )
        return boxes

    head.dfl.float()
    head._inference = MethodType(inference_in_float32, head)
