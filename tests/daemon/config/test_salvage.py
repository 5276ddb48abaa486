"""A daemon.toml with a problem: what can be read of it all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.salvage import load_rest
from tests.daemon_process import Daemon, Place

GOOD = """
[[inbox]]
path = "drop"
[state]
path = "kept"
[stages.yolo]
backend = "fake"
"""


def write(folder: Path, text: str) -> Path:
    (file := folder / "daemon.toml").write_text(text)
    return file


@pytest.mark.parametrize(
    "problem",
    [
        "[log]\nlevel = info",  # no TOML
        "[log]\nlevel = 'loud'",
        "[logg]\nlevel = 'info'",
        "[[inbox]]\npath = 7",
        "[[inbox]\npath = 'b'",
    ],
)
def test_the_folder_of_the_ledger_is_found_beside_a_problem(tmp_path: Path, problem: str) -> None:
    for text in (f"{GOOD}{problem}", f"{problem}\n{GOOD}"):
        found = load_rest(write(tmp_path, text))
        assert found is not None
        assert found.state.path == tmp_path / "kept"


@pytest.mark.parametrize(
    "text", [GOOD.replace('"kept"', "kept"), GOOD.replace("[state]", "[state"), GOOD.replace('"kept"', "7")]
)
def test_another_ledger_is_never_taken_for_that_of_a_problematic_table(tmp_path: Path, text: str) -> None:
    assert load_rest(write(tmp_path, text)) is None


def test_commands_that_look_work_beside_a_daemon_whose_file_has_got_a_typo(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with Daemon(place) as daemon:
        place.drop_many(range(1))
        daemon.wait_idle(1)
        good = place.config.read_text()
        assert daemon.metric("visiond_reloads_total", outcome="refused") == 0
        place.config.write_text(f"{good}\n[log]\nlevel = info\n")
        for command in ("status", "list", "show"):
            done = place.command(command, *(["1"] if command == "show" else []))
            assert done.returncode == 0, done.stderr
            assert "is not valid TOML" in done.stderr.splitlines()[0]
        refused = place.command("reload")
        assert (refused.returncode, "not valid TOML" in refused.stderr) == (78, True)
        logged = daemon.wait_event("the configuration was not reloaded; everything stays as it was")
        assert "not valid TOML" in logged["problems"][0]
        assert daemon.metric("visiond_reloads_total", outcome="refused") == 1
        assert daemon.metric("visiond_configuration_refused") == 1
        assert "the last reload was refused, so the daemon works with the settings that it had: " in (
            place.command("status").stdout
        )
        place.config.write_text(good)
        assert place.command("reload").stdout == "Changed: nothing.\n"
        assert daemon.metric("visiond_configuration_refused") == 0
        assert "refused" not in place.command("status").stdout
