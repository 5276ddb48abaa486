from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.measure.scaling import ASPECTS, compare_answers, read_answers

SIDECAR: dict[str, Any] = {
    "ocr": {"lines": [{"text": "a", "score": 0.9, "box": [[0, 0], [9, 0], [9, 9], [0, 9]]}]},
    "objects": {"detections": [{"label": "cat", "score": 0.8}, {"label": "dog", "score": 0.7}]},
    "clip": {"tags": [{"label": "day", "score": 0.6}]},
    "caption": {"text": "a cat", "similarity": 0.3},
    "bin": {"name": "A"},
}


def write(folder: Path, sidecars: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, sidecar in sidecars.items():
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(sidecar))
    return folder


@pytest.mark.parametrize(
    ("aspect", "change"),
    [
        ("texts", lambda sidecar: sidecar["ocr"]["lines"][0].update(text="b")),
        ("text boxes", lambda sidecar: sidecar["ocr"]["lines"][0]["box"][0].__setitem__(0, 1)),
        ("objects", lambda sidecar: sidecar["objects"]["detections"][0].update(label="cow")),
        ("tags", lambda sidecar: sidecar["clip"]["tags"].pop()),
        ("captions", lambda sidecar: sidecar["caption"].update(text="a cow")),
        ("bins", lambda sidecar: sidecar["bin"].update(name="B")),
    ],
)
def test_a_different_answer_is_counted_under_its_aspect(
    tmp_path: Path, aspect: str, change: Callable[[Any], object]
) -> None:
    changed = deepcopy(SIDECAR)
    change(changed)
    some = write(tmp_path / "some", {"a.jpg": SIDECAR, "b.jpg": SIDECAR})
    others = write(tmp_path / "others", {"a.jpg": SIDECAR, "b.jpg": changed, "only-here.jpg": changed})
    found = compare_answers(read_answers(some), read_answers(others))
    assert found.images == 2
    assert found.different == {name: int(name == aspect) for name in ASPECTS}


def test_scores_and_the_order_of_objects_do_not_count(tmp_path: Path) -> None:
    changed = deepcopy(SIDECAR)
    changed["objects"]["detections"].reverse()
    changed["clip"]["tags"][0]["score"] = 0.61
    found = compare_answers(
        read_answers(write(tmp_path / "some", {"a.jpg": SIDECAR})),
        read_answers(write(tmp_path / "others", {"a.jpg": changed})),
    )
    assert not any(found.different.values())


def test_a_stage_that_is_not_in_use_differs_nowhere(tmp_path: Path) -> None:
    only_ocr = {"ocr": SIDECAR["ocr"], "bin": None}
    answers = read_answers(write(tmp_path / "some", {"a.jpg": only_ocr}))
    assert compare_answers(answers, answers).different == dict.fromkeys(ASPECTS, 0)
