"""A job with the user's own images, as in docs/training.md, and its messages about images that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from visiond.training.settings import CHECKPOINTS, TrainerSettings
from visiond_mini.examples import Example, write_examples
from visiond_mini.job import FINAL, WEIGHTS, TrainingJob, forget_training, run_job

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_docs_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(8):
        Image.new("RGB", (40, 30), (30 * number, 0, 0)).save(f"photos/{number}.jpg")
    blocks = dict(re.findall(r"```(python|json)\n(.*?)```", DOCS.read_text(), re.DOTALL))
    exec(blocks["python"], {})
    run_job(msgspec.json.decode(blocks["json"], type=TrainingJob))
    assert (tmp_path / "run" / FINAL / "model.safetensors").is_file()


LONG = "a golden retriever asleep on a red leather sofa"


@pytest.mark.parametrize(
    ("kind", "example", "edge", "said"),
    [
        (
            "clip",
            Example("", ["a car"], {"dog": 1.0}),
            192,
            "the tag 'dog' is not one that CLIP knows; choose one of circle, ",
        ),
        (
            "clip",
            Example("", ["a car", LONG]),
            192,
            f"the caption '{LONG}' takes 38 tokens, and the model reads 24",
        ),
        ("blip", Example("", [LONG]), 192, f"the caption '{LONG}' takes 38 tokens, and the model reads 32"),
        ("blip", Example("", ["a car"]), 224, "are 224 pixels wide, but the models take 192"),
    ],
)
def test_examples_that_the_models_cannot_learn_are_refused(
    kind: str, example: Example, edge: int, said: str, tmp_path: Path
) -> None:
    write_examples(tmp_path / "examples", [np.zeros((9, 9, 3), np.uint8)], [example], edge)
    job = TrainingJob(
        kind=kind,  # type: ignore[arg-type]
        folder=str(tmp_path / "run"),
        examples=str(tmp_path / "examples"),
        settings=TrainerSettings(batch_size=1, steps=1),
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        run_job(job)


def test_a_new_training_removes_the_weights_of_the_earlier_one(tmp_path: Path) -> None:
    for name in (FINAL, WEIGHTS, CHECKPOINTS):
        (tmp_path / name / "deep").mkdir(parents=True)
    forget_training(tmp_path)
    assert list(tmp_path.iterdir()) == []
