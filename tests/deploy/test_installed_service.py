"""The installer under a systemd that the test boots: start, upgrade, going back, several daemons, the end.

The program is a stand-in that speaks systemd's protocol; tests/deploy/test_service.py runs the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.machine import Machine, booted
from tests.deploy.standin import make_wheel

ROOT = Path(__file__).parents[2]
PYTHON = Path("/usr/bin/python3")  # the tests' own may be in a home folder, which the service cannot see
PROGRAM = """
import os, shutil, signal, socket, sys

LEDGER = os.path.join(os.environ.get("STATE_DIRECTORY", ""), "ledger.sqlite")

def main():
    command = sys.argv[1]
    if command == "backup":
        shutil.copy(os.path.join(os.path.dirname(sys.argv[-1]), "ledger.sqlite"), sys.argv[-1])
    if command != "run":
        return
    if os.path.exists(LEDGER) and open(LEDGER).read() > "{version}":
        sys.exit("the ledger is of a newer version")
    with open(LEDGER, "w") as ledger:  # as a migration
        ledger.write("{version}")
    if {breaks}:
        sys.exit("this version breaks")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\\0"))
        end.send(b"READY=1\\nSTATUS=version {version}\\nWATCHDOG_USEC=600000000")
    signal.sigwait([signal.SIGTERM])
"""


def install(machine: Machine, *words: str | Path) -> subprocess.CompletedProcess[str]:
    python = [sys.executable, "-m", "daemon.installing", *map(str, words)]
    environment = {**os.environ, "UV_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return machine.run(*python, environment=environment)


@pytest.mark.skipif(not PYTHON.exists(), reason="there is no Python outside of home folders")
def test_systemd_runs_what_is_installed_upgraded_and_brought_back(tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()

    def wheel(version: str, schema: int, *, breaks: bool = False) -> Path:
        program = PROGRAM.format(version=version, breaks=breaks)
        return make_wheel(tmp_path, version, program=program, schema=schema)

    first, second, broken = wheel("0.0.1", 1), wheel("0.0.2", 1), wheel("0.0.3", 2, breaks=True)
    with booted(tmp_path, units) as machine:
        machine.run("rm", "-rf", "/opt/visiond")
        ours = ("--python", PYTHON, "--wheel")

        done = install(machine, "install", *ours, first)
        assert done.returncode == 0, done.stdout + done.stderr
        assert machine.property("StatusText") == "version 0.0.1"
        assert machine.systemctl("is-enabled", "visiond") == "enabled"
        process = machine.property("MainPID")
        assert install(machine, "install", *ours, first).returncode == 0
        assert machine.property("MainPID") == process, "a repeated installation restarts nothing"

        done = install(machine, "install", "--name", "scans", *ours, first)
        assert done.returncode == 0, done.stdout + done.stderr
        assert machine.property("StatusText", "visiond@scans") == "version 0.0.1"
        assert "9467" in machine.run("cat", "/etc/visiond/scans.toml").stdout

        assert install(machine, "install", "--upgrade", *ours, second).returncode == 0
        assert machine.property("StatusText") == "version 0.0.2"
        assert machine.property("StatusText", "visiond@scans") == "version 0.0.2", "both share the program"

        failed = install(machine, "install", "--upgrade", *ours, broken)
        assert failed.returncode == os.EX_CANTCREAT
        assert "did not become ready with 0.0.3-" in failed.stderr
        assert "the old one works again" in failed.stderr
        for unit, suffix in (("visiond", ""), ("visiond@scans", "-scans")):
            assert machine.property("StatusText", unit) == "version 0.0.2"
            ledger = machine.run("cat", f"/var/lib/visiond{suffix}/before-{label(machine)}.sqlite").stdout
            assert ledger == "0.0.2", "the copy from before the migration"

        gone = install(machine, "uninstall")
        assert gone.returncode == 0, gone.stderr
        assert machine.property("ActiveState") == "inactive"
        assert machine.property("ActiveState", "visiond@scans") == "inactive"
        assert "/etc/visiond" in gone.stdout
        assert "/srv/visiond-scans" in gone.stdout


def label(machine: Machine) -> str:
    """Of the broken version, whose environment is left."""
    names = machine.run("ls", "/opt/visiond-environments").stdout.split()
    [found] = [name for name in names if name.startswith("0.0.3-")]
    return found
