"""Checkpoints of ultralytics' other classes, with random weights: the refusal names each class."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ultralytics.nn import tasks

from stages.contract.base import StageUnusable
from stages.contract.manifest import PackError
from stages.weights.packs import Pack, open_pack, resolve
from stages.yolo.recognition import list_classes
from stages.yolo.weights import convert_checkpoint, load_network
from tests.stages.yolo.detectors import read_structure


def save_yolo(folder: Path, kind: str, structure: str, width: float = 0.125) -> Path:
    """A narrow model of this class, as ultralytics' trainer saves it."""
    described = read_structure(structure)
    scale = next(iter(described["scales"]))
    described |= {"scales": {scale: [0.33, width, 1024]}, "scale": scale}
    model = getattr(tasks, kind)(described, verbose=False)
    torch.save({"model": model.half(), "ema": None, "train_args": {"imgsz": 64}}, folder / "x.pt")
    return folder / "x.pt"


@pytest.mark.parametrize(
    ("kind", "structure", "message"),
    [
        ("PoseModel", "yolov8n-pose.yaml", "is a YOLO pose model (PoseModel)"),
        ("OBBModel", "yolov8n-obb.yaml", "is a YOLO model of oriented boxes (OBBModel)"),
        ("SegmentationModel", "yolov8n-seg.yaml", "is a YOLO segmentation model (SegmentationModel)"),
        ("ClassificationModel", "yolov8n-cls.yaml", "is a YOLO classification model (ClassificationModel)"),
        ("WorldModel", "yolov8s-worldv2.yaml", "is a YOLO-World model (WorldModel)"),
        ("RTDETRDetectionModel", "rtdetr-l.yaml", "is an RT-DETR model (RTDETRDetectionModel)"),
    ],
)
def test_another_model_of_ultralytics_is_refused_by_name(
    tmp_path: Path, kind: str, structure: str, message: str
) -> None:
    file = save_yolo(tmp_path, kind, structure, width=1.0 if kind.startswith("RTDETR") else 0.125)
    for refuse in (
        lambda: open_pack(file, tmp_path / "models"),
        lambda: load_network({"weights": str(file)}, allow_pickle=True),
    ):
        with pytest.raises((PackError, StageUnusable)) as caught:
            refuse()
        assert str(caught.value).startswith(
            f"{file} {message}; visiond takes YOLO detection models (DetectionModel"
        )
    assert not (tmp_path / "models").exists(), "what is refused is not recorded"


@pytest.mark.parametrize(
    ("structure", "kind"), [("yolov8n.yaml", "YoloV8"), ("yolo11n.yaml", "LibraryNetwork")]
)
def test_a_detection_model_is_taken(tmp_path: Path, structure: str, kind: str) -> None:
    file = save_yolo(tmp_path, "DetectionModel", structure)
    assert ("ultralytics.nn.tasks", "DetectionModel") in list_classes(file)
    convert_checkpoint(file, tmp_path)
    spec = resolve(open_pack(tmp_path / "yolo.safetensors", tmp_path / "models"), "yolo")
    network, config = load_network(spec.files)
    assert (type(network).__name__, config["nc"], config["imgsz"]) == (kind, 80, 64)


def test_a_pickle_that_may_not_be_read_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    file = save_yolo(tmp_path, "DetectionModel", "yolov8n.yaml")
    pack = open_pack(file, tmp_path / "models")
    with pytest.raises(
        PackError, match=r"models make FOLDER --yolo .*x\.pt --allow-pickle.*allow_pickle = true"
    ):
        resolve(pack, "yolo")
    assert resolve(pack, "yolo", {"options": {"allow_pickle": True}}).files == {"weights": str(file)}


def test_a_checkpoint_that_is_cut_short_or_of_another_library_is_refused_by_name(tmp_path: Path) -> None:
    file = save_yolo(tmp_path, "DetectionModel", "yolov8n.yaml")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(PackError, match=r"x\.pt is cut short or damaged"):
        open_pack(file, tmp_path / "models")
    torch.save(torch.nn.Linear(1, 1), file)
    with pytest.raises(
        PackError, match=r"does not contain an ultralytics model, but torch\.nn\.modules\.linear\.Linear"
    ):
        open_pack(file, tmp_path / "models")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nc": 0}, r"Expected `int` >= 1 - at `\$\.nc`"),
        ({"nc": "16"}, r"Expected `int`, got `str` - at `\$\.nc`"),
        ({"imgsz": "x"}, r"Expected `int`, got `str` - at `\$\.imgsz`"),
        ({"names": ["cat"]}, r"has 1 names for 16 classes"),
        ({"model": 3}, r"got `int` - at `\$\.model`"),
        ({"model": {"head": []}}, r"length >= 1 - at `\$\.model\.head`"),
        ({"model": {"scales": [1]}}, r"got `array` - at `\$\.model\.scales`"),
        ({"model": {"scales": {"n": [0.33, 0, 1024]}}}, r"> 0\.0 - at `\$\.model\.scales"),
        ({"model": {"scale": ["n"]}}, r"got `array` - at `\$\.model\.scale`"),
        ({"model": {"backbone": [[1]]}}, r"length 4"),
        ({"model": {"backbone": [3]}}, r"Expected `array`, got `int` - at `\$\.model\.backbone"),
        ({"model": {"backbone": [[-1, 1, ["x"], []]]}}, r"Expected `str`, got `array`"),
    ],
    ids=str,
)
def test_a_config_that_describes_no_network_is_refused_with_the_place(
    tmp_path: Path, blank_pack: Pack, change: dict[str, Any], said: str
) -> None:
    for name in ("yolo.safetensors", "yolo.json"):
        shutil.copy(blank_pack.folder / name, tmp_path)
    config = json.loads((tmp_path / "yolo.json").read_text())
    whole = isinstance(change.get("model"), dict)
    config = config | ({"model": config["model"] | change["model"]} if whole else change)
    (tmp_path / "yolo.json").write_text(json.dumps(config))
    with pytest.raises(PackError, match=said):
        open_pack(tmp_path, tmp_path / "models")


def test_a_config_with_another_head_is_refused(tmp_path: Path, blank_pack: Pack) -> None:
    for name in ("yolo.safetensors", "yolo.json"):
        shutil.copy(blank_pack.folder / name, tmp_path)
    config = json.loads((tmp_path / "yolo.json").read_text())
    config["model"]["head"][-1][2] = "RTDETRDecoder"
    (tmp_path / "yolo.json").write_text(json.dumps(config))
    with pytest.raises(PackError, match=r"is a YOLO model with a RTDETRDecoder head"):
        open_pack(tmp_path, tmp_path / "models")
