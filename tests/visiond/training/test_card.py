"""What a training says of its scores, in its card and to people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from daemon.core.labels import Kind
from tests.visiond.training.labelled import make_job
from visiond.training.card import write_card
from visiond.training.data import Data, LabelledImage
from visiond.training.job import RANGES
from visiond.training.launch import describe

STEP = {
    "loss": 0.5,
    "epoch": 1.0,
    "step": 4,
    "batch_size": 4,
    "processes": 1,
    "micro_batch": 4,
    "memory_bytes": 0,
    "elapsed": 9,
}
EMPTY = Data(Kind.OBJECTS, [], [])


def write(folder: Path, range: tuple[float, float], score: float | None, data: Data = EMPTY) -> str:
    (folder / RANGES).write_bytes(msgspec.json.encode({"mAP": range}))
    entries: list[dict[str, Any]] = [STEP, {"step": 4, "epoch": 1.0, "scores": {"mAP": score}}]
    return write_card(make_job(folder, folder), data, entries)


def test_a_card_has_the_last_score_with_its_range(tmp_path: Path) -> None:
    assert "| 1.00 | 0.500 (0.400 to 0.600) |" in write(tmp_path, (0.4, 0.6), 0.5)


def test_a_card_has_no_score_if_no_held_out_image_has_an_object(tmp_path: Path) -> None:
    assert "| 1.00 | - |" in write(tmp_path, (math.nan, math.nan), None)
    told = describe({"step": 4, "epoch": 1.0, "scores": {"mAP": None}})
    assert told == "epoch 1.00: on held-out images no score, as nothing is labelled in them"


def test_a_card_says_which_images_a_data_set_held_out(tmp_path: Path) -> None:
    images = [LabelledImage("a.jpg", "00" * 32, 1, 1)] * 3
    for said, expected in (
        (0, "3 held out for the scores, chosen by their digests."),
        (2, "2 of which are for validation or tests in their data set; the others chosen by their digests."),
        (3, "3 of which are for validation or tests in their data set."),
    ):
        assert expected in write(tmp_path, (0.4, 0.6), 0.5, Data(Kind.OBJECTS, [], images, said=said))
