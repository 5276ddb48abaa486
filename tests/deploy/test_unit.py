from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer

from daemon.cli.commands import app
from daemon.config import loading as config
from daemon.config.pipeline import PipelineSection
from daemon.core.errors import ConfigError, LedgerTooNew, ModelsUnusable, VisiondError
from daemon.system import children

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "visiond.service"
DROP_INS = FOLDER / "visiond.service.d"
SECONDS = {"min": 60, "s": 1, "": 1}

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd is not installed: make tools",
)


def read_unit(path: Path) -> dict[str, list[str]]:
    """Directive → the values of each of its lines, as
    systemd reads them: a directive may occur several times."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def one(name: str) -> str:
    (value,) = read_unit(UNIT)[name]
    return value


def seconds(name: str) -> int:
    """A time span such as 30min."""
    value = one(name)
    number = value.rstrip("mins")
    return int(number) * SECONDS[value[len(number) :]]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "directive",
    [
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=60",
        "Restart=on-failure",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "OOMScoreAdjust=200",
        "MemoryHigh=90%",
        "User=visiond",
        "StateDirectory=visiond",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "DevicePolicy=closed",
        "DeviceAllow=char-nvidia* rwm",
    ],
)
def test_the_unit_has_everything_that_the_daemon_relies_on(directive: str) -> None:
    name, _, value = directive.partition("=")
    assert one(name) == value


def test_a_stop_leaves_time_to_drain_and_to_end_the_workers() -> None:
    assert seconds("TimeoutStopSec") > PipelineSection().drain_seconds + children.END_SECONDS


def test_a_start_leaves_time_to_load_the_models() -> None:
    assert seconds("TimeoutStartSec") > PipelineSection().load_timeout_seconds


def test_restarts_are_limited_but_not_for_ever_out_of_reach() -> None:
    assert 0 < seconds("RestartSec") * int(one("StartLimitBurst")) < seconds("StartLimitIntervalSec")


def test_errors_of_configuration_are_not_tried_again() -> None:
    statuses = set(map(int, one("RestartPreventExitStatus").split()))
    assert statuses == {error.exit_status for error in (ConfigError, ModelsUnusable, LedgerTooNew)} | {
        os.EX_USAGE
    }


def test_the_documented_exit_statuses_are_those_of_the_errors() -> None:
    rows = re.findall(
        r"^\| (\d+) \|.*\| *(yes|no)? *\|$",
        (FOLDER.parents[1] / "docs" / "commands.md").read_text(),
        re.MULTILINE,
    )
    kinds: list[type[VisiondError]] = [VisiondError, *VisiondError.__subclasses__()]
    assert {int(status) for status, _ in rows} == {0, 1, os.EX_USAGE} | {kind.exit_status for kind in kinds}
    assert {status for status, restarted in rows if restarted == "no"} == set(
        one("RestartPreventExitStatus").split()
    )


def test_the_command_line_is_one_the_command_takes() -> None:
    executable, command, *options = shlex.split(one("ExecStart"))
    assert executable == "/opt/visiond/bin/visiond"
    made = typer.main.get_command(app)
    assert isinstance(made, typer.core.TyperGroup)
    known = {name for parameter in made.commands[command].params for name in parameter.opts}
    assert {option for option in options if option.startswith("-")} == {"--config"} <= known


@pytest.mark.parametrize(
    "directive", ["PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork"]
)
def test_nothing_is_forbidden_that_cuda_or_the_http_pages_need(directive: str) -> None:
    assert read_unit(UNIT)[directive] == []


def test_the_example_configuration_writes_only_where_the_unit_lets_it() -> None:
    settings = config.load(FOLDER / "daemon.toml")
    writable = [Path(path.lstrip("-")) for path in one("ReadWritePaths").split()]
    writable.append(Path("/var/lib") / one("StateDirectory"))
    output = settings.output
    folders = [
        output.results,
        output.failed,
        output.done,
        output.bins_folder,
        settings.state.path,
        settings.models.folder,
    ]
    for folder in [*folders, *(inbox.path for inbox in settings.inbox)]:
        assert any(folder.is_relative_to(path) for path in writable), f"{folder} cannot be written"


def install(folder: Path, *drop_ins: str) -> Path:
    """The unit and these examples of drop-ins as systemd would find them, with a program that exists."""
    unit = folder / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/visiond/bin/visiond", sys.executable))
    for name in drop_ins:
        target = folder / DROP_INS.name / name
        target.parent.mkdir(exist_ok=True)
        text = (DROP_INS / f"{name}.example").read_text()
        target.write_text(re.sub(r"^#(?=[A-Z]\w+=)", "", text, flags=re.MULTILINE))
    return unit


@needs_analyze
def test_systemd_finds_no_fault_with_the_unit_and_the_drop_ins(tmp_path: Path) -> None:
    verdict = analyze(
        "verify", "--man=no", str(install(tmp_path, "folders.conf", "limits.conf", "sealed.conf"))
    )
    # not those about other units
    complaints = [line for line in verdict.stderr.splitlines() if "visiond" in line]
    assert (verdict.returncode, complaints) == (0, [])


@needs_analyze
def test_systemd_finds_no_fault_with_the_template_unit(tmp_path: Path) -> None:
    unit = tmp_path / "visiond@scans.service"
    template = (FOLDER / "visiond@.service").read_text()
    unit.write_text(template.replace("/opt/visiond/bin/visiond", sys.executable))
    verdict = analyze("verify", "--man=no", str(unit))
    complaints = [line for line in verdict.stderr.splitlines() if "visiond" in line]
    assert (verdict.returncode, complaints) == (0, [])


@needs_analyze
@pytest.mark.parametrize(
    ("drop_ins", "tenths"), [([], 15), (["sealed.conf"], 5)], ids=["with loopback", "sealed"]
)
def test_exposure_is_low(tmp_path: Path, drop_ins: list[str], tenths: int) -> None:
    unit = install(tmp_path, *drop_ins)
    verdict = analyze("security", "--offline=true", f"--threshold={tenths}", "--no-pager", str(unit))
    assert verdict.returncode == 0, verdict.stdout[-300:] + verdict.stderr
    assert "Overall exposure level" in verdict.stdout
