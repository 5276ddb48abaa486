"""Where a command finds its configuration: in a file, in what a shell passes to it, or nowhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.daemon_process import Place, picture
from tests.makers import put_in_the_way

PASSED = {
    "the output of a command": "--config <(cat daemon.toml)",
    "a pipe": "--config /dev/stdin < <(cat daemon.toml)",
    "a file": "--config /dev/stdin < daemon.toml",
    "the variable": "7< <(cat daemon.toml)",
}


def passed(place: Place, how: str, *command: str) -> subprocess.CompletedProcess[str]:
    variable = "VISIOND_CONFIG=/dev/fd/7 " if "--config" not in how else ""
    return place.command(*command, prefix=["bash", "-c", f'{variable}"$@" {how}', "bash"])


@pytest.mark.parametrize("how", PASSED.values(), ids=PASSED)
def test_a_configuration_that_a_shell_passes_is_read_once_and_its_paths_begin_in_the_current_folder(
    tmp_path: Path, how: str
) -> None:
    place = Place(tmp_path)
    place.drop("a.ppm", picture(1))
    run = passed(place, how, "run", "--once")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "results" / "a.ppm.json").exists()


@pytest.mark.parametrize("command", [["run"], ["setup", "fast", "--yes"], ["tune"]])
def test_a_command_that_reads_it_again_or_changes_it_wants_a_file(tmp_path: Path, command: list[str]) -> None:
    refused = passed(Place(tmp_path), PASSED["the output of a command"], *command)
    assert refused.returncode == os.EX_CONFIG
    assert "Save the configuration as a file, and name that with --config" in refused.stderr


@pytest.mark.parametrize("command", [["check", "--quick"], ["list"]])
def test_an_empty_pipe_is_not_taken_for_the_defaults(tmp_path: Path, command: list[str]) -> None:
    for wrong in ("cat missing.toml", "echo '[inbox'; echo '[state]'"):  # `list` leaves a wrong table out
        refused = passed(Place(tmp_path), f"--config <({wrong})", *command)
        assert refused.returncode == os.EX_CONFIG
    assert refused.stdout == ""


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder", "link to nowhere"])
def test_a_configuration_that_is_no_file_is_refused_and_not_waited_for_nor_passed_over(
    tmp_path: Path, kind: str
) -> None:
    place = Place(tmp_path)
    place.config.unlink()
    place.config.symlink_to("nowhere") if kind == "link to nowhere" else put_in_the_way(place.config, kind)
    default = ["env", "--unset=VISIOND_CONFIG"]  # daemon.toml in the current folder
    for command, prefix in ((["check"], []), (["list"], []), (["run", "--once"], []), (["status"], default)):
        refused = place.command(*command, prefix=prefix, timeout=20)
        assert refused.returncode == os.EX_CONFIG
        assert "daemon.toml cannot be read: " in refused.stderr
        assert kind not in ("FIFO", "socket", "device") or f"it is a {kind}, not a file" in refused.stderr
