from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.registry import registry
from stages.weights.assembly import read_classes
from stages.weights.layouts import describe_unknown, describe_words, list_versions
from stages.weights.packs import MINI, open_pack, resolve


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A CLIP model of the user's own, without labels."""
    return shutil.copytree(MINI / "clip", tmp_path / "own")


def warn(models: Path, section: dict[str, Any], look: str = "") -> str:
    return describe_words(resolve(open_pack("mini", models), "clip", section), look)


def test_an_own_model_with_the_words_of_the_demonstration_pack_is_told_what_to_write(
    own: Path, tmp_path: Path
) -> None:
    warning = warn(tmp_path, {"model": str(own)})
    assert warning.startswith("clip: the model uses the tags of the demonstration pack mini (")
    assert 'under [stages.clip.options], for example labels = ["invoice", "street"].' in warning
    assert "in the options of [[second_look]] big, for" in warn(tmp_path, {"model": str(own)}, "big")


def test_the_words_of_the_pack_that_the_model_is_in_or_of_the_user_are_no_warning(
    own: Path, tmp_path: Path
) -> None:
    assert warn(tmp_path, {}) == ""
    for labels in (["invoice"], []):
        assert warn(tmp_path, {"model": str(own), "options": {"labels": labels}}) == ""
    (own / "labels.txt").write_text("invoice\n")
    assert warn(tmp_path / "other", {"model": str(own)}) == ""


@pytest.mark.parametrize(
    ("files", "named", "message"),
    [
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "", "has an adapter .* Merge both"),
        (
            {"config.json": "{}", "model.safetensors": ""},
            "model.safetensors",
            "one file of a model; name its folder, .*own$",
        ),
        (
            {"notes.txt": ""},
            "",
            r"it must have a model as transformers saves it \(config.json with model.safetensors\)",
        ),
    ],
)
def test_a_path_that_is_no_model_is_refused_and_the_message_says_what_to_name(
    files: dict[str, str], named: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    assert re.search(message, describe_unknown(folder / named, "").rstrip("."))


def test_a_fingerprint_has_the_version_of_a_model_whose_answers_have_changed_also_for_captions(
    tmp_path: Path,
) -> None:
    for name in ("clip", "siglip", "blip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{name}"}}')
    blip = registry.find_backend("blip", "transformers")
    for name, versions in (("clip", {}), ("siglip", {"versions": {"clip": "2"}})):
        assert list_versions(blip, {"model": tmp_path / "blip", "clip": tmp_path / name}) == versions


def test_classes_without_a_name_are_no_labels(tmp_path: Path) -> None:
    (tmp_path / "yolo").mkdir()
    (tmp_path / "yolo/config.json").write_text(
        '{"id2label": {"0": "N/A", "1": "cup", "2": "N/A", "3": "dog"}}'
    )
    assert read_classes(tmp_path) == ["cup", "dog"]
