"""One model from a fake hub of small checkpoints. tests/daemon/cli/test_models.py uses the hub's own library."""

from __future__ import annotations

import importlib.util
import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file
from transformers import CLIPModel

from stages.clip.descriptor import Clip
from stages.contract.manifest import MANIFEST, PackError
from stages.ocr.descriptor import bundled_weights
from stages.registry.registry import UnknownName, build
from stages.weights.packs import (
    Pack,
    list_packs,
    open_pack,
    resolve,
    resolve_all,
    verify,
)
from stages.weights.pulling import recognize
from stages.weights.standard import pull_model, pull_standard
from tests.stages import checkpoints, readers
from tests.stages.ocr import textnets
from tests.stages.pictures import draw_image
from tests.stages.weights.hubs import FolderHub
from tests.stages.yolo.detectors import files_in, write_checkpoint

SIGLIP2 = "google/siglip2-base-patch16-224"


@pytest.fixture
def hub(tmp_path: Path) -> FolderHub:
    return FolderHub(tmp_path / "hub")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def pull(name: str, models: Path, hub: FolderHub, **options: Any) -> Pack:
    return pull_model(name, models, lambda _: None, hub, **options)


def save_tower(hub: FolderHub, kind: str, repository: str) -> Path:
    checkpoints.TOWERS[kind](hub.root / repository)
    return hub.root / repository


def use_shards(folder: Path) -> None:
    """The weights in two files, as of a model of several GB."""
    CLIPModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="40kB")
    (folder / "model.safetensors").unlink(missing_ok=True)


