"""A rule of bins that reads labels of classifiers, tried before it fails on thousands of images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import Config, parse
from daemon.models.tryouts import RuleFailed, try_rule
from tests.stages import classifiers

RULE = """def choose(record):
    scores, label = (record["classifier_safety"][key] for key in ("scores", "label"))
    return "a" if EXPRESSION else "b"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classifiers.save("vit", folder := tmp_path_factory.mktemp("labels") / "vit")
    return folder


@pytest.fixture
def configure(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(expression: str, **table: Any) -> Config:
        (tmp_path / "rule_of_labels.py").write_text(RULE.replace("EXPRESSION", expression))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "rule_of_labels", raising=False)
        document = {
            "pipeline": {"stages": ["classifier_safety"]},
            "stages": {"classifier_safety": {"model": str(model)} | table},
            "binning": {"rules": "rule_of_labels:choose"},
        }
        return parse(document, tmp_path)

    return make


@pytest.mark.parametrize(
    "expression",
    [
        "scores['nsfw'] > 0.7",
        "scores.get('nsfw', 0) < 0.3",
        "'safe' in scores",
        "label == 'nsfw'",
        "label in {'safe', 'cat'}",
    ],
)
def test_a_rule_that_reads_labels_of_the_model_is_tried_on_a_sample(expression: str, configure: Any) -> None:
    assert "a sample record into bin" in try_rule(configure(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "scores['nfsw'] > 0.7",
        "scores.get('nfsw', 0) > 0.7",
        "'nfsw' in scores",
        "label == 'nfsw'",
        "label != 'nfsw'",
        "label in ('nfsw', 'safe')",
    ],
)
def test_a_label_that_the_model_does_not_have_is_named_with_the_nearest_one(
    expression: str, configure: Any
) -> None:
    with pytest.raises(RuleFailed) as caught:
        try_rule(configure(expression))
    assert str(caught.value).endswith(
        ': it reads the label "nfsw", which the model of classifier_safety does not have; did you mean "nsfw"?'
    )


def test_without_a_near_one_all_labels_are_listed(configure: Any) -> None:
    with pytest.raises(RuleFailed, match=r"does not have; it has cat, dog, cup, safe, nsfw\.$"):
        try_rule(configure("scores.get('zzz', 0) > 0.7"))


def test_a_label_that_an_answer_may_be_without_is_read_with_a_default(configure: Any) -> None:
    with pytest.raises(
        RuleFailed, match=r'not among the 2 with the highest .*; write scores\.get\("nsfw", 0\.0\), or raise'
    ):
        try_rule(configure("scores['nsfw'] > 0.7", options={"top_k": 2}))
    assert "into bin b" in try_rule(configure("scores.get('nsfw', 0) > 0.7", options={"top_k": 2}))


def test_labels_of_invented_answers_are_not_known(configure: Any) -> None:
    assert "into bin b" in try_rule(configure("scores.get('nfsw', 0) > 0.7", backend="fake", model=""))
