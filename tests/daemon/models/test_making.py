"""`visiond models make`: a pack from checkpoints on disk, complete or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from daemon.cli.models import models_app
from daemon.core.errors import ModelsUnusable, NotWritable
from daemon.models import making
from daemon.workers.tryout import Tryout
from stages.contract.manifest import MANIFEST
from stages.ocr.onnxfile import weight_files
from stages.registry import registry
from stages.weights.packs import MINI, Pack, open_pack, resolve_all, verify
from tests.stages import captioners, checkpoints
from tests.stages.ocr.textnets import RECOGNIZERS
from tests.stages.readers import READERS
from tests.stages.yolo.detectors import files_in, write_checkpoint


def save_checkpoint(folder: Path) -> Path:
    """The mini pack's YOLO, as ultralytics' trainer saves it."""
    return write_checkpoint(folder, files_in(MINI))


def test_every_option_reaches_the_pack_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(making, "make_pack", lambda *given, **options: asked.append((given, options)))
    monkeypatch.setattr(making, "explain_use", lambda *_: ["made"])
    paths = [word for stage in ("ocr", "yolo", "clip", "blip") for word in (f"--{stage}", f"the/{stage}")]
    made = CliRunner().invoke(
        models_app, ["make", "mine", *paths, "--labels", "tags.txt", "--allow-pickle", "--force"]
    )
    assert made.output == "made\n"
    [((folder, sources, _), options)] = asked
    assert folder == Path("mine")
    assert sources == {stage: Path("the", stage) for stage in ("ocr", "yolo", "clip", "blip")}
    assert options == {"labels": Path("tags.txt"), "allow_pickle": True, "force": True}


def test_a_pack_is_made_tried_pinned_and_used(tmp_path: Path) -> None:
    # without a manifest, and so without a notice
    clip = shutil.copytree(MINI / "clip", tmp_path / "weights" / "clip")
    sources = {"yolo": save_checkpoint(tmp_path), "clip": clip, "blip": MINI / "blip"}
    typed = ["make", str(tmp_path / "mine"), "--yolo", str(sources["yolo"])]
    refused = CliRunner().invoke(models_app, typed).exception
    assert isinstance(refused, ModelsUnusable)
    assert ("--allow-pickle" in str(refused), (tmp_path / "mine").exists()) == (True, False)
    said: list[str] = []
    manifest = making.make_pack(tmp_path / "mine", sources, said.append, allow_pickle=True)
    assert [line.split()[0] for line in said if "processes two test images" in line] == [
        "yolo",
        "clip",
        "blip",
    ]
    assert f'    pack = "{tmp_path / "mine"}"' in making.explain_use(tmp_path / "mine", manifest)
    pack = open_pack(tmp_path / "mine", tmp_path / "models")
    verify(pack)
    assert pack.manifest.digests.keys() >= {
        "yolo.safetensors",
        "yolo.json",
        "labels.txt",
        "clip/model.safetensors",
    }
    assert not list(pack.folder.rglob("*.pt"))
    specs = resolve_all(pack, ("ocr", "yolo", "clip", "blip"), {})
    assert [("mini pack" in spec.notice) for spec in specs] == [False, False, False, True], (
        "a notice goes with its weights"
    )


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage passes its trial, without being built."""
    monkeypatch.setattr(making, "try_stages", lambda layout: [Tryout(stage) for stage in layout.specs])


def make(folder: Path, *, force: bool = False, **sources: Path) -> list[str]:
    return making.explain_use(folder, making.make_pack(folder, sources, lambda _: None, force=force))


@pytest.mark.usefixtures("well")
def test_a_pack_of_some_stages_reports_what_else_is_needed(tmp_path: Path) -> None:
    told = "\n".join(make(tmp_path / "mine", yolo=MINI / "yolo.safetensors"))
    assert (
        'It does not contain clip and blip. Either write `stages = ["ocr", "yolo"]` under [pipeline]' in told
    )
    assert 'or name other weights, for example `model = "/path"` under [stages.clip]' in told
    assert open_pack(tmp_path / "mine", tmp_path / "models").manifest.stages.keys() == {"yolo"}


