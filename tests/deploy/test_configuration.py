from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from daemon.config import loading as config
from daemon.config import reference
from daemon.config.models import table_of
from daemon.core.sidecar import json_schema
from stages.contract.base import StageSpec
from stages.registry.registry import ORDER, STAGES, check_options

ROOT = Path(__file__).parents[2]


def uncommented(text: str) -> str:
    """Text follows "# "; a # without a space is a key commented out."""
    return re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)


def test_daemon_toml_uncommented_is_the_default_configuration() -> None:
    document = tomllib.loads(uncommented((ROOT / "daemon.toml").read_text()))
    assert config.parse(document, ROOT) == config.parse({}, ROOT)


def test_daemon_toml_is_the_default_configuration() -> None:
    assert config.load(ROOT / "daemon.toml") == config.parse({}, ROOT)


def test_daemon_toml_shows_every_key_that_has_a_default() -> None:
    document = tomllib.loads(uncommented((ROOT / "daemon.toml").read_text()))
    defaults = config.Config().model_dump()
    shown = {name: table[0] if isinstance(table, list) else table for name, table in document.items()}
    del defaults["second_look"]  # it has keys without a default
    assert shown.keys() == defaults.keys()
    for name, table in defaults.items():
        assert shown[name].keys() == (table[0] if isinstance(table, list) else table).keys()


@pytest.mark.parametrize("name", ["daemon.toml", "docs/configuration.md"])
def test_the_generated_documents_are_current(name: str) -> None:
    option, write = (
        (" --toml", reference.write_toml) if name.endswith(".toml") else ("", reference.write_markdown)
    )
    assert (ROOT / name).read_text() == write(), f"run: python -m daemon.config.reference{option} > {name}"


def test_the_schema_of_sidecars_is_current() -> None:
    assert (ROOT / "docs/sidecar.schema.json").read_bytes() == json_schema(), "run: make docs"


def test_every_table_has_a_description() -> None:
    assert [table.headers for table in reference.list_tables() if not table.about] == []


def test_a_key_without_a_default_is_described_as_such() -> None:
    (segment,) = [table for table in reference.list_tables() if table.headers == ["[[pipeline.segment]]"]]
    assert [key.name for key in segment.keys if key.default is None] == ["stages", "devices"]


def test_bounds_choices_and_sizes_are_documented() -> None:
    kinds = {key.name: key.kind for table in reference.list_tables() for key in table.keys}
    assert kinds["decode_bytes"] == "size ≥ 256 MiB"
    assert kinds["text_area_threshold"] == "number from 0 to 1"
    assert kinds["drain_seconds"] == "number ≥ 0"
    assert kinds["on_success"] == '"keep" | "move" | "delete"'
    assert kinds["ignore"] == "list of text"


# Options of stages


@pytest.mark.parametrize("stage", ORDER)
def test_every_option_of_a_stage_is_documented_with_its_kind_default_and_meaning(stage: str) -> None:
    kinds = list(dict.fromkeys(backend.options for backend in STAGES[stage].backends.values()))
    tables = [table for table in reference.list_options() if table.headers == [f"[stages.{stage}.options]"]]
    assert [[key.name for key in table.keys] for table in tables] == [
        [field.name for field in fields] for kind in kinds if (fields := msgspec.structs.fields(kind))
    ]
    keys = [key for table in tables for key in table.keys]
    assert all(key.kind and key.meaning for key in keys)
    assert {key.name for key in keys if key.default is None} <= {"labels"}, "all others can be left out"


def test_an_option_that_may_be_left_out_has_its_kind_and_no_default() -> None:
    told = {(key.name, key.kind, key.default) for table in reference.list_options() for key in table.keys}
    assert told >= {
        ("labels", "list of text", ""),
        ("imgsz", "integer from 1 to 100000", ""),
        ("template", "text", ""),
        ("template", "text", '"a photo of a {}"'),
        ("unclip_ratio", "number > 0 ≤ 10", "1.6"),
    }


def test_the_docs_example_of_options_is_a_configuration_that_clip_takes() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    options = table_of(config.parse(tomllib.loads(example), ROOT).stages, "clip").options
    assert len(options["labels"]) == 4
    assert check_options([StageSpec("clip", "transformers", options=options)]) == []
