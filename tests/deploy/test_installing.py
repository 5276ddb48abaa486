"""`visiond install`, `--upgrade` and `uninstall` in throwaway trees, with real environments and a stand-in program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from daemon.cli.commands import app
from daemon.core.errors import WrongArgument
from daemon.installing import source
from daemon.installing.__main__ import parser
from daemon.installing.environment import Environment, go_back, in_use, switch
from daemon.installing.parts import Parts, free_ports
from daemon.installing.places import Places
from daemon.installing.steps import Step, StepFailed, carry_out
from daemon.installing.units import template_of
from stages.contract.processes import locked_folder
from tests.daemon_process import PATIENCE
from tests.deploy.standin import make_wheel
from tests.deploy.test_unit import one

ROOT = Path(__file__).parents[2]
OFFLINE = {"UV_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to another user")


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "daemon.installing", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
        env={**os.environ, **OFFLINE},
        cwd="/",
    )


def listing(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))


def program_says(tree: Path) -> str:
    return subprocess.check_output([tree / "opt/visiond/bin/visiond", "--version"], text=True)


@needs_root
def test_install_upgrade_and_uninstall_in_a_throwaway_tree(tmp_path: Path) -> None:
    tree, images = tmp_path / "tree", tmp_path / "tree/srv/visiond"
    first, second, broken = (
        make_wheel(tmp_path, "0.0.1"),
        make_wheel(tmp_path, "0.0.2"),
        make_wheel(tmp_path, "0.0.3", status=3),
    )
    options = ("--root", tree, "--wheel")

    # a new tree
    done = command("install", *options, first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert program_says(tree) == "visiond 0.0.1 --version\n"
    assert os.readlink(tree / "opt/visiond").startswith("visiond-environments/0.0.1-")
    documentation = one("Documentation").removeprefix("file:/")
    assert (tree / documentation).read_text() == "# Install and run"
    owner = (tree / "etc/passwd").read_text().split(":")
    assert owner[0] == "visiond"
    modes = {path.name: (oct(path.stat().st_mode), path.stat().st_uid) for path in images.iterdir()}
    assert modes.pop("inbox") == ("0o42770", int(owner[2])), "members of the group can drop images"
    assert set(modes.values()) == {("0o42750", int(owner[2]))}
    assert {path.stat().st_gid for path in images.iterdir()} == {int(owner[3])}

    # again: nothing changes, and what the administrator wrote stays
    config = tree / "etc/visiond/daemon.toml"
    config.write_text('[log]\nlevel = "debug"\n')
    before = listing(tree)
    again = command("install", *options, first)
    assert [line.split("  ")[0] for line in again.stdout.splitlines()[1:9]] == ["already"] * 8
    assert (listing(tree), config.read_text()) == (before, '[log]\nlevel = "debug"\n')

    # another version only replaces it if that is asked for, and works
    refused = command("install", *options, second)
    assert (refused.returncode, "install --upgrade" in refused.stderr) == (os.EX_CANTCREAT, True)
    failed = command("install", "--upgrade", *options, broken)
    assert failed.returncode == os.EX_CANTCREAT
    assert "a trial of the new environment: `" in failed.stderr
    assert "\nDone: the account visiond, the environment" in failed.stderr
    assert "Not done: a trial of the new environment." in failed.stderr
    assert "--upgrade" in failed.stderr.splitlines()[-1], "what to type"
    assert program_says(tree) == "visiond 0.0.1 --version\n"
    assert command("install", "--upgrade", *options, second).returncode == 0
    assert program_says(tree) == "visiond 0.0.2 --version\n"
    names = [name.partition("-")[0] for name in os.listdir(tree / "opt/visiond-environments")]
    assert sorted(names) == ["0.0.1", "0.0.2", "cache"], "the one before stays, the others go"
    with locked_folder(tree / "opt/visiond-environments"):
        assert "another installation is at work" in command("install", *options, second).stderr

    # gone, but not the data
    (images / "inbox" / "a.jpg").touch()
    gone = command("uninstall", "--root", tree)
    assert gone.returncode == 0, gone.stderr
    for kept in (images, config.parent, tree / "var/lib/visiond"):
        assert f"\n          {kept}\n" in gone.stdout
    files = [name for name in listing(tree) if (tree / name).is_file()]
    assert [name for name in files if not name.startswith("etc/.pwd.lock")] == [
        *["etc/group", "etc/gshadow", "etc/passwd", "etc/shadow", "etc/visiond/daemon.toml"],
        "srv/visiond/inbox/a.jpg",
    ]
    assert command("uninstall", "--root", tree).returncode == 0


def test_an_uninstallation_names_the_data_of_daemons_that_were_never_started(tmp_path: Path) -> None:
    kept = [
        *["etc/visiond", "srv/visiond-scans", "var/lib/visiond-old", "var/cache/visiond-old"],
        *["etc/systemd/system/visiond@film.service.d", "etc/systemd/system/visiond@.service.d"],
    ]
    others = ["srv/visiond-A B", "srv/visionday", "var/lib/other-old"]
    for folder in (*kept, *others):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/visiond/daemon.toml").touch()
    (tmp_path / "etc/visiond/letters.toml").touch()
    (tmp_path / "srv/visiond-letters").mkdir()
    told = (
        command("uninstall", "--dry-run", "--root", tmp_path).stdout.partition("These stay:")[2].split("\n")
    )
    listed = [line.strip().removeprefix(f"{tmp_path}/") for line in told if str(tmp_path) in line]
    assert sorted(listed) == sorted([*kept, "srv/visiond-letters"])
    only = command("uninstall", "--dry-run", "--name", "scans", "--root", tmp_path).stdout
    assert ("visiond-scans" in only, "visiond-old" in only) == (True, False)


def test_a_dry_run_lists_the_steps_and_changes_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "0.0.1")
    before = listing(tmp_path)
    done = command("install", "--dry-run", "--name", "scans", "--root", tmp_path / "tree", "--wheel", wheel)
    assert done.stdout.count("\nto do ") == 8
    assert "/etc/visiond/scans.toml" in done.stdout
    assert listing(tmp_path) == before


def test_several_daemons_have_configurations_folders_and_ports_of_their_own(tmp_path: Path) -> None:
    places = Places(tmp_path, "scans")
    assert [places.config, places.images, places.state] == [
        tmp_path / "etc/visiond/scans.toml",
        tmp_path / "srv/visiond-scans",
        tmp_path / "var/lib/visiond-scans",
    ]
    (tmp_path / "a.toml").write_text('[http]\nlisten = "127.0.0.1:9464"\n')
    (tmp_path / "b.toml").write_text("broken [")
    assert next(free_ports(tmp_path.glob("*.toml"))) == 9466, "the first daemon's page has 9465"
    found = source.find_source(make_wheel(tmp_path, "0.0.1"), tmp_path)
    for name in ("", "scans"):
        Parts(Places(tmp_path, name), found, Environment(places, found, ""))._write_config()
    assert re.findall(r":(\d{4})", places.config.read_text()) == ["9466", "9467"]
    for name in ("Scans", "../x", "a b", "daemon"):
        with pytest.raises(WrongArgument):
            Places(tmp_path, name)


def test_an_existing_configuration_is_never_written(tmp_path: Path) -> None:
    """Not even if somebody writes it after the step has looked for it."""
    places = Places(tmp_path)
    found = source.find_source(make_wheel(tmp_path, "0.0.1"), tmp_path)
    [step] = [
        s for s in Parts(places, found, Environment(places, found, "")).first() if "daemon.toml" in s.what
    ]
    places.config.parent.mkdir(parents=True)
    places.config.write_text("mine")
    assert step.is_there()
    with pytest.raises(FileExistsError):
        step.make()
    assert places.config.read_text() == "mine"


def test_the_template_unit_is_made_from_the_unit() -> None:
    folder = ROOT / "deploy" / "systemd"
    unit = (folder / "visiond.service").read_text()
    assert (folder / "visiond@.service").read_text() == template_of(unit), "run: make docs"
    words = template_of(unit).split()
    assert not [word for word in words if "lib/visiond" in word and "visiond-%i" not in word]


def test_both_ways_to_call_it_have_the_same_options() -> None:
    made, subparsers = typer.main.get_command(app), cast(Any, parser()._subparsers)
    assert isinstance(made, typer.core.TyperGroup)
    for name, own in subparsers._group_actions[0].choices.items():
        ours = {option for action in own._actions for option in action.option_strings} - {"-h", "--help"}
        theirs = {option for parameter in made.commands[name].params for option in parameter.opts}
        theirs = {option for option in theirs if option.startswith("-")}
        assert ours == theirs - {"--help"}


def test_it_needs_nothing_but_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import daemon.installing.__main__"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""


def test_a_failed_step_says_what_is_done_what_is_not_and_what_to_type() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "/opt")

    steps = [
        Step("a", lambda: True, fail),
        Step("b", lambda: False, fail, ["df -h /opt"]),
        Step("c", lambda: False, fail),
    ]
    with pytest.raises(StepFailed) as caught:
        carry_out(steps, again="visiond install")
    assert str(caught.value).splitlines() == [
        "b: [Errno 28] No space left on device: '/opt'",
        "Done: a.",
        "Not done: b, c.",
        "To see what is wrong, or to do this step yourself:",
        "    df -h /opt",
        "Then `visiond install` goes on from there.",
    ]


def test_an_installation_by_hand_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    places, new = Places(tmp_path), tmp_path / "opt/visiond-environments/1"
    (places.program / "bin").mkdir(parents=True)
    new.mkdir(parents=True)
    before = in_use(places)
    switch(places, new)
    assert places.program.resolve() == new
    go_back(places, before)
    assert (places.program.is_symlink(), (places.program / "bin").is_dir()) == (False, True)


def test_an_installed_visiond_becomes_a_wheel_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, site = make_wheel(tmp_path, "0.0.1"), tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    installed = metadata.PathDistribution(site / "visiond-0.0.1.dist-info")
    monkeypatch.setattr(metadata, "distribution", lambda _: installed)
    (tmp_path / "out").mkdir()
    packed = source.pack_installed(tmp_path / "out")
    first, again = source.find_source(wheel, tmp_path), source.find_source(packed, tmp_path)
    assert (first.version, first.digest) == (again.version, again.digest)


def test_a_change_in_any_package_of_the_wheel_makes_another_environment() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [f"{package}/" for package in packages] == list(source.CODE)
