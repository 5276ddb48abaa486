from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from stages.contract.manifest import PackError
from stages.ocr import files
from stages.ocr.loading import open_recognizer
from stages.ocr.onnxfile import weight_files
from stages.weights.packs import open_pack, resolve
from tests.stages.ocr.textnets import DETECTORS, RECOGNIZERS

WHEEL = weight_files()
CLASSIFIER = next(WHEEL["det"].parent.glob("*cls*.onnx"))


def copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, place)


def write_dictionary(folder: Path, name: str = "dict.txt", *, less: int = 0) -> list[str]:
    """rec.onnx without its dictionary, which is in a file beside it."""
    model = onnx.load(str(WHEEL["rec"]))
    text: str = next(entry.value for entry in model.metadata_props if entry.key == "character")
    characters = text.split("\n")
    del model.metadata_props[:]
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / "rec.onnx"))
    (folder / name).write_text("\n".join(characters[less:]) + "\n", encoding="utf-8")
    return characters


def spec_of(path: Path, models: Path) -> dict[str, Path]:
    spec = resolve(open_pack("mini", models), "ocr", {"model": str(path)})
    assert spec.backend == "ppocr"
    return {role: Path(file) for role, file in spec.files.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str, str], Path]:
    def save(kind: str, place: str) -> Path:
        (DETECTORS | RECOGNIZERS)[kind](tmp_path / "ocr-folder" / place)
        return tmp_path / "ocr-folder"

    return save


def test_the_files_that_a_folder_lacks_are_those_of_the_rapidocr_package(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("pp_ocrv5_mobile_rec", ".")
    found = spec_of(folder, tmp_path / "models")
    assert found == {"rec": folder, "det": WHEEL["det"]}
    bundled = resolve(open_pack("mini", tmp_path / "models"), "ocr")
    assert bundled.files == {role: str(path) for role, path in WHEEL.items()}


def test_detector_and_recognizer_are_found_in_subfolders(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    checkpoint("pp_ocrv6_tiny_rec", "rec")
    folder = checkpoint("pp_ocrv5_server_det", "det")
    assert spec_of(folder, tmp_path / "models") == {"det": folder / "det", "rec": folder / "rec"}


def test_onnx_files_are_recognized_by_their_graphs(tmp_path: Path) -> None:
    folder = tmp_path / "onnx"
    copy(WHEEL["rec"], folder / "a.onnx")
    copy(WHEEL["det"], folder / "b.onnx")
    copy(CLASSIFIER, folder / "c.onnx")
    assert spec_of(folder, tmp_path / "models") == {"rec": folder / "a.onnx", "det": folder / "b.onnx"}
    assert spec_of(folder / "a.onnx", tmp_path / "models") == {"rec": folder / "a.onnx", "det": WHEEL["det"]}


def test_a_dictionary_beside_an_onnx_file_belongs_to_it(tmp_path: Path) -> None:
    characters = write_dictionary(tmp_path / "rec")
    (tmp_path / "rec" / "another.txt").write_text("a\nb\n")
    found = files.find(tmp_path)
    assert found == {"rec": "rec/rec.onnx", "dict": "rec/dict.txt"}
    _, read = open_recognizer(str(tmp_path / found["rec"]), str(tmp_path / found["dict"]))
    assert read == ["", *characters, " "]


def test_a_dictionary_of_another_model_is_refused(tmp_path: Path) -> None:
    write_dictionary(tmp_path, less=3)
    found = files.find(tmp_path)
    assert found == {"rec": "rec.onnx"}
    with pytest.raises(PackError, match="Put the model's dictionary beside it"):
        files.check({"rec": tmp_path / "rec.onnx"}, allow_pickle=False)
    with pytest.raises(PackError, match=r"18710 classes, but .*dict\.txt has 18705 characters"):
        files.check({"rec": tmp_path / "rec.onnx", "dict": tmp_path / "dict.txt"}, allow_pickle=False)


def test_a_checkpoint_without_a_dictionary_is_refused(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("pp_ocrv6_small_rec", ".")
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"character_list": []}))
    with pytest.raises(PackError, match="has no character_list, the dictionary of the PP-OCRv6 small"):
        spec_of(folder, tmp_path / "models")


def test_two_recognizers_in_one_folder_are_refused(tmp_path: Path) -> None:
    copy(WHEEL["rec"], tmp_path / "a.onnx")
    copy(WHEEL["rec"], tmp_path / "rec" / "b.onnx")
    with pytest.raises(PackError, match=r"two text recognizers, rec/b\.onnx and a\.onnx; remove one"):
        files.find(tmp_path)


def test_another_onnx_file_is_refused_by_name(tmp_path: Path) -> None:
    copy(CLASSIFIER, tmp_path / "turn.onnx")
    with pytest.raises(PackError, match=r"turn\.onnx is not a text detector or a text recognizer"):
        spec_of(tmp_path / "turn.onnx", tmp_path / "models")
    (tmp_path / "turn.onnx").write_bytes(b"<html>not found</html>")
    with pytest.raises(
        PackError, match=r"turn\.onnx is cut short or damaged: it is not an ONNX file\. Copy it again"
    ):
        spec_of(tmp_path / "turn.onnx", tmp_path / "models")


@pytest.mark.parametrize("place", ["rec/rec.onnx", "rec.onnx", "alone/rec.onnx"])
def test_a_cut_onnx_file_is_named_and_never_replaced_without_a_word(tmp_path: Path, place: str) -> None:
    copy(WHEEL["det"], tmp_path / "det" / "det.onnx")
    copy(WHEEL["rec"], tmp_path / place)
    with (tmp_path / place).open("r+b") as file:
        file.truncate(1_000_000)
    folder = tmp_path / "alone" if place.startswith("alone") else tmp_path
    with pytest.raises(PackError, match=r"rec\.onnx is cut short or damaged: .* Copy it again"):
        spec_of(folder, tmp_path / "models")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"


def test_a_damaged_onnx_file_that_no_role_needs_is_left_alone(
    checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("pp_ocrv5_mobile_rec", ".")
    (folder / "inference.onnx").write_text(POINTER)
    assert files.find(folder) == {"rec": "."}
    for role in ("det", "rec"):
        copy(WHEEL[role], tmp_path / "both" / role / "a.onnx")
        (tmp_path / "both" / role / "b.onnx").write_text(POINTER)
    assert files.find(tmp_path / "both") == {"det": "det/a.onnx", "rec": "rec/a.onnx"}


def test_each_onnx_file_of_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(WHEEL["det"], tmp_path / "a.onnx")
    copy(WHEEL["rec"], tmp_path / "b.onnx")
    read: list[str] = []
    load = onnx.load
    monkeypatch.setattr(onnx, "load", lambda path: [read.append(Path(path).name), load(path)][1])
    assert files.find(tmp_path) == {"det": "a.onnx", "rec": "b.onnx"}
    assert read == ["a.onnx", "b.onnx"]


def test_an_onnx_file_of_another_stage_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "yolo.onnx").write_bytes(b"not ONNX")
    assert files.find(tmp_path) == {}


def test_another_model_is_refused_with_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "slanet", "architectures": ["SLANetForTableRecognition"]}'
    )
    with pytest.raises(PackError, match=r"contains SLANetForTableRecognition.*PP-OCRv5 mobile"):
        spec_of(tmp_path, tmp_path / "models")