@pytest.mark.usefixtures("well")
def test_networks_of_ocr_are_taken_from_onnx_files_and_folders_of_transformers(tmp_path: Path) -> None:
    RECOGNIZERS["pp_ocrv5_mobile_rec"](tmp_path / "own" / "rec")
    (tmp_path / "own" / "det").mkdir()
    shutil.copy(weight_files()["det"], tmp_path / "own" / "det" / "a.onnx")
    told = make(tmp_path / "mine", ocr=tmp_path / "own", yolo=MINI / "yolo.safetensors")
    assert told[0].startswith(f"{tmp_path / 'mine'} contains ocr and yolo. To use it")
    pack = open_pack(tmp_path / "mine", tmp_path / "models")
    verify(pack)
    [spec] = resolve_all(pack, ["ocr"], {})
    folder = pack.folder / "ocr"
    assert spec.files == {"det": str(folder / "det" / "a.onnx"), "rec": str(folder / "rec")}
    make(tmp_path / "one", ocr=tmp_path / "own" / "det" / "a.onnx")
    [spec] = resolve_all(open_pack(tmp_path / "one", tmp_path / "models"), ["ocr"], {})
    assert spec.files == {
        "det": str(tmp_path / "one" / "ocr" / "det" / "a.onnx"),
        "rec": str(weight_files()["rec"]),
    }


@pytest.mark.usefixtures("well")
def test_a_page_reader_is_taken_for_ocr_and_anything_else_is_refused(tmp_path: Path) -> None:
    READERS["lighton_ocr"](tmp_path / "reader")
    make(tmp_path / "mine", ocr=tmp_path / "reader")
    assert open_pack(tmp_path / "mine", tmp_path / "models").manifest.stages["ocr"].backend == "reader"
    for source, message in (
        ("nowhere", "must be a text detector or"),
        ("mine/ocr/model.safetensors", "must be a"),
    ):
        with pytest.raises(ModelsUnusable, match=f"--ocr {tmp_path / source} {message}"):
            make(tmp_path / "other", ocr=tmp_path / source)


def load(pack: Pack, *stages: str) -> None:
    """As the trial does, but in this process, which has imported torch."""
    for spec in resolve_all(pack, stages, {}):
        registry.build(spec, "cpu").load()


@pytest.mark.usefixtures("well")
def test_a_folder_of_a_transformers_detector_is_taken_with_its_classes_as_tags(tmp_path: Path) -> None:
    checkpoints.DETECTORS["d_fine"](tmp_path / "detector")
    making.make_pack(
        tmp_path / "mine", {"yolo": tmp_path / "detector", "clip": MINI / "clip"}, lambda _: None
    )
    pack = open_pack(tmp_path / "mine", tmp_path / "models")
    assert [pack.manifest.stages[stage].backend for stage in ("yolo", "clip")] == ["transformers"] * 2
    assert (pack.folder / "labels.txt").read_text().startswith("thing 0\nthing 1\n")
    load(pack, "yolo", "clip")


@pytest.mark.usefixtures("well")
def test_a_folder_of_a_chat_model_is_taken_with_its_chat_template(tmp_path: Path) -> None:
    captioners.CAPTIONERS["qwen3_vl"](tmp_path / "captioner")
    making.make_pack(tmp_path / "mine", {"blip": tmp_path / "captioner"}, lambda _: None)
    pack = open_pack(tmp_path / "mine", tmp_path / "models")
    assert pack.manifest.stages["blip"].backend == "chat"
    assert "blip/chat_template.jinja" in pack.manifest.digests
    load(pack, "blip")


def test_a_captioner_that_no_backend_takes_is_refused_with_all_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "git", "architectures": ["GitForCausalLM"]}')
    with pytest.raises(
        ModelsUnusable, match=r"holds a GitForCausalLM .*BlipForCond.*Florence2ForCond.*Qwen3VLForCond"
    ):
        make(tmp_path / "mine", blip=tmp_path)


