from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.contract.base import StageUnusable
from stages.contract.manifest import PackError
from stages.weights.packs import Pack, open_pack, resolve
from stages.yolo.descriptor import Objects
from stages.yolo.weights import build_network, convert_checkpoint, load_network, read_weights
from tests.stages.pictures import draw_image
from tests.stages.yolo.detectors import files_in, make_stage, write_checkpoint


def test_a_pickle_is_read_only_if_that_is_allowed(tmp_path: Path, blank_pack: Pack) -> None:
    checkpoint = write_checkpoint(tmp_path, resolve(blank_pack, "yolo").files)
    with pytest.raises(ValueError, match="allow_pickle = true"):
        make_stage({"weights": str(checkpoint)})
    [answer] = make_stage({"weights": str(checkpoint)}, allow_pickle=True).run([draw_image(64, 64)])
    assert isinstance(answer, Objects)


def test_a_converted_checkpoint_is_the_same_network(tmp_path: Path, blank_pack: Pack) -> None:
    convert_checkpoint(write_checkpoint(tmp_path, resolve(blank_pack, "yolo").files), tmp_path)
    converted, config = read_weights(files_in(tmp_path))
    original, _ = load_network(resolve(blank_pack, "yolo").files)
    assert (config["imgsz"], config["nc"]) == (320, len(config["names"]))
    for name, tensor in original.half().float().state_dict().items():
        assert torch.equal(converted[name], tensor), name


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("bomb"),))


def test_a_checkpoint_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="not an ultralytics checkpoint"):
        convert_checkpoint(tmp_path / "evil.pt", tmp_path / "out")
    assert not Path("bomb").exists()
    with pytest.raises(FileNotFoundError):
        convert_checkpoint(tmp_path / "yolov8n.pt", tmp_path / "out")


def test_what_only_ultralytics_can_read_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blank_pack: Pack
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as if it were not there
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(
        StageUnusable, match=r"best\.pt can only be read by ultralytics.*visiond\[ultralytics\]"
    ):
        load_network({"weights": str(tmp_path / "best.pt")}, allow_pickle=True)
    files = files_in(blank_pack.folder)
    config = json.loads(Path(files["config"]).read_text())
    config["model"]["backbone"][2][2] = "C3k2"
    (tmp_path / "yolo.json").write_text(json.dumps(config))
    message = r"has layers that only ultralytics has \(C3k2\), which is not installed"
    with pytest.raises(StageUnusable, match=message):
        build_network(config)
    shutil.copyfile(files["weights"], tmp_path / "yolo.safetensors")
    with pytest.raises(PackError, match=message):
        open_pack(tmp_path, tmp_path / "models")