def use_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("name", "kind", "repository", "backend"),
    [
        ("siglip2-b16-224", "siglip", SIGLIP2, "transformers"),
        ("siglip2-b16-naflex", "siglip2", "google/siglip2-base-patch16-naflex", "naflex"),
        ("me/my-clip", "clip", "me/my-clip", "transformers"),
    ],
)
def test_a_model_is_pulled_pinned_and_used_by_its_name(
    hub: FolderHub, models: Path, name: str, kind: str, repository: str, backend: str
) -> None:
    save_tower(hub, kind, repository)
    hub.licenses[repository] = "mit"
    pack = pull(name, models, hub)
    assert pack.folder == models / repository.replace("/", "--")
    assert pack.manifest.revision == {repository: f"commit of {repository}"}
    assert pack.manifest.license == ("mit" if "/" in name else "Apache-2.0")
    assert pack.manifest.digests.keys() == {
        file.name for file in pack.folder.iterdir() if file.name != MANIFEST
    }
    verify(pack)
    spec = resolve(open_pack("mini", models), "clip", {"model": name})
    assert (spec.backend, spec.notice) == (backend, "")
    stage = build(spec, "cpu")
    stage.load()
    assert stage.run([draw_image(40, 30)])
    (pack.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(PackError, match=r"tokenizer\.json is altered"):
        resolve(open_pack("mini", models), "clip", {"model": name})


@pytest.mark.parametrize(
    ("name", "kind", "repository"),
    [
        ("lighton-ocr-2-1b", "mistral3", "lightonai/LightOnOCR-2-1B"),
        ("deepseek-ocr2", "deepseek_ocr2", "deepseek-community/DeepSeek-OCR-2"),
    ],
)
def test_a_page_reader_is_pulled_and_used_by_its_name(
    hub: FolderHub, models: Path, name: str, kind: str, repository: str
) -> None:
    readers.READERS[kind](hub.root / repository)
    assert list(pull(name, models, hub).manifest.stages) == ["ocr"]
    assert resolve(open_pack("mini", models), "ocr", {"model": name}).backend == "reader"


def test_a_text_recognizer_is_pulled_with_its_detector_and_used_by_its_name(
    hub: FolderHub, models: Path
) -> None:
    reading, finding = (f"PaddlePaddle/PP-OCRv5_server_{role}_safetensors" for role in ("rec", "det"))
    textnets.RECOGNIZERS["pp_ocrv5_server_rec"](hub.root / reading)
    textnets.DETECTORS["pp_ocrv5_server_det"](hub.root / finding)
    pack = pull("pp-ocrv5-server", models, hub)
    assert pack.manifest.revision == {name: f"commit of {name}" for name in (reading, finding)}
    verify(pack)
    spec = resolve(open_pack("mini", models), "ocr", {"model": "pp-ocrv5-server"})
    assert (spec.backend, spec.files) == ("ppocr", {"rec": str(pack.folder), "det": str(pack.folder / "det")})
    build(spec, "cpu").load()


def test_a_language_is_pulled_alone_and_uses_the_detector_of_the_rapidocr_package(
    hub: FolderHub, models: Path
) -> None:
    repository = "PaddlePaddle/arabic_PP-OCRv5_mobile_rec_safetensors"
    textnets.RECOGNIZERS["pp_ocrv5_mobile_rec"](hub.root / repository)
    pack = pull("pp-ocrv5-arabic", models, hub)
    spec = resolve(open_pack("mini", models), "ocr", {"model": "pp-ocrv5-arabic"})
    assert spec.files == bundled_weights() | {"rec": str(pack.folder)}


def test_a_detector_takes_the_stage_that_its_config_names(hub: FolderHub, models: Path) -> None:
    checkpoints.DETECTORS["d_fine"](hub.root / "me/finder")
    pack = pull("me/finder@main", models, hub)
    assert (list(pack.manifest.stages), hub.revisions) == (["yolo"], ["main"])
    assert list_packs(models) == ["mini", "me--finder@main"]
    assert resolve(open_pack("me/finder@main", models), "yolo").backend == "transformers"


def test_siglip_as_published_has_a_tokenizer_of_sentencepiece(
    hub: FolderHub, models: Path, tmp_path: Path
) -> None:
    repository = "google/siglip-base-patch16-224"
    save = checkpoints.make_towers(
        "Siglip",
        transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
        {},
        {"projection_size": 32, "vocab_size": 64},
    )
    save(hub.root / repository)
    lines = ["this is a photo of a red circle.", "a very unusual thing, two blue trees."] * 20
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "lines.txt"),
        model_prefix=str(hub.root / repository / "spiece"),
        vocab_size=48,
        hard_vocab_limit=False,
        eos_id=1,
        bos_id=-1,
        unk_id=0,
        minloglevel=2,
    )
    names = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "SiglipTokenizer", "model_max_length": 16} | names
    (hub.root / repository / "tokenizer_config.json").write_text(json.dumps(settings))
    (hub.root / repository / "tokenizer.json").unlink()
    pack = pull("siglip-b16-224", models, hub)
    assert "spiece.model" in pack.manifest.digests
    options = {"model": "siglip-b16-224", "options": {"labels": ["red", "blue"], "template": "{}"}}
    stage = build(resolve(open_pack("mini", models), "clip", options), "cpu")
    stage.load()
    [answer] = stage.run([draw_image(40, 30)])
    assert isinstance(answer, Clip)
    assert len({tag.score for tag in answer.tags}) == 2
    (pack.folder / "spiece.model").write_bytes(b"another")
    with pytest.raises(PackError, match=r"spiece\.model is altered"):
        resolve(open_pack("mini", models), "clip", options)


def test_a_second_pull_downloads_nothing(hub: FolderHub, models: Path) -> None:
    save_tower(hub, "clip", "me/clip")
    first = pull("me/clip", models, hub)
    hub.downloads.clear()
    assert pull("me/clip", models, hub) == first
    assert (hub.downloads, len(hub.revisions)) == ([], 1)


