"""The only module of the stage that imports ultralytics, an extra: networks other than YOLOv8, and .pt files.

Importing ultralytics changes the process: it patches PIL.Image.open and torch.save, sets the threads of cv2 and OpenMP, and
would install packages and use the network. Settings prevent what they can; the rest is undone after the import.
"""

from __future__ import annotations

import copy
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
from torch import Tensor, nn

from stages.contract.base import StageUnusable
from stages.yolo.network import YoloNetwork
from stages.yolo.recognition import CLASSES, HEADS, MODELS, TAKEN

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
    from ultralytics.nn.tasks import DetectionModel, torch_safe_load


class LibraryNetwork(YoloNetwork):
    """A network of ultralytics."""

    def __init__(self, network: DetectionModel) -> None:
        super().__init__()
        self.network = network
        self.stride = int(network.stride.max())
        self.is_end_to_end = bool(network.end2end)
        decode_in_float32(network.model[-1])
        self.anchors: dict[torch.Size, Any] = {}  # of single images, by shape

    @property
    def holder(self) -> nn.Module:
        module: nn.Module = self.network
        return module

    def fold_norms(self) -> None:
        self.network.fuse(verbose=False)

    def forward(self, pixels: Tensor) -> Tensor:
        predictions: Tensor = self.network(pixels)[0]
        # A recording reads them as long as it lives, and the head replaces them for other shapes.
        if len(pixels) == 1:
            head: Any = self.network.model[-1]
            self.anchors[pixels.shape] = head.anchors, head.strides
        return predictions.float()


def decode_in_float32(head: Any) -> None:
    """Let a half-precision Detect head compute its boxes in float32: bfloat16 rounds 600 pixels by up to 2."""
    decode = type(head)._inference

    def inference_in_float32(self: nn.Module, raw: dict[str, Any]) -> Tensor:
        self.dfl.float()  # its weights are small whole numbers, exact in half precision too
        # Only the shapes of the feature maps are used.
        features = [feature[:, :1].float() for feature in raw["feats"]]
        boxes: Tensor = decode(
            self, {"boxes": raw["boxes"].float(), "scores": raw["scores"].float(), "feats": features}
        )
        return boxes

    head._inference = MethodType(inference_in_float32, head)


def build(config: Mapping[str, Any]) -> DetectionModel:
    """The network in a yolo.json, with random weights, in eval mode."""
    return DetectionModel(copy.deepcopy(config["model"]), nc=config["nc"], verbose=False).eval()


def make_predictor(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> Any:
    """A model with ultralytics' own `predict`, to compare with. state, config: of a yolo.json and its weights."""
    from ultralytics import YOLO

    predictor = YOLO("yolov8n.yaml", verbose=False)
    predictor.model = build(config)
    predictor.model.load_state_dict(state)
    return predictor


def check_class(model: object, source: str | Path) -> DetectionModel:
    """Raises StageUnusable for any model but a plain detection
    model: a derived class or head has other answers."""
    kind = type(model).__name__
    if kind not in MODELS or not isinstance(model, DetectionModel):
        raise StageUnusable(f"{source} is {CLASSES.get(kind, 'not a YOLO model')} ({kind}); {TAKEN}.")
    if (head := type(model.model[-1]).__name__) not in HEADS:
        raise StageUnusable(f"{source} is a YOLO model with a {head} head; {TAKEN}.")
    return model


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and config of a detection model's .pt file, by torch's restricted loader with ultralytics' list of known classes.

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
    model = check_class(held, checkpoint)
    size = content.get("train_args", {}).get("imgsz", 640)
    structure = {key: value for key, value in model.yaml.items() if key not in ("yaml_file", "channels")}
    names = [model.names[index] for index in range(len(model.names))]
    config = {"model": structure, "nc": len(names), "names": names, "imgsz": size}
    return dict(model.float().state_dict()), config
