"""Where code comes from, which is never the working directory, and how it is imported."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.cli import forget_working_directory
from stages.contract.processes import ROOT, environment, importing, locked_folder, python

PRINT_PATH = "import sys; print(*sys.path, sep='\\n')"


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what the tests change."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(tmp_path)


def path_of_child(folder: Path) -> list[str]:
    command = python("-c", PRINT_PATH)
    run = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("entries", ["", ":", ".", ":/nowhere", "/nowhere::lib"])
def test_a_child_takes_no_code_from_the_working_directory(
    entries: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", entries)
    path = path_of_child(tmp_path)
    assert not [folder for folder in path if Path(folder).is_relative_to(tmp_path) or not folder]
    assert ROOT in path
    assert ("/nowhere" in path) == ("/nowhere" in entries)


def test_the_command_is_safe_by_itself_too(tmp_path: Path) -> None:
    run = subprocess.run(python("-c", PRINT_PATH), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {"", str(tmp_path)} & set(run.stdout.splitlines())


def test_a_childs_children_take_no_code_from_the_working_directory(tmp_path: Path) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PRINT_PATH!r}], check=True)"
    run = subprocess.run(
        python("-c", program), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert not {"", str(tmp_path)} & set(run.stdout.splitlines())


def test_a_child_has_the_settings_that_it_is_given() -> None:
    assert environment({"MALLOC_ARENA_MAX": "1"})["MALLOC_ARENA_MAX"] == "1"
    assert environment()["PATH"] == os.environ["PATH"]


def test_the_command_removes_the_first_entry_of_the_module_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for entry in ("lib", "rules"):
        (tmp_path / entry).mkdir()
    rules = str(tmp_path / "rules")  # by its absolute path: that was meant
    monkeypatch.setenv("PYTHONPATH", f"lib::{rules}")
    sys.path[:0] = [str(tmp_path), str(tmp_path / "lib"), str(tmp_path), rules]
    forget_working_directory(by_module=True)
    assert [folder for folder in sys.path if Path(folder).is_relative_to(tmp_path)] == [rules]
    assert os.environ["PYTHONPATH"] == rules
    assert ROOT in sys.path


def test_a_child_starts_without_a_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("PYTHONPATH", "lib")
    forget_working_directory(by_module=True)
    assert ROOT in sys.path


def test_the_module_can_be_run_in_its_checkout() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "daemon", "--version"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("visiond ")


@pytest.mark.parametrize("freeze", [False, True])
def test_nothing_is_collected_while_modules_are_imported(freeze: bool) -> None:
    gc.unfreeze()
    try:
        with importing(freeze=freeze):
            with importing(freeze=False):
                assert not gc.isenabled()
            assert not gc.isenabled(), "the inner one leaves it as it was"
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == freeze
    finally:
        gc.freeze()  # as it is during tests


def test_a_link_with_the_name_of_a_folder_is_not_locked_in_its_place(tmp_path: Path) -> None:
    """What is locked may be removed with all that is in it."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "temporary").symlink_to(tmp_path / "precious")
    with pytest.raises(NotADirectoryError), locked_folder(tmp_path / "temporary"):
        pass
    with locked_folder(tmp_path / "precious"):
        with pytest.raises(BlockingIOError), locked_folder(tmp_path / "precious"):
            pass
