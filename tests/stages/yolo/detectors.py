"""YOLO networks and stages for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.contract.base import Image, StageSpec
from stages.yolo import library
from stages.yolo.letterbox import Letterbox, fill_canvases
from stages.yolo.stage import YoloStage
from stages.yolo.weights import read_weights
from tests.stages.pictures import read_photo


def read_structure(name: str) -> dict[str, Any]:
    """The content of one of ultralytics' model YAMLs, "yolo11n.yaml" for example."""
    from ultralytics.nn.tasks import yaml_model_load

    structure: dict[str, Any] = yaml_model_load(name)
    structure.pop("yaml_file")
    return structure


def asset(name: str) -> Path:
    """One of the two photographs in the ultralytics package."""
    from ultralytics.utils import ASSETS

    return Path(ASSETS) / name


def read_asset(name: str) -> Image:
    return read_photo(asset(name))


def make_sure_of_itself(model: Any, photo: Image, size: int) -> None:
    """Give a random network the statistics of a photograph,
    so that scores spread from 0 to 1 and boxes differ."""
    for norm in [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]:
        norm.momentum = 1.0
        norm.train()
    assert photo.pixels is not None
    with torch.no_grad():
        model(fill_canvases([photo.pixels], [Letterbox.fit(photo.height, photo.width, size, 32)]))
        head = model.model[-1]
        for branch in head.one2one_cv3 if model.end2end else head.cv3:
            branch[-1].bias.normal_(-2, 0.5)
    model.eval()


def make_stage(
    files: dict[str, str], *, dtype: str = "float32", batch_size: int = 4, **options: Any
) -> YoloStage:
    spec = StageSpec("yolo", "ultralytics", files, dtype=dtype, batch_size=batch_size, options=options)
    stage = YoloStage(spec, "cpu")
    stage.load()
    return stage


def files_in(folder: Path) -> dict[str, str]:
    return {"weights": str(folder / "yolo.safetensors"), "config": str(folder / "yolo.json")}


def write_checkpoint(folder: Path, files: dict[str, str]) -> Path:
    """A .pt file as ultralytics' trainer writes them, with the network in these files."""
    state, config = read_weights(files)
    model = library.build(config)
    model.load_state_dict(state)
    model.names = dict(enumerate(config["names"]))
    torch.save({"model": model.half(), "ema": None, "train_args": {"imgsz": 320}}, folder / "best.pt")
    return folder / "best.pt"