def test_a_chat_model_is_refused_in_the_place_of_the_embedding_model_that_was_made_from_it(
    tmp_path: Path,
) -> None:
    writes, embeds = tmp_path / "writes", tmp_path / "embeds"
    captioners.CAPTIONERS["qwen3_vl"](writes)
    captioners.save_qwen_embedding(embeds)
    with pytest.raises(ModelsUnusable, match=r"--clip .*writes has no modules\.json, .*copy.*--blip"):
        make(tmp_path / "mine", clip=writes)
    with pytest.raises(ModelsUnusable, match=r"--blip .*embeds has a modules\.json.*--clip"):
        make(tmp_path / "mine", blip=embeds)


@pytest.mark.usefixtures("well")
def test_a_pickle_of_transformers_is_converted_only_where_that_is_allowed(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    clip = shutil.copytree(MINI / "clip", tmp_path / "clip")
    torch.save(load_file(clip / "model.safetensors"), clip / "pytorch_model.bin")
    (clip / "model.safetensors").unlink()
    with pytest.raises(ModelsUnusable, match=r"pytorch_model\.bin is a pickle.*--allow-pickle"):
        make(tmp_path / "mine", clip=clip)
    making.make_pack(tmp_path / "mine", {"clip": clip}, lambda _: None, allow_pickle=True)
    assert {file.suffix for file in (tmp_path / "mine").rglob("*") if file.is_file()} == {
        ".json",
        ".txt",
        ".safetensors",
    }


@pytest.mark.usefixtures("well")
def test_an_existing_folder_is_replaced_only_with_force_and_only_if_it_is_a_pack(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "photos"
    make(mine, yolo=MINI / "yolo.safetensors")
    with pytest.raises(NotWritable, match=r"mine already exists.*--force"):
        make(mine, clip=MINI / "clip")
    make(mine, force=True, clip=MINI / "clip")
    assert json.loads((mine / MANIFEST).read_text())["stages"].keys() == {"clip"}
    other.mkdir()
    (other / "a.jpg").write_text("mine")
    with pytest.raises(NotWritable, match=r"photos exists and is not a pack"):
        make(other, force=True, clip=MINI / "clip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "photos"]


def test_all_sources_are_checked_before_anything_is_converted_and_each_that_is_wrong_is_named(
    tmp_path: Path,
) -> None:
    wrong = {"clip": MINI / "blip", "blip": tmp_path / "nowhere"}
    said: list[str] = []
    labels, sources = tmp_path / "labels.txt", {"yolo": save_checkpoint(tmp_path), **wrong}
    with pytest.raises(ModelsUnusable) as refusal:
        making.make_pack(tmp_path / "mine", sources, said.append, labels=labels, allow_pickle=True)
    clip, blip, no_labels = str(refusal.value).splitlines()
    assert f"{MINI / 'blip'} holds a BlipForConditionalGeneration" in clip
    assert blip.startswith(f"--blip {tmp_path / 'nowhere'} must be a folder")
    assert no_labels == f"--labels {labels} must be a text file with a label on each line."
    assert said == []


@pytest.mark.parametrize("source", ["nothing.pt", "no-folder", "torn"])
def test_a_checkpoint_that_cannot_be_used_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(making, "try_stages", lambda _: [Tryout("clip", "cpu", problem=f"{MINI} fails.")])
    torn = shutil.copytree(MINI / "clip", tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    kind = "yolo" if source.endswith(".pt") else "clip"
    with pytest.raises(ModelsUnusable, match=rf"{source}.*(must be|cut short)"):
        make(tmp_path / "mine", **dict[str, Any]({kind: tmp_path / source}))
    with pytest.raises(ModelsUnusable, match=r"clip on cpu: .* fails"):
        make(tmp_path / "mine", clip=MINI / "clip")
    assert [path.name for path in tmp_path.iterdir()] == ["torn"]
