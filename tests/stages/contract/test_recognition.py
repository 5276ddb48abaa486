"""Checkpoints of other classes, made with random weights by
transformers: the refusal names each class."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stages.blip.descriptor import MODELS
from stages.contract.base import StageUnusable
from stages.contract.manifest import PackError
from stages.contract.recognition import MODEL_PARTS, check_transformers, list_weights
from stages.pretrained.checkpoints import load_model, load_tokenizer
from stages.registry import registry
from stages.weights.packs import Pack, open_pack


@pytest.fixture
def part(tmp_path: Path, blank_pack: Pack) -> Any:
    """A copy of one model of the blank pack: part("blip")."""

    def copy(stage: str) -> Path:
        return Path(shutil.copytree(blank_pack.folder / stage, tmp_path / "model"))

    return copy


@pytest.mark.parametrize(
    ("stage", "kind", "message"),
    [
        ("blip", "BlipForQuestionAnswering", r"holds a BlipForQuestionAnswering \(BLIP for questions\)"),
        ("blip", "BlipForImageTextRetrieval", r"holds a BlipForImageTextRetrieval \(BLIP for retrieval\)"),
        ("clip", "CLIPVisionModel", r'contains CLIPVisionModel \(model_type "clip_vision_model"'),
    ],
)
def test_another_class_of_transformers_is_refused_by_name(
    part: Any, tmp_path: Path, stage: str, kind: str, message: str
) -> None:
    folder = part(stage)
    config = transformers.AutoConfig.from_pretrained(folder)
    getattr(transformers, kind)(
        config.vision_config if kind == "CLIPVisionModel" else config
    ).save_pretrained(folder)
    with pytest.raises(PackError, match=message) as caught:
        open_pack(folder, tmp_path / "models")
    taken = re.split("visiond takes |can use these models ", str(caught.value))[1]
    assert ("BlipForConditionalGeneration (" if stage == "blip" else "CLIP with both its halves") in taken


@pytest.mark.parametrize("architectures", [None, ["BlipForConditionalGeneration"]])
def test_blip_for_questions_is_recognized_by_its_weights(part: Any, architectures: list[str] | None) -> None:
    folder = part("blip")
    transformers.BlipForQuestionAnswering(transformers.BlipConfig.from_pretrained(folder)).save_pretrained(
        folder
    )
    config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        PackError, match=r"model\.safetensors holds weights of BLIP for questions or retrieval"
    ):
        check_transformers(MODELS, folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "align", "architectures": ["AlignModel"]},
            r'contains AlignModel \(model_type "align"',
        ),
        (
            {"model_type": "git", "architectures": ["GitForCausalLM"]},
            r"contains GitForCausalLM .*for blip: .*Qwen3-VL",
        ),
        ({}, r'contains a model \(model_type ""'),
    ],
)
def test_a_model_of_another_family_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PackError, match=message):
        open_pack(tmp_path, tmp_path / "models")
    (tmp_path / "config.json").rename(tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(PackError, match=r"has weights, but no config\.json"):
        open_pack(tmp_path, tmp_path / "models")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_safetensors_that_are_cut_short_are_named(part: Any, tmp_path: Path, kept: int) -> None:
    folder = part("clip")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(PackError, match=r"model/model\.safetensors is cut short or damaged.*Copy it again"):
        open_pack(folder, tmp_path / "models")


@pytest.mark.parametrize("stage", ["yolo", "clip", "blip", "ocr"])
def test_a_cut_file_of_any_model_is_refused_before_it_is_loaded(stage: str, tmp_path: Path) -> None:
    backends = registry.STAGES[stage].backends.values()
    for model in [model for backend in backends for model in backend.models]:
        folder = tmp_path / model.type
        folder.mkdir()
        for parts in MODEL_PARTS.values():
            (folder / parts[0]).write_text("{}")
        config = {"model_type": model.type, "architectures": [model.name]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        with pytest.raises(PackError, match="cut short or damaged"):
            check_transformers([model], folder)


def test_a_damaged_header_a_lost_shard_and_a_pickle_are_named(part: Any, tmp_path: Path) -> None:
    folder = part("clip")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[8:10] = b"!!"
    weights.write_bytes(data)
    with pytest.raises(PackError, match="its header is not a list of tensors"):
        open_pack(folder, tmp_path / "models")
    weights.unlink()
    for name in ("../a.safetensors", "/a.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(PackError, match="outside the folder"):
            list_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    with pytest.raises(PackError, match=r"model-1-of-2\.safetensors cannot be read: No such file"):
        open_pack(folder, tmp_path / "models")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PackError, match=r"are a pickle, pytorch_model\.bin; `visiond models make`"):
        open_pack(folder, tmp_path / "models")


def test_a_loaders_error_is_reported_in_a_sentence(part: Any) -> None:
    folder = part("clip")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(StageUnusable, match=rf"the tokenizer in {folder} cannot be read"):
        load_tokenizer(str(folder))
    (folder / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(StageUnusable, match=rf"the CLIPModel in {folder} cannot be read"):
        load_model(transformers.CLIPModel, str(folder), torch.float32, "cpu")


@pytest.mark.parametrize(("stage", "made"), [("clip", 336), ("blip", 512)])
def test_images_prepared_in_another_size_than_the_model_takes_are_refused_with_both_sizes(
    part: Any, tmp_path: Path, stage: str, made: int
) -> None:
    folder = part(stage)
    open_pack(folder, tmp_path / "models")
    file = next(folder / name for name in MODEL_PARTS["image processor"] if (folder / name).is_file())
    settings = json.loads(file.read_text())
    changed = settings.get("image_processor", settings)
    changed["crop_size" if changed.get("do_center_crop") else "size"] = {"height": made, "width": made}
    file.write_text(json.dumps(settings))
    taken = json.loads((folder / "config.json").read_text())["vision_config"]["image_size"]
    with pytest.raises(
        PackError, match=rf"{file} makes images of {made} × {made} .* takes {taken} × {taken}"
    ):
        open_pack(folder, tmp_path / "others")


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.decode().encode("utf-16"), "is encoded in UTF-16.*iconv -f utf-16 -t utf-8"),
        (
            lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer.*git lfs pull",
        ),
        (lambda data: data[: len(data) // 2], "cannot be read: .*Copy it again"),
        (lambda data: b"\xe4" + data, "cannot be read: .*utf-8"),
    ],
)
def test_a_file_beside_the_weights_that_transformers_could_not_read_is_named(
    part: Any, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    file = part("clip") / name
    if not file.exists():
        pytest.skip("this model has no such file")
    data = file.read_bytes()
    file.write_bytes(change(data))
    with pytest.raises(PackError, match=message) as caught:
        open_pack(file.parent, tmp_path / "models")
    assert str(file) in str(caught.value)


def test_weights_that_are_a_git_lfs_pointer_are_called_one(part: Any, tmp_path: Path) -> None:
    folder = part("clip")
    (folder / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(PackError, match=r"model\.safetensors is a Git LFS pointer"):
        open_pack(folder, tmp_path / "models")


def test_a_fifo_beside_the_weights_is_named_and_not_waited_for(part: Any, tmp_path: Path) -> None:
    file = part("clip") / "tokenizer.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(PackError, match=f"{file} cannot be read: it is a FIFO, not a file"):
        open_pack(file.parent, tmp_path / "models")
