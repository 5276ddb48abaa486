"""What `python -m benchmarks.changes` prints about a model whose answers have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import changes
from benchmarks.changes import answer, describe, specify
from stages.blip.descriptor import Caption
from stages.contract.base import ImageError, Reason
from stages.ocr.descriptor import Ocr
from stages.registry import fake
from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH
from stages.yolo.descriptor import Detection, Objects
from tests.stages import captioners


def write(*texts: str) -> list[Caption]:
    return [Caption(text, None) for text in texts]


def test_texts_are_compared_from_their_beginning() -> None:
    before, after = write("a red car", "a dog", "one two three four"), write("a red car", "a cat", "one two")
    assert describe(before, after) == "3 images: 1 texts equal, 66.7% of the words until the first difference"


def test_a_page_is_compared_by_its_text_and_lines_by_theirs() -> None:
    pages = [Ocr([], 0, 0.0, "a b c d")], [Ocr([], 0, 0.0, "a b c e")]
    assert "0 texts equal, 75.0%" in describe(*pages)
    lines = fake.answer("ocr", 1, 640, 480, frozenset())
    assert "1 texts equal, 100.0%" in describe([lines], [lines])


def test_objects_are_found_again_by_label_and_place() -> None:
    box = (0.0, 0.0, 100.0, 100.0)
    before = Objects([Detection("cat", 0.9, box), Detection("dog", 0.9, box)], 2, 2, 0.0)
    after = Objects([Detection("cat", 0.8, (0.0, 0.0, 100.0, 95.0)), Detection("cup", 0.9, box)], 2, 2, 0.0)
    assert describe([before], [after]) == "1 images: 1 of 2 boxes found again, smallest IoU 0.950, 2 in all"


def test_embeddings_are_compared_by_their_cosine() -> None:
    one, other = (fake.answer("clip", number, 640, 480, frozenset()) for number in (1, 2))
    assert describe([one], [one]).endswith("smallest 1.00000; the first tag equal for 1")
    assert "smallest 1.00000" not in describe([one], [other])


def test_images_without_an_answer_are_counted_apart() -> None:
    lost = ImageError(Reason.STAGE, "lost")
    assert describe([*write("a"), lost], write("a", "b")).startswith("1 images, 1 failed: 1 texts equal")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_language_models_texts_in_int8_are_compared_with_those_in_float32(tmp_path: Path) -> None:
    captioners.CAPTIONERS["qwen3_vl"](tmp_path / "qwen")
    write_samples(tmp_path / "images", 3, 5)
    files = sorted(path for path in (tmp_path / "images").iterdir() if path.name != TRUTH)
    before, after = (
        answer(specify(str(tmp_path / "qwen"), "blip", tmp_path, dtype, 2), files, "cpu")
        for dtype in ("float32", "int8")
    )
    assert (
        describe(before, before) == "3 images: 3 texts equal, 100.0% of the words until the first difference"
    )
    assert describe(before, after).startswith("3 images: ")


def test_a_dtype_that_a_model_cannot_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path / "images", 1, 5)
    named = [
        "mini",
        "--dtype",
        "int4",
        "--images",
        str(tmp_path / "images"),
        "--models-folder",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["changes", *named])
    changes.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # yolo, clip and blip are in the pack
    assert all(line.endswith("the model cannot have int4") for line in lines)
