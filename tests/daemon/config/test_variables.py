"""Settings from variables of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.loading import Config, load, parse
from daemon.config.models import table_of
from daemon.config.salvage import load_rest
from daemon.config.showing import list_tables
from daemon.core.errors import ConfigError
from daemon.measure.throwaway import Throwaway
from tests.daemon_process import Place, picture
from tests.forked import TOKEN


def configured(monkeypatch: pytest.MonkeyPatch, file: Path | None = None, **variables: str) -> Config:
    for name, value in variables.items():
        monkeypatch.setenv(f"VISIOND_{name}", value)
    return load(file)


def problems_of(monkeypatch: pytest.MonkeyPatch, file: Path | None = None, **variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        configured(monkeypatch, file, **variables)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "daemon.toml").write_text("[pipeline]\ndrain_seconds = 7\nmax_attempts = 2\n")
    return path


def test_a_variable_wins_over_the_file_and_leaves_other_keys(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(monkeypatch, file, PIPELINE__DRAIN_SECONDS="60")
    assert (config.pipeline.drain_seconds, config.pipeline.max_attempts) == (60.0, 2)


def test_values_have_the_types_of_their_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(
        monkeypatch,
        PIPELINE__MAX_ATTEMPTS="3",
        PIPELINE__SLAB_BYTES="256 MiB",
        PIPELINE__STAGES='["ocr", "yolo"]',
        STATE__PATH="elsewhere",
        PAGE__LISTEN="",
        STAGES__CLIP__MODEL="123",
        STAGES__CLIP__OPTIONS__LABELS='["a cat", "a dog"]',
        STAGES__CLIP__OPTIONS__TEMPLATE="a photo of a {}",
    )
    assert (config.pipeline.max_attempts, config.pipeline.slab_bytes) == (3, 256 << 20)
    assert config.stage_names == ["ocr", "yolo"]
    assert config.state.path == tmp_path / "elsewhere"
    clip = table_of(config.stages, "clip")
    assert (config.page.listen, clip.model) == ("", "123")
    assert clip.options == {"labels": ["a cat", "a dog"], "template": "a photo of a {}"}


def test_a_variable_with_file_behind_its_name_names_a_file_with_the_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text("https://hooks.example/secret\n")
    config = configured(
        monkeypatch, OUTPUT__WEBHOOK__URL_FILE=str(tmp_path / "url"), HTTP__TOKEN_FILE="/run/secrets/token"
    )
    assert config.output.webhook.url == "https://hooks.example/secret"
    assert config.http.token_file == "/run/secrets/token", "the key of this name is a path itself"
    [problem] = problems_of(monkeypatch, LOG__LEVEL_FILE=str(tmp_path / "missing"))
    assert (
        problem
        == f"VISIOND_LOG__LEVEL_FILE: {tmp_path / 'missing'} cannot be read: No such file or directory."
    )
    (tmp_path / "binary").write_bytes(b"\x9f")
    [problem] = problems_of(monkeypatch, LOG__LEVEL_FILE=str(tmp_path / "binary"))
    assert problem.startswith(f"VISIOND_LOG__LEVEL_FILE: {tmp_path / 'binary'}: ")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "PIPELINE__DRAIN_SECOND",
            "there is no key pipeline.drain_second; did you mean VISIOND_PIPELINE__DRAIN_SECONDS?",
        ),
        ("PIPELINE_DRAIN_SECONDS", "write two underscores: VISIOND_PIPELINE__DRAIN_SECONDS."),
        ("INBOX__PATH", "the tables [[inbox]] can only be in daemon.toml."),
        ("PIPELINE__SEGMENT", "the tables [[pipeline.segment]] can only be in daemon.toml."),
        ("COLOR__RED", "there is no key color.red; docs/configuration.md lists all keys."),
    ],
)
def test_one_that_names_no_key_is_refused_by_its_name(
    name: str, why: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems_of(monkeypatch, file, **{name: "1"}) == [f"VISIOND_{name}: {why}"]


def test_a_wrong_value_is_refused_with_the_name_of_the_variable_and_others_with_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[log]\nlevel = 7\n")
    first, second = sorted(problems_of(monkeypatch, file, PIPELINE__DRAIN_SECONDS="soon"))
    assert first.startswith(f"{file}: log.level: ")
    assert second.startswith("VISIOND_PIPELINE__DRAIN_SECONDS: write a number from 0 to ")


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes sets them for services that are called visiond and visiond-http, and Compose uses in its file."""
    configured(monkeypatch, PORT="tcp://10.0.0.1", HTTP_PORT="tcp://10.0.0.1:9464", MEMORY="16g", CONFIG="x")


def test_commands_that_only_look_find_the_state_folder_of_a_variable_beside_a_problem(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[log]\nlevel = 7\n")
    monkeypatch.setenv("VISIOND_STATE__PATH", "/var/elsewhere")
    found = load_rest(file)
    assert found
    assert found.state.path == Path("/var/elsewhere")
    monkeypatch.setenv("VISIOND_STATE__PAHT", "/var/elsewhere")
    assert load_rest(file) is None


def test_check_and_the_settings_say_which_keys_come_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    monkeypatch.setenv("VISIOND_LOG__LEVEL", "warning")
    told = place.command("check", "--quick").stdout
    assert "log.level comes from the variable VISIOND_LOG__LEVEL" in " ".join(told.split())
    tables = list_tables(load(None), parse({}, Path.cwd()))
    rows = {(table.name, row.key): row for table in tables for row in table.rows}
    assert rows["log", "level"].about.startswith("Set by the variable VISIOND_LOG__LEVEL. ")
    assert "variable" not in rows["log", "format"].about


def test_the_daemon_works_in_the_folders_that_variables_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    monkeypatch.setenv("VISIOND_OUTPUT__RESULTS", str(tmp_path / "other"))
    run = place.command("run", "--once")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "other" / "a.ppm.json").exists()


def test_a_daemon_that_is_measured_gets_no_setting_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    config = load(place.config)
    monkeypatch.setenv(TOKEN, place.token)
    monkeypatch.setenv("VISIOND_OUTPUT__RESULTS", str(tmp_path / "other"))
    with Throwaway(config, place.config, "--once") as daemon:
        daemon.wait_until_done()
    assert place.orphans() == []
    assert (config.output.results / "a.ppm.json").exists()
    assert not (tmp_path / "other").exists()