def test_only_the_files_that_are_needed_are_downloaded(hub: FolderHub, models: Path) -> None:
    folder = save_tower(hub, "clip", "me/clip")
    use_shards(folder)
    for name in (
        "chat_template.jinja",
        "merges.txt",
        "spiece.model",
        "README.md",
        "model.onnx",
        "tf_model.h5",
    ):
        (folder / name).write_text("text")
    (folder / "flax.msgpack").write_text("")
    (folder / "model.fp16.safetensors").write_bytes(b"not these")
    pack = pull("me/clip", models, hub)
    shards = {file.name for file in folder.glob("model-0*")}
    assert len(shards) > 1
    assert pack.manifest.digests.keys() == shards | {
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "other_detr", "architectures": ["OtherForObjectDetection"]},
            r'holds OtherForObjectDetection \(model_type "other_detr".*no backend takes; the nearest .*DETR, for example r',
        ),
        (
            {"model_type": "align", "architectures": ["AlignModel"]},
            "no backend takes; the nearest that visiond takes is CLIP, for example clip-b32",
        ),
        (
            {"model_type": "rf_detr", "architectures": ["RfDetrForInstanceSegmentation"]},
            r"by its config\.json, me/x holds a RfDetrForInstanceSegmentation .*visiond takes RfDetrForObjectDetection",
        ),
        (
            {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCR2ForCausalLM"]},
            "me/x holds DeepseekOCR2ForCausalLM .* no backend takes; the nearest .* is DeepSeek-OCR 2, .* deepseek-ocr2",
        ),
        (
            {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]},
            r"me/x holds a Mistral3ForConditionalGeneration \(Mistral 3\) .*takes LightOnOCRForConditionalGeneration",
        ),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "me/x has no image processor: none of"),
        (
            {"model_type": "qwen2_5_vl", "quantization_config": {"quant_method": "awq", "bits": 4}},
            r"the weights in me/x are quantized \(awq\), which visiond does not read; take the model's version in bfloat16",
        ),
        ({"model_type": "qwen2_vl", "quantization": {"bits": 4}}, r"me/x are quantized \(as for MLX\)"),
        (
            {"model_type": "florence2", "vision_config": {"model_type": "davit"}},
            "me/x holds an older Florence-2 that needs remote code; .* as in florence-community/Florence-2-base",
        ),
        (
            {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]},
            "no backend takes; the nearest that visiond takes is .*OCR",
        ),
        ({}, r'me/x holds a model \(model_type ""'),
    ],
)
def test_a_model_that_no_backend_takes_is_refused_before_its_weights_are_downloaded(
    hub: FolderHub, models: Path, config: dict[str, Any], message: str
) -> None:
    folder = hub.root / "me/x"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"large")
    with pytest.raises(PackError, match=message):
        pull("me/x", models, hub)
    assert hub.downloads == ["config.json"]
    assert not models.exists()


def test_a_repository_with_a_list_of_modules_is_of_an_embedding_model(tmp_path: Path) -> None:
    """As its config.json is that of the model that it was made of."""
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for files, stage in ((["modules.json"], "clip"), ([], "blip")):
        assert recognize("me/x", tmp_path, files)[:2] == (stage, "chat")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resample": 4}, r"me/finder cannot be used: .* resample = 4, which is not supported"),
        (
            {"size": {"shortest_edge": 64, "longest_edge": 99}, "do_pad": True},
            "the model in me/finder takes images of one size, .* Write a height and a width there",
        ),
    ],
)
def test_preprocessing_that_the_stage_does_not_do_is_refused_before_weights_are_downloaded(
    hub: FolderHub, models: Path, settings: dict[str, Any], message: str
) -> None:
    checkpoints.DETECTORS["d_fine"](folder := hub.root / "me/finder")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(PackError, match=message):
        pull("me/finder", models, hub)
    assert "model.safetensors" not in hub.downloads


