"""Which folders the stage classifier takes, and what it says of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from stages.classifier.recognition import CLASSIFIERS, list_labels
from stages.contract import timm
from stages.contract.manifest import PackError
from stages.weights.packs import open_pack, resolve
from tests.stages import classifiers

# Of transformers' own list: those that need other inputs, have several heads, need other libraries or cannot be loaded with
# labels of one's own (pvt).
LEFT_OUT = {
    *(
        "dinat",
        "donut-swin",
        "imagegpt",
        "perceiver",
        "pp_lcnet",
        "pvt",
        "shieldgemma2",
        "siglip2",
        "textnet",
    ),
}


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classifiers.save("siglip", folder := tmp_path_factory.mktemp("siglip") / "siglip")
    return folder


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_classes_are_those_of_transformers() -> None:
    ours: dict[str, set[str]] = {}
    for model in CLASSIFIERS:
        ours.setdefault(model.type, set()).add(model.name)
    known = {
        kind: {names} if isinstance(names, str) else {*names}
        for kind, names in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.items()
    }
    assert ours == {kind: names for kind, names in known.items() if kind not in LEFT_OUT}


def test_a_classifier_with_the_tower_of_siglip_is_for_this_stage_and_not_for_clip(
    siglip: Path, tmp_path: Path
) -> None:
    pack = open_pack(siglip, tmp_path)
    assert [*pack.manifest.stages] == ["classifier"]
    with pytest.raises(
        PackError, match=r"no weights for clip; it has classifier. Name it under \[stages.classifier\]"
    ):
        resolve(pack, "clip")


def test_two_variants_have_fingerprints_of_their_own(siglip: Path, tmp_path: Path) -> None:
    pack = open_pack(siglip, tmp_path)
    one, two, three = (
        resolve(pack, stage, {"options": options})
        for stage, options in (("classifier_a", {}), ("classifier_b", {}), ("classifier_a", {"top_k": 1}))
    )
    assert (one.name, one.files, one.backend) == ("classifier_a", {"model": str(siglip)}, "transformers")
    assert len({one.fingerprint, two.fingerprint, three.fingerprint}) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["Siglip2ForImageClassification"], "model_type": "siglip2"},
            r'holds a Siglip2ForImageClassification \(model_type "siglip2"\), which visiond does not take. .*, ViT, ViT MSN\.',
        ),
    ],
)
def test_other_classifiers_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "other", **config)
    with pytest.raises(PackError, match=message):
        open_pack(folder, tmp_path)


def test_a_model_of_timm_is_refused_without_that_library_or_without_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vit"
    classifiers.save("timm_wrapper", folder)
    assert open_pack(folder, tmp_path / "one").manifest.stages.keys() == {"classifier"}
    monkeypatch.setattr(timm, "has_timm", lambda: False)
    with pytest.raises(PackError, match=r"/vit has parts of the library timm, .* 'visiond\[timm\]'"):
        open_pack(folder, tmp_path / "two")
    monkeypatch.undo()
    classifiers.save("timm_wrapper", tmp_path / "features", num_classes=0, label_names=[])
    with pytest.raises(PackError, match="/features holds a model without classes"):
        open_pack(tmp_path / "features", tmp_path / "three")


@pytest.mark.parametrize("count", [1000, 11821, 7])
def test_classes_of_timm_without_names_are_those_of_imagenet_or_have_numbers(
    count: int, tmp_path: Path
) -> None:
    pytest.importorskip("timm", reason="timm is not installed: make tools")
    config = {
        "architecture": "test_vit",
        "num_classes": count,
        "pretrained_cfg": {"input_size": [3, 160, 160]},
    }
    folder = write_config(tmp_path / "vit", **config)
    expected = AutoConfig.from_pretrained(folder).id2label
    ours = list_labels(folder)
    assert len(ours) == len({*ours}) == len(expected) == count
    assert [label.removesuffix(f" ({place})") for place, label in enumerate(ours)] == [*expected.values()]


def test_without_a_model_the_stage_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        PackError, match=r"has no weights for classifier; .* Set model in the table of each classifier,"
    ):
        resolve(open_pack("mini", tmp_path), "classifier_safety")


def test_a_folder_with_a_classifier_in_a_subfolder_is_taken(siglip: Path, tmp_path: Path) -> None:
    shutil.copytree(siglip, tmp_path / "pack" / "classifier")
    spec = resolve(open_pack(tmp_path / "pack", tmp_path), "classifier")
    assert spec.files == {"model": str(tmp_path / "pack" / "classifier")}


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"id2label": {"0": "a", "1": "b", "2": "c"}},
        {"id2label": {"2": "c", "0": "a", "1": "b"}},
        {"num_labels": 4},
        {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}},
    ],
)
def test_labels_are_those_of_transformers(labels: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(
        tmp_path / "vit", model_type="vit", architectures=["ViTForImageClassification"], **labels
    )
    names = AutoConfig.from_pretrained(folder).id2label
    assert list_labels(folder) == [names[number] for number in sorted(names)]


def test_labels_without_numbers_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "vit", id2label={"cat": 0})
    with pytest.raises(PackError, match="the labels in id2label must have numbers as keys"):
        list_labels(folder)
