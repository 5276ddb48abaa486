"""Stages of which there may be several, such as classifier_safety, in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import Config, load, parse
from daemon.core.errors import ConfigError

STAGES = ["ocr", "classifier_safety", "classifier", "classifier_a1"]


def read(**tables: Any) -> Config:
    return parse({"pipeline": {"stages": STAGES}, "stages": tables}, Path("/srv"))


def test_they_run_after_the_others_by_name_with_a_table_each_or_the_defaults() -> None:
    config = read(classifier_safety={"model": "./nsfw", "dtype": "float32"})
    assert config.stage_names == ["ocr", "classifier", "classifier_a1", "classifier_safety"]
    tables: Any = config.stages
    assert (tables.classifier_safety.model, tables.classifier_safety.dtype) == ("/srv/nsfw", "float32")
    assert tables.classifier_a1.dtype == "auto"


def test_a_process_that_gets_the_configuration_as_data_has_their_tables_too() -> None:
    config = read(classifier_safety={"model": "./nsfw"})
    assert Config.model_validate(config.model_dump(mode="json")).stages == config.stages


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            {"stages": {"classifier_Safety": {}}},
            'stages.classifier_Safety: "Safety" cannot stand behind classifier_: write a lowercase letter, and then lowercase '
            "letters and digits, for example classifier_second.",
        ),
        (
            {"pipeline": {"stages": ["classifier_not_safe"]}},
            'pipeline.stages: "not_safe" cannot stand behind classifier_: write a lowercase letter, and then lowercase letters '
            "and digits, for example classifier_second.",
        ),
        (
            {"stages": {"ocr_2": {}}},
            'stages.ocr_2: the stage ocr runs only once; write "ocr" in place of "ocr_2".',
        ),
        (
            {"pipeline": {"stages": ["hash", "hash_two"]}},
            'pipeline.stages: the stage hash runs only once; write "hash" in place of "hash_two".',
        ),
        (
            {"stages": {"classifier_a": {"modell": ""}}},
            'stages.classifier_a.modell: unknown key; did you mean "model"?',
        ),
        ({"stages": {"classifier_a": 3}}, "stages.classifier_a: write a table (it is 3)"),
        (
            {"stages": {"classifier_a": {"backend": "timm"}}},
            'stages.classifier_a.backend: there is no backend for classifier_a called "timm"; choose one of fake, '
            "transformers.",
        ),
    ],
)
def test_what_is_wrong_with_one_is_named(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document, Path("/srv"))
    assert caught.value.problems == [problem]


def test_variables_set_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIOND_PIPELINE__STAGES", '["classifier_safety"]')
    monkeypatch.setenv("VISIOND_STAGES__CLASSIFIER_SAFETY__MODEL", "nsfw")
    monkeypatch.setenv("VISIOND_STAGES__CLASSIFIER_SAFETY__OPTIONS__TOP_K", "3")
    tables: Any = load(None).stages
    assert (tables.classifier_safety.model, tables.classifier_safety.options) == ("nsfw", {"top_k": 3})
    monkeypatch.setenv("VISIOND_STAGES__CLASSIFIER_SAFETY__MODEL2", "nsfw")
    with pytest.raises(ConfigError, match=r"there is no key stages\.classifier_safety\.model2"):
        load(None)