FETCHED = r"hf download me/x --local-dir \./x"


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            "config.json model.fp16.safetensors",
            rf"`{FETCHED} && mv \./x/model\.fp16\.safetensors \./x/model\.safetensors`, and name the folder \./x\.$",
        ),
        (
            "config.json model.bf16.safetensors.index.json model.bf16-00001-of-00002.safetensors",
            r" mv \./x/model\.bf16\.safetensors\.index\.json \./x/model\.safetensors\.index\.json`",
        ),
        ("config.json pytorch_model.fp16.bin", r" mv \./x/pytorch_model\.fp16\.bin \./x/pytorch_model\.bin`"),
        ("config.json fp16/model.safetensors", r" mv \./x/fp16/\* \./x/`"),
        (
            "config.json checkpoint-9/config.json checkpoint-9/model.safetensors",
            rf"The subfolder checkpoint-9 has a model: type `{FETCHED}`, and name the folder \./x/checkpoint-9\.$",
        ),
        (
            "clip/config.json clip/model.safetensors",
            rf"has no config\.json, .*has no \.pt file\. The subfolder clip has a model: type `{FETCHED}`",
        ),
        (
            "config.json pytorch_model.bin.index.json",
            r"There is pytorch_model\.bin\.index\.json, which is a list of pickles",
        ),
        (
            "open_clip_config.json open_clip_model.safetensors",
            "which is a model of OpenCLIP; visiond does not",
        ),
        ("config.json tf_model.h5", "is a model for TensorFlow; .* save it with save_pretrained"),
        ("config.json README.md", r"none of [^:]*pytorch_model\.bin\.$"),
    ],
)
def test_for_weights_of_other_names_the_message_says_what_is_there_and_what_to_type(
    there: str, message: str, hub: FolderHub, models: Path
) -> None:
    repository = save_tower(hub, "clip", "me/x")
    config = (repository / "config.json").read_text()
    (repository / "config.json").unlink()
    (repository / "model.safetensors").unlink()
    for name in there.split():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(config)
    with pytest.raises(PackError, match=message):
        pull("me/x", models, hub)


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        ("model.fp16.safetensors", r"type `mv .*/x/model\.fp16\.safetensors .*/x/model\.safetensors`"),
        ("fp16/model.safetensors", r"type `mv .*/x/fp16/\* .*/x/`"),
        (
            "clip-model/",
            r"/x has no config\.json\. The subfolder clip-model has a model: name the folder .*/x/clip-model\.",
        ),
    ],
)
def test_for_a_folder_the_message_says_it_too(moved: str, message: str, hub: FolderHub, models: Path) -> None:
    folder = save_tower(hub, "clip", "x")
    if moved.endswith("/"):
        save_tower(hub, "clip", f"x/{moved}")
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
    else:
        (folder / moved).parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").rename(folder / moved)
    with pytest.raises(PackError, match=message):
        open_pack(folder, models)


def test_a_repository_of_another_kind_is_named(hub: FolderHub, models: Path) -> None:
    folder = hub.root / "me/x"
    folder.mkdir(parents=True)
    for name in ("best.pt", "best-pose.pt"):
        (folder / name).write_bytes(b"")
    with pytest.raises(
        PackError,
        match=r"has no config\.json, .* its \.pt files are best\.pt: name one, as org/name/file\.pt",
    ):
        pull("me/x", models, hub)
    with pytest.raises(
        PackError, match=r"there is no file me/x/last\.pt on the model hub; its \.pt files are"
    ):
        pull("me/x/last.pt", models, hub)
    with pytest.raises(PackError, match=r"me/x/best-pose\.pt is a YOLO pose model; visiond takes YOLO"):
        pull("me/x/best-pose.pt", models, hub, allow_pickle=True)
    with pytest.raises(UnknownName, match='did you mean "clip-b32"'):
        pull("clpi-b32", models, hub)
    assert hub.downloads == []


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_json_object_is_named_by_its_repository(
    file: str, hub: FolderHub, models: Path
) -> None:
    folder = save_tower(hub, "clip", "me/my-clip")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / file).write_text("[1, 2]")
    with pytest.raises(PackError, match=rf"^me/my-clip/{file} cannot be read: Expected `object`"):
        pull("me/my-clip", models, hub)


def test_a_byte_order_mark_is_removed_when_a_model_is_pulled_and_refused_in_a_folder(
    hub: FolderHub, models: Path
) -> None:
    folder, names = save_tower(hub, "clip", "me/clip"), ("config.json", "tokenizer_config.json")
    for name in names:
        (folder / name).write_bytes(BOM_UTF8 + (folder / name).read_bytes())
    with pytest.raises(
        PackError, match=r"/config\.json, .*/tokenizer_config\.json begins with a byte order mark.* sed -i"
    ):
        open_pack(folder, models)
    pack = pull("me/clip", models, hub)
    build(resolve(pack, "clip", {"options": {"labels": ["red"]}}), "cpu").load()


def test_numbers_that_only_python_writes_into_json_are_read(hub: FolderHub, models: Path) -> None:
    folder = save_tower(hub, "clip", "me/clip")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"limits": [float("nan"), float("inf")]}))
    assert "NaN, Infinity" in (folder / "config.json").read_text()
    build(resolve(pull("me/clip", models, hub), "clip"), "cpu").load()


