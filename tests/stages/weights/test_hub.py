from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import BlipForConditionalGeneration, CLIPModel

from stages.blip.descriptor import Caption
from stages.blip.stage import BlipStage
from stages.clip.stage import ClipStage
from stages.contract.base import ImageError
from stages.contract.manifest import HubUnreachable, PackError
from stages.pretrained.checkpoints import load_model
from stages.weights.catalog import CATALOG
from stages.weights.hub import HuggingFaceHub
from stages.weights.packs import Pack, list_packs, open_pack, resolve, resolve_all, verify
from stages.weights.standard import MODELS, pull_standard
from stages.yolo.stage import YoloStage
from tests.stages.pictures import draw_image
from tests.stages.weights.hubs import FolderHub
from tests.stages.yolo.detectors import files_in, write_checkpoint

SOURCES = {stage: CATALOG[model].repository for stage, model in MODELS.items()}


@pytest.fixture
def hub(tmp_path: Path, blank_pack: Pack) -> FolderHub:
    """Small models, as pickles, where the standard pack looks for the full ones."""
    root = tmp_path / "hub"
    for stage, kind in (("clip", CLIPModel), ("blip", BlipForConditionalGeneration)):
        folder = root / SOURCES[stage]
        shutil.copytree(blank_pack.folder / stage, folder)
        weights = load_model(kind, str(folder), torch.float32, "cpu").state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "README.md").write_text("not wanted")
    (root / SOURCES["yolo"]).mkdir(parents=True)
    write_checkpoint(root / SOURCES["yolo"], files_in(blank_pack.folder)).rename(
        root / SOURCES["yolo"] / "yolov8n.pt"
    )
    return FolderHub(root)


def test_a_pulled_pack_runs_and_remembers_where_it_came_from(tmp_path: Path, hub: FolderHub) -> None:
    progress: list[str] = []
    pack = pull_standard(tmp_path / "models", progress.append, hub, allow_pickle=True)
    assert pack.manifest.revision == {
        repository: f"commit of {repository}" for repository in SOURCES.values()
    }
    assert [name for name in list_packs(tmp_path / "models") if "--" not in name] == ["mini", "standard"]
    assert pack.manifest.license == "AGPL-3.0, MIT, BSD-3-Clause"
    verify(pack)
    image = draw_image(80, 80)
    yolo, clip, blip = resolve_all(pack, ("yolo", "clip", "blip"), {})
    for stage in (YoloStage(yolo, "cpu"), ClipStage(clip, "cpu"), BlipStage(blip, "cpu")):
        stage.load()
        [answer] = stage.run([image])
        assert not isinstance(answer, ImageError)
        image.results[stage.name] = answer
    caption = image.results["blip"]
    assert isinstance(caption, Caption)
    assert caption.similarity is not None
    assert progress[-1].endswith("standard is ready.")


def test_no_pickle_is_left_and_the_weights_are_the_same(
    tmp_path: Path, hub: FolderHub, blank_pack: Pack
) -> None:
    pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    folder = tmp_path / "models" / "standard"
    assert not [*folder.rglob("*.bin"), *folder.rglob("*.pt"), *folder.rglob("README.md")]
    for stage, kind in (("clip", CLIPModel), ("blip", BlipForConditionalGeneration)):
        pulled = load_model(kind, str(folder / stage), torch.float32, "cpu").state_dict()
        for name, tensor in (
            load_model(kind, str(blank_pack.folder / stage), torch.float32, "cpu").state_dict().items()
        ):
            assert torch.equal(pulled[name], tensor), name


def test_an_existing_pack_is_not_pulled_again(tmp_path: Path, hub: FolderHub) -> None:
    first = pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    hub.downloads.clear()
    assert pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True) == first
    assert hub.downloads == []


def test_a_pulled_file_that_changes_is_noticed(tmp_path: Path, hub: FolderHub) -> None:
    pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    (tmp_path / "models/standard/labels.txt").write_text("cat\n")
    with pytest.raises(PackError, match=r"labels.txt is altered. Copy or pull it again"):
        resolve(open_pack("standard", tmp_path / "models"), "clip")


def test_a_failed_pull_leaves_no_pack_and_can_be_repeated(tmp_path: Path, hub: FolderHub) -> None:
    weights = hub.root / SOURCES["yolo"] / "yolov8n.pt"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(PackError, match=r"yolov8n\.pt"):
        pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    with pytest.raises(PackError, match="pull it, or copy the folder"):
        open_pack("standard", tmp_path / "models")
    assert not (tmp_path / "models" / "standard").exists()
    weights.write_bytes(whole)
    pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    verify(open_pack("standard", tmp_path / "models"))


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return (Path.touch, (Path("bomb"),))


def test_weights_that_would_run_code_are_refused(
    tmp_path: Path, hub: FolderHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Bomb()}, hub.root / SOURCES["clip"] / "pytorch_model.bin")
    with pytest.raises(PackError, match=r"pytorch_model\.bin"):
        pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)
    assert not Path("bomb").exists()


def test_a_repository_without_weights_is_named(tmp_path: Path, hub: FolderHub) -> None:
    (hub.root / SOURCES["blip"] / "pytorch_model.bin").unlink()
    with pytest.raises(PackError, match=f"{SOURCES['blip']} has no weights"):
        pull_standard(tmp_path / "models", lambda _: None, hub, allow_pickle=True)


@pytest.mark.parametrize(
    "error",
    [
        OfflineModeIsEnabled("Cannot reach the hub: offline mode."),
        HfHubHTTPError.__bases__[0]("No route to host"),
    ],
)
def test_without_a_network_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        HubUnreachable, match=r"cannot be reached .* If you have a mirror, set HF_ENDPOINT to it\.$"
    ):
        pull_standard(tmp_path, lambda _: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    with pytest.raises(HubUnreachable, match=r"cannot be reached .*\)\.$"):
        HuggingFaceHub().download("a/b", "c", ["d"], tmp_path)


def test_a_full_disk_is_not_an_error_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(OSError, match="No space left on device"):
        HuggingFaceHub().download("a/b", "c", ["d"], tmp_path)
