from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.contract.descriptor import Backend, Descriptor
from stages.contract.manifest import (
    MANIFEST,
    Manifest,
    NotPulled,
    PackError,
    StageEntry,
    digest_folder,
    read_manifest,
    write_manifest,
)
from stages.contract.options import FakeOptions
from stages.ocr.descriptor import bundled_weights
from stages.registry import registry
from stages.registry.registry import ORDER, UnknownName
from stages.weights.packs import (
    MINI,
    Pack,
    list_packs,
    open_pack,
    open_plain,
    resolve,
    resolve_all,
    verify,
)

YOLO_JSON = json.dumps({"model": "yolov8n.yaml", "nc": 1, "names": ["cup"], "imgsz": 320})


def write(file: Path, text: str) -> None:
    """A file with this text in it; as safetensors, one without tensors that has it as metadata."""
    if file.suffix == ".safetensors":
        header = json.dumps({"__metadata__": {"text": text}}).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    else:
        file.write_text(text)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack whose weights are a few bytes each, enough for everything that needs no model."""
    folder = tmp_path / "models" / "small"
    parts = ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json")
    for name in (f"{model}/{part}" for model in ("clip", "blip") for part in parts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, json.dumps({"model_type": name.partition("/")[0], "file": name}))
    for name, text in (("yolo.safetensors", "yolo"), ("yolo.json", YOLO_JSON), ("labels.txt", "a label")):
        write(folder / name, text)
    stages = {
        "yolo": StageEntry(
            "ultralytics", {"weights": "yolo.safetensors", "config": "yolo.json"}, {"conf": 0.4}
        ),
        "clip": StageEntry("transformers", {"model": "clip", "labels": "labels.txt"}),
        "blip": StageEntry("transformers", {"model": "blip", "clip": "clip"}, dtype="float16"),
    }
    write_manifest(
        folder / MANIFEST,
        Manifest(name="small", notice="made up", stages=stages, digests=digest_folder(folder)),
    )
    return open_pack("small", tmp_path / "models")


def test_a_pack_is_found_by_name_and_by_folder(pack: Pack) -> None:
    assert open_pack(pack.folder, pack.models_folder) == pack == open_pack("small", pack.models_folder)
    assert (pack.name, pack.notice) == ("small", "made up")


def test_the_pack_inside_the_package_is_whole_and_small(tmp_path: Path) -> None:
    mini = open_pack("mini", tmp_path)
    assert mini.folder == MINI
    verify(mini)
    assert {spec.name for spec in resolve_all(mini, ORDER, {})} == {
        "ocr",
        "yolo",
        "clip",
        "blip",
    }
    assert sum(file.stat().st_size for file in MINI.rglob("*") if file.is_file()) <= 10_000_000
    assert mini.manifest.trained or "random weights" in mini.notice


def test_a_further_captioner_has_the_packs_captioner_and_the_clip_that_runs_before_it(tmp_path: Path) -> None:
    mini, stages = open_pack("mini", tmp_path), (*ORDER, "blip_long")
    options = {"blip_long": {"options": {"prompt": "a"}}}
    *_, clip, blip, further = resolve_all(mini, stages, options)
    assert further.files == blip.files
    assert further.files["clip"] == clip.files["model"]
    assert (further.name, further.options["prompt"], blip.options.get("prompt")) == ("blip_long", "a", None)
    *_, other_tags, _, same = resolve_all(mini, stages, options | {"clip": {"options": {"labels": []}}})
    assert other_tags.fingerprint != clip.fingerprint
    assert same.fingerprint == further.fingerprint != blip.fingerprint  # as the tags change no caption


def test_an_unknown_pack_is_refused_with_the_nearest_known_one(pack: Pack) -> None:
    with pytest.raises(UnknownName, match='there is no pack or model "smal"; did you mean "small"'):
        open_pack("smal", pack.models_folder)
    with pytest.raises(
        UnknownName,
        match=r'there is no pack or model "zzz"; choose one of mini, .*must have a slash in its path',
    ):
        open_pack("zzz", pack.models_folder)
    with pytest.raises(UnknownName, match='did you mean "rf-detr-small"'):
        open_pack("rf-detr-smal", pack.models_folder)
    with pytest.raises(PackError, match=f"there is no folder {Path.cwd() / 'nowhere'};"):
        open_pack("./nowhere", pack.models_folder)


def test_the_error_for_a_missing_standard_pack_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NotPulled, match=r"pull it, or copy the folder"):
        open_pack("standard", tmp_path)


def test_the_error_for_a_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    for name, known_as in (("yolo26n@v1", "yolo26n@v1"), ("Ultralytics/YOLO26/yolo26n.pt", "yolo26n")):
        with pytest.raises(
            NotPulled, match=rf"the model {known_as} is not in .*; pull it, or copy the folder"
        ) as e:
            open_pack(name, tmp_path, stage="yolo")
        assert e.value.name == known_as
    with pytest.raises(PackError, match="yolo26n is a model for the stage yolo, not for clip"):
        open_pack("yolo26n", tmp_path, stage="clip")


def test_a_pack_that_is_not_complete_is_not_listed(pack: Pack) -> None:
    shutil.copytree(pack.folder, pack.models_folder / ".other.partial")
    assert list_packs(pack.models_folder) == ["mini", "small"]


def test_a_stage_knows_what_people_call_its_weights_with_the_commit_of_one_repository(pack: Pack) -> None:
    for commits, title in (
        ([], "small"),
        (["0123456789abcdef"], "small@0123456789ab"),
        (["a", "b"], "small"),
    ):
        revision = {f"me/{commit}": commit for commit in commits}
        write_manifest(pack.record, msgspec.structs.replace(pack.manifest, revision=revision))
        assert resolve(open_pack("small", pack.models_folder), "clip").provenance.title == title


def test_what_a_model_of_the_standard_pack_is_says_its_own_repository_and_license(pack: Pack) -> None:
    revision = {"openai/clip-vit-base-patch32": "c" * 40, "Salesforce/blip-image-captioning-base": "b" * 40}
    several = {"clip": pack.manifest.stages["clip"], "blip": pack.manifest.stages["clip"]}
    manifest = msgspec.structs.replace(
        pack.manifest, revision=revision, stages=several, license="MIT, BSD-3-Clause"
    )
    write_manifest(pack.record, manifest)
    known = resolve(open_pack("small", pack.models_folder), "clip", {"dtype": "float16"}).provenance
    assert (known.name, known.repository, known.commit) == (
        "clip-b32",
        "openai/clip-vit-base-patch32",
        "c" * 40,
    )
    assert (known.license, known.backend, known.dtype) == ("MIT", "transformers", "float16")


def test_text_recognition_of_the_program_has_its_own_name_in_a_pack_that_has_none(pack: Pack) -> None:
    known = resolve(pack, "ocr").provenance
    assert (known.name, known.license, known.backend) == ("PP-OCRv6 small", "Apache-2.0", "ppocr")


def test_an_altered_and_a_missing_file_are_both_named(pack: Pack) -> None:
    (pack.folder / "clip/model.safetensors").write_text("other weights")
    (pack.folder / "yolo.json").unlink()
    with pytest.raises(PackError) as caught:
        verify(pack)
    assert "clip/model.safetensors is altered" in str(caught.value)
    assert "yolo.json is missing" in str(caught.value)


@pytest.mark.parametrize("stage", ["clip", "blip"])
def test_a_stage_is_not_resolved_from_altered_files(pack: Pack, stage: str) -> None:
    (pack.folder / "clip/config.json").write_text("{}")
    resolve(pack, "yolo")
    with pytest.raises(PackError, match=r"clip/config\.json is altered"):
        resolve(pack, stage)


def test_a_file_without_a_recorded_digest_is_refused(pack: Pack) -> None:
    (pack.folder / "clip/adapter.json").write_text("{}")
    with pytest.raises(PackError, match=r"clip/adapter\.json is not in"):
        resolve(pack, "clip")


@pytest.mark.parametrize("name", ["chat_template.jinja", "spiece.model"])
def test_a_pack_of_version_0_1_stays_valid_with_files_that_it_did_not_list(pack: Pack, name: str) -> None:
    before = resolve(pack, "clip").fingerprint
    (pack.folder / "clip" / name).write_text("that 0.1 copied but did not digest")
    assert resolve(open_pack("small", pack.models_folder), "clip").fingerprint == before
    write_manifest(pack.record, msgspec.structs.replace(pack.manifest, digests=digest_folder(pack.folder)))
    found = open_pack("small", pack.models_folder)
    assert resolve(found, "clip").fingerprint != before
    (pack.folder / "clip" / name).write_text("changed")
    with pytest.raises(PackError, match=rf"clip/{name} is altered"):
        resolve(found, "clip")


@pytest.mark.parametrize(
    ("listed", "backend"), [("tokenizer.model", "transformers"), ("config.json", "naflex")]
)
def test_a_chat_template_that_was_added_later_is_refused(pack: Pack, listed: str, backend: str) -> None:
    write(pack.folder / "clip" / listed, json.dumps({"model_type": "siglip2"}))
    stages = pack.manifest.stages | {"clip": StageEntry(backend, {"model": "clip"})}
    write_manifest(
        pack.record,
        msgspec.structs.replace(pack.manifest, stages=stages, digests=digest_folder(pack.folder)),
    )
    (pack.folder / "clip" / "chat_template.jinja").write_text("{{ another prompt }}")
    with pytest.raises(PackError, match=r"clip/chat_template\.jinja is not in"):
        resolve(open_pack("small", pack.models_folder), "clip")


def test_a_spec_has_files_options_dtype_and_a_fingerprint(pack: Pack) -> None:
    spec = resolve(pack, "yolo", {"options": {"iou": 0.5}, "batch_size": 8, "dtype": "auto", "backend": ""})
    assert spec.files == {
        "weights": str(pack.folder / "yolo.safetensors"),
        "config": str(pack.folder / "yolo.json"),
    }
    assert (spec.backend, spec.dtype, spec.batch_size) == ("ultralytics", "float32", 8)
    assert spec.options == {"conf": 0.4, "iou": 0.5}
    assert resolve(pack, "blip").dtype == "float16"
    assert len(spec.fingerprint) == len("sha256:") + 16


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ({}, False),
        ({"batch_size": 99}, False),
        ({"options": {"allow_pickle": True}}, False),
        ({"options": {"conf": 0.5}}, True),
        ({"dtype": "bfloat16"}, True),
        ({"backend": "fake"}, True),
    ],
)
def test_a_fingerprint_changes_with_what_changes_answers(
    pack: Pack, overrides: dict[str, Any], changes: bool
) -> None:
    assert (resolve(pack, "yolo").fingerprint != resolve(pack, "yolo", overrides).fingerprint) == changes


def test_a_fingerprint_depends_on_contents_not_on_places(pack: Pack, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "other"
    shutil.copytree(pack.folder, moved)
    assert (
        resolve(open_pack(moved, tmp_path / "models"), "clip").fingerprint
        == resolve(pack, "clip").fingerprint
    )
    write(moved / "clip/model.safetensors", "other weights")
    (moved / "manifest.json").unlink()
    assert (
        resolve(open_pack(moved, tmp_path / "models"), "clip").fingerprint
        != resolve(pack, "clip").fingerprint
    )


def test_of_files_of_one_name_in_another_packs_folder_each_counts(pack: Pack, tmp_path: Path) -> None:
    clip = Path(shutil.copytree(pack.folder / "clip", tmp_path / "clip"))
    found = []
    for name in ("config.json", "1_Pooling/config.json"):
        (clip / name).parent.mkdir(exist_ok=True)
        for text in ("first", "second"):
            (clip / name).write_text(json.dumps({"model_type": "clip", "text": text}))
            found.append(resolve(pack, "blip", files={"clip": clip}).fingerprint)
    assert len(set(found)) == 4


# From ledgers that are in use. If one changes, every image of every user is processed again.
FINGERPRINTS = {
    "": ["0d8b50fae8076d4f", "a22f31a10cda9188", "37395c8a50c5421b", "a7b35c7c666d9450"],
    "fake": ["18b52981e4419dfb", "cab4e6293c0ee5ee", "8275283d67717c92", "4f3d85b4de5e40ae"],
}


@pytest.mark.parametrize("backend", FINGERPRINTS)
def test_the_fingerprints_of_the_mini_pack_and_of_fakes_are_those_of_ledgers_in_use(
    backend: str, tmp_path: Path
) -> None:
    overrides = {stage: {"backend": backend} for stage in ORDER}
    specs = resolve_all(open_pack("mini", tmp_path), ORDER, overrides)
    assert [spec.fingerprint for spec in specs] == [f"sha256:{digits}" for digits in FINGERPRINTS[backend]]


def test_each_stage_has_its_own_fingerprint(pack: Pack) -> None:
    specs = resolve_all(pack, ORDER, {})
    assert len({spec.fingerprint for spec in specs}) == 4
    fakes = resolve_all(pack, ORDER, {name: {"backend": "fake"} for name in ORDER})
    assert len({spec.fingerprint for spec in [*fakes, *specs]}) == 8


def test_a_fake_stage_needs_no_files(pack: Pack) -> None:
    shutil.rmtree(pack.folder / "clip")
    assert resolve(pack, "clip", {"backend": "fake"}).files == {}


def test_an_unknown_backend_is_refused(pack: Pack) -> None:
    with pytest.raises(UnknownName, match='did you mean "transformers"'):
        resolve(pack, "clip", {"backend": "transformer"})


def find_onnx(path: Path) -> dict[str, str]:
    return {"weights": "yolo.onnx"} if (path / "yolo.onnx").is_file() else {}


@pytest.fixture
def second_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """YOLO has another backend, which takes other files than the first."""
    yolo = registry.STAGES["yolo"]
    onnx = Backend(place="nowhere:Stage", options=FakeOptions, find=find_onnx)
    monkeypatch.setitem(
        registry.STAGES, "yolo", dataclasses.replace(yolo, backends={**yolo.backends, "onnx": onnx})
    )


@pytest.mark.usefixtures("second_backend")
def test_a_backend_that_is_named_takes_its_own_weights(pack: Pack) -> None:
    write(pack.folder / "yolo.onnx", "onnx")
    write_manifest(pack.record, msgspec.structs.replace(pack.manifest, digests=digest_folder(pack.folder)))
    plain = pack.models_folder.parent / "plain"
    shutil.copytree(pack.folder, plain)
    (plain / MANIFEST).unlink()
    for found in (open_pack("small", pack.models_folder), open_pack(plain, pack.models_folder)):
        specs = [resolve(found, "yolo", {"backend": name}) for name in ("onnx", "ultralytics", "")]
        assert specs[0].files == {"weights": str(found.folder / "yolo.onnx")}
        assert (
            specs[1].files
            == specs[2].files
            == {
                role: str(found.folder / Path(file).name)
                for role, file in resolve(pack, "yolo").files.items()
            }
        )
    assert resolve(pack, "yolo", {"model": str(plain), "backend": "onnx"}).files == {
        "weights": str(plain / "yolo.onnx")
    }
    (plain / "yolo.onnx").write_text("changed")
    with pytest.raises(PackError, match=r"yolo\.onnx is altered"):
        resolve(open_pack(plain, pack.models_folder), "yolo", {"backend": "onnx"})


@pytest.mark.usefixtures("second_backend")
def test_a_backend_that_is_named_is_not_judged_by_the_first_ones_rule(pack: Pack) -> None:
    plain = pack.models_folder.parent / "plain"
    plain.mkdir()
    write(plain / "yolo.onnx", "onnx")
    (plain / "yolo.safetensors").write_text("cut short")
    (plain / "yolo.json").write_text("{}")
    with pytest.raises(PackError, match=r"yolo\.safetensors is cut short"):
        resolve(pack, "yolo", {"model": str(plain)})
    assert resolve(pack, "yolo", {"model": str(plain), "backend": "onnx"}).files == {
        "weights": str(plain / "yolo.onnx")
    }


@pytest.mark.usefixtures("second_backend")
def test_weights_that_the_named_backend_cannot_use_are_refused(pack: Pack) -> None:
    with pytest.raises(PackError, match='has no weights for yolo that the backend "onnx" takes; it has '):
        resolve(pack, "yolo", {"backend": "onnx"})


def fail(*_: object, **__: object) -> dict[str, str]:
    raise RuntimeError("a bug of the plug-in")


@pytest.mark.parametrize(
    "rules", [{"find": fail}, {"find": lambda path: {"weights": "yolo.json"}, "check": fail}]
)
def test_a_plug_in_that_fails_on_a_folder_is_named_and_stops_nothing_else(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    backend = Backend(place="nowhere:Stage", options=FakeOptions, **rules)
    broken = Descriptor(name="broken", key="broken", result=FakeOptions, backends={"b": backend})
    monkeypatch.setitem(registry.STAGES, "broken", broken)
    monkeypatch.setitem(registry.SOURCES, "broken", "visiond-broken 1.0")
    pack.record.unlink()
    problem = 'the stage "broken" of the plug-in visiond-broken 1.0 cannot use .*small: RuntimeError: a bug of the plug-in'
    with pytest.warns(RuntimeWarning, match=problem):
        found = open_pack(pack.folder, pack.models_folder)
    assert set(found.manifest.stages) == {"yolo", "clip", "blip"}
    with pytest.raises(PackError, match=problem):
        resolve(found, "broken")


def test_ocr_runs_on_the_weights_in_the_rapidocr_wheel(pack: Pack) -> None:
    spec = resolve(pack, "ocr")
    assert spec.files == bundled_weights()
    assert all(Path(file).suffix == ".onnx" and Path(file).is_file() for file in spec.files.values())


def test_a_stage_that_a_pack_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path / "yolo.safetensors", "x")
    write(tmp_path / "yolo.json", YOLO_JSON)
    with pytest.raises(
        PackError, match=r"has no weights for clip; it has yolo. Name it under \[stages.yolo\]"
    ):
        resolve(open_pack(tmp_path, tmp_path / "models"), "clip")


def test_a_folder_in_the_hubs_layout_is_recognized_and_its_digests_kept(pack: Pack) -> None:
    plain = pack.models_folder.parent / "plain"
    shutil.copytree(pack.folder, plain)
    (plain / "manifest.json").unlink()
    (plain / "clip/README.md").write_text("not read by anything")
    found = open_pack(plain, pack.models_folder)
    assert set(found.manifest.stages) == {"yolo", "clip", "blip"}
    assert resolve(found, "clip").fingerprint == resolve(pack, "clip").fingerprint
    assert not (plain / "manifest.json").exists()
    (plain / "clip/model.safetensors").write_text("changed")
    with pytest.raises(
        PackError, match=r"clip/model.safetensors is altered.*if you changed it yourself, delete .*locks"
    ):
        resolve(open_pack(plain, pack.models_folder), "clip")


def test_a_folder_has_one_record_however_its_path_is_written(pack: Pack) -> None:
    plain = pack.models_folder.parent / "plain"
    shutil.copytree(pack.folder / "clip", plain)
    written = (plain, plain.parent / "elsewhere" / ".." / "plain", plain / ".")
    (plain.parent / "elsewhere").mkdir()
    assert len({open_pack(path, pack.models_folder).record for path in written}) == 1


def test_one_model_by_itself_can_take_a_stages_place(pack: Pack) -> None:
    other = pack.models_folder.parent / "other-clip"
    shutil.copytree(pack.folder / "clip", other)
    write(other / "model.safetensors", "other weights")
    specs = {spec.name: spec for spec in resolve_all(pack, ("clip", "blip"), {"clip": {"model": str(other)}})}
    assert specs["clip"].files["model"] == str(other)
    assert specs["blip"].files == {"model": str(pack.folder / "blip"), "clip": str(other)}
    assert specs["blip"].fingerprint != resolve(pack, "blip").fingerprint


def test_a_model_without_labels_uses_those_of_the_configured_pack(pack: Pack) -> None:
    other = pack.models_folder.parent / "other-clip"
    shutil.copytree(pack.folder / "clip", other)
    write(other / "model.safetensors", "other weights")

    def resolved(**overrides: Any) -> Any:
        return resolve(open_pack("small", pack.models_folder), "clip", {"model": str(other), **overrides})

    labels = pack.folder / "labels.txt"
    assert resolved().files == {"model": str(other), "labels": str(labels)}
    assert resolved(options={"labels": []}).files == resolved(options={"labels": ["cat"]}).files
    assert "labels" not in resolved(options={"labels": []}).files
    assert resolved().notice == "", "words are not weights"
    first = resolved().fingerprint
    write(labels, "another label")
    with pytest.raises(PackError, match=r"labels\.txt is altered"):
        resolved()
    write_manifest(pack.record, msgspec.structs.replace(pack.manifest, digests=digest_folder(pack.folder)))
    assert resolved().fingerprint != first
    write(other / "labels.txt", "its own label")
    shutil.rmtree(pack.models_folder / "locks")
    assert resolved().files["labels"] == str(other / "labels.txt")


def test_a_single_file_of_yolo_weights_can_take_its_place(pack: Pack) -> None:
    weights = pack.models_folder.parent / "best.pt"
    weights.write_text("a pickle")
    spec = resolve(pack, "yolo", {"model": str(weights), "options": {"allow_pickle": True}})
    assert spec.files == {"weights": str(weights)}


def test_a_file_that_is_not_a_yolo_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "best.safetensors", "x")
    with pytest.raises(PackError, match=r"a yolo\.json beside it"):
        open_pack(tmp_path / "best.safetensors", tmp_path / "models")
    write(tmp_path / "yolo.json", YOLO_JSON)
    found = open_pack(tmp_path / "best.safetensors", tmp_path / "models")
    assert resolve(found, "yolo").files["weights"] == str(tmp_path / "best.safetensors")


def test_a_damaged_config_is_named(pack: Pack) -> None:
    pack.record.unlink()
    (pack.folder / "blip/config.json").write_text("{")
    with pytest.raises(PackError, match=r"blip/config\.json cannot be read"):
        open_pack(pack.folder, pack.models_folder)


@pytest.mark.parametrize(
    ("stage", "model_type", "backend"),
    [("clip", "siglip", "transformers"), ("clip", "siglip2", "naflex"), ("blip", "blip-2", "blip2")],
)
def test_a_folder_with_the_name_of_a_stage_is_recognized_by_its_config(
    stage: str, model_type: str, backend: str, pack: Pack
) -> None:
    pack.record.unlink()
    (pack.folder / stage / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = open_pack(pack.folder, pack.models_folder).manifest.stages
    assert (found[stage].backend, found[stage].files["model"]) == (backend, stage)
    assert found.keys() == {"yolo", "clip", "blip"}


@pytest.mark.parametrize("stage", ["clip", "blip"])
def test_a_folder_with_the_name_of_a_stage_that_holds_another_model_is_refused_by_name(
    stage: str, pack: Pack
) -> None:
    pack.record.unlink()
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (pack.folder / stage / "config.json").write_text(json.dumps(config))
    refused = re.escape(
        f'by its config.json, {pack.folder / stage} holds a BertModel (model_type "bert"); visiond takes'
    )
    for wanted in ({}, {"stage": stage}):
        with pytest.raises(PackError, match=refused):
            open_plain(pack.folder, pack.models_folder, record=False, **wanted)


def test_a_folder_with_the_name_of_a_stage_is_refused_by_a_named_backend_that_does_not_take_it(
    pack: Pack,
) -> None:
    taken = re.escape('(model_type "clip"); for siglip2, visiond takes Siglip2Model')
    with pytest.raises(PackError, match=taken):
        open_plain(pack.folder, pack.models_folder, record=False, stage="clip", backend="naflex")


def test_a_model_without_its_processor_is_refused_before_anything_is_loaded(pack: Pack) -> None:
    pack.record.unlink()
    (pack.folder / "blip/preprocessor_config.json").unlink()
    with pytest.raises(PackError, match=r"blip has no image processor: none of preprocessor_config\.json"):
        open_pack(pack.folder, pack.models_folder)


def test_the_refusal_of_a_folder_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(
        PackError, match=r"manifest.json, or clip/, blip/, yolo.safetensors .* or det/ and rec/ of PP-OCR"
    ):
        open_pack(tmp_path, tmp_path / "models")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd"])
def test_a_manifest_that_points_outside_its_pack_is_refused(pack: Pack, name: str) -> None:
    entry = StageEntry("ultralytics", {"weights": name})
    write_manifest(pack.folder / MANIFEST, Manifest(name="evil", stages={"yolo": entry}))
    with pytest.raises(PackError, match="is outside the pack"):
        open_pack("small", pack.models_folder)


def test_a_manifest_is_written_atomically(pack: Pack) -> None:
    path = pack.folder / MANIFEST
    before, data = path.stat().st_ino, path.read_bytes()
    with path.open("rb") as reader:
        write_manifest(path, msgspec.structs.replace(pack.manifest, description="another"))
        assert reader.read() == data, "whoever reads it meanwhile has the old one whole"
    assert path.stat().st_ino != before
    assert [file.name for file in pack.folder.iterdir() if MANIFEST in file.name] == [MANIFEST]


def test_a_file_that_is_not_a_manifest_is_refused(pack: Pack) -> None:
    pack.record.write_text('{"name": "x", "stagse": {}}')
    with pytest.raises(PackError, match="stagse"):
        open_pack("small", pack.models_folder)


def test_each_stage_has_the_notice_of_the_weights_it_runs_on(pack: Pack, tmp_path: Path) -> None:
    """OCR's weights belong to no pack. The small pack has the notice "made up"; the good one has none."""
    good = shutil.copytree(pack.folder, tmp_path / "good")
    manifest = read_manifest(good / MANIFEST)
    write_manifest(good / MANIFEST, msgspec.structs.replace(manifest, name="good", notice=""))

    def notices(weights: Path, **models: Path) -> dict[str, str]:
        overrides = {stage: {"model": str(model)} for stage, model in models.items()}
        return {
            spec.name: spec.notice
            for spec in resolve_all(open_pack(weights, pack.models_folder), ORDER, overrides)
        }

    made_up = dict.fromkeys(("yolo", "clip", "blip"), "made up")
    assert notices(pack.folder) == {"ocr": ""} | made_up
    assert notices(good) == dict.fromkeys(ORDER, "")
    assert notices(pack.folder, yolo=good) == {"ocr": ""} | made_up | {"yolo": ""}
    assert notices(good, yolo=pack.folder) == dict.fromkeys(ORDER, "") | {"yolo": "made up"}
    similarity_too = {"clip": "made up", "blip": "made up"}
    assert notices(good, clip=pack.folder) == dict.fromkeys(ORDER, "") | similarity_too


def test_a_stage_of_a_pack_may_have_its_own_notice(pack: Pack) -> None:
    manifest = read_manifest(pack.record)
    stages = manifest.stages | {"yolo": msgspec.structs.replace(manifest.stages["yolo"], notice="a toy")}
    write_manifest(pack.record, msgspec.structs.replace(manifest, notice="", stages=stages))
    found = open_pack("small", pack.models_folder)
    assert (found.notice, resolve(found, "yolo").notice, resolve(found, "clip").notice) == (
        "a toy",
        "a toy",
        "",
    )


def test_a_manifest_that_lacks_a_file_that_the_stage_needs_is_refused_with_its_role(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("car\n")
    entry = StageEntry("transformers", {"labels": "labels.txt"})
    digests = digest_folder(tmp_path)
    write_manifest(tmp_path / MANIFEST, Manifest(name="cut", stages={"clip": entry}, digests=digests))
    with pytest.raises(PackError, match=r'manifest.json: stages.clip.files has no "model"'):
        resolve(open_pack(tmp_path, tmp_path), "clip")