def test_a_pickle_is_downloaded_only_where_that_is_allowed(hub: FolderHub, models: Path) -> None:
    folder = save_tower(hub, "clip", "openai/clip-vit-base-patch32")
    expected = load_file(folder / "model.safetensors")
    use_pickle(folder)
    with pytest.raises(PackError, match=r"patch32/pytorch_model\.bin is a pickle.*add --allow-pickle"):
        pull("clip-b32", models, hub)
    assert hub.downloads == ["config.json"]
    pack = pull("clip-b32", models, hub, allow_pickle=True)
    weights = load_file(pack.folder / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert not list(pack.folder.glob("*.bin"))
    assert resolve(open_pack("clip-b32", models), "clip").fingerprint


def test_a_file_of_ultralytics_is_converted_once(hub: FolderHub, models: Path, blank_pack: Pack) -> None:
    folder = hub.root / "Ultralytics/YOLO26"
    folder.mkdir(parents=True)
    write_checkpoint(folder, files_in(blank_pack.folder)).rename(folder / "yolo26n.pt")
    with pytest.raises(PackError, match=r"Ultralytics/YOLO26/yolo26n\.pt is a pickle.*--allow-pickle"):
        pull("yolo26n", models, hub)
    pack = pull("yolo26n", models, hub, allow_pickle=True)
    assert pack.folder == models / "Ultralytics--YOLO26--yolo26n"
    assert pack.manifest.digests.keys() == {"yolo.safetensors", "yolo.json"}
    assert (pack.manifest.license, pack.manifest.stages["yolo"].backend) == ("AGPL-3.0", "ultralytics")
    stage = build(resolve(open_pack("mini", models), "yolo", {"model": "yolo26n"}), "cpu")
    stage.load()
    assert stage.run([draw_image(64, 64)])


def test_weights_of_another_class_are_refused_by_their_header(
    hub: FolderHub, models: Path, blank_pack: Pack
) -> None:
    folder = hub.root / "me/blip"
    shutil.copytree(blank_pack.folder / "blip", folder)
    config = transformers.BlipConfig.from_pretrained(folder)
    transformers.BlipForQuestionAnswering(config).save_pretrained(folder)
    changed = json.loads((folder / "config.json").read_text()) | {"architectures": None}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(PackError, match=r"^me/blip/model\.safetensors holds weights of BLIP for questions"):
        pull("me/blip", models, hub)
    assert list_packs(models) == ["mini"]


def test_the_captions_of_a_pulled_model_are_compared_by_the_configured_clip(
    hub: FolderHub, models: Path, blank_pack: Pack
) -> None:
    shutil.copytree(blank_pack.folder / "blip", hub.root / "Salesforce/blip-image-captioning-large")
    save_tower(hub, "siglip", SIGLIP2)
    for name in ("blip-large", "siglip2-b16-224"):
        pull(name, models, hub)
    overrides = {"clip": {"model": "siglip2-b16-224"}, "blip": {"model": "blip-large"}}
    clip, blip = resolve_all(open_pack("mini", models), ("clip", "blip"), overrides)
    assert blip.files["clip"] == clip.files["model"]
    assert clip.notice == blip.notice == ""


def test_the_files_of_another_commit_are_not_kept(hub: FolderHub, models: Path) -> None:
    save_tower(hub, "clip", "me/clip")
    partial = models / ".me--clip.partial"
    partial.mkdir(parents=True)
    (partial / ".commit").write_text("an older commit")
    (partial / "vocab.json").write_text("of the older commit")
    assert "vocab.json" not in pull("me/clip", models, hub).manifest.digests
    assert not partial.exists()


@pytest.mark.parametrize("name", ["yolo26n", ""])
def test_a_checkpoint_of_ultralytics_is_not_downloaded_without_it(
    monkeypatch: pytest.MonkeyPatch, hub: FolderHub, models: Path, blank_pack: Pack, name: str
) -> None:
    folder = hub.root / "Ultralytics/YOLO26"
    folder.mkdir(parents=True)
    write_checkpoint(folder, files_in(blank_pack.folder)).rename(folder / "yolo26n.pt")
    shutil.copytree(folder, hub.root / "Ultralytics/YOLOv8")
    (hub.root / "Ultralytics/YOLOv8/yolo26n.pt").rename(hub.root / "Ultralytics/YOLOv8/yolov8n.pt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as if it were not installed
    with pytest.raises(PackError, match=r"n\.pt can only be read by ultralytics.*pip install"):
        pull(name, models, hub, allow_pickle=True) if name else pull_standard(
            models, print, hub, allow_pickle=True
        )
    assert not list(models.rglob("*.pt"))
