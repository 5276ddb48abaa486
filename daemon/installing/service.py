"""What systemd runs of visiond: start a unit and wait until it is ready."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from daemon.installing.places import Places
from daemon.installing.steps import Step, run, watch

RUNNING = Path("/run/systemd/system")  # exists if systemd is process 1: sd_booted(3)
POLL_SECONDS = 5.0
RELOAD = Step("systemd reads the units again", lambda: False, lambda: run("systemctl", "daemon-reload"))


def is_booted(places: Places) -> bool:
    """Whether there is a systemd that runs the units of this tree."""
    return places.is_system and RUNNING.is_dir()


def active_units() -> list[str]:
    """visiond's units that run, or try to."""
    listed = run(
        "systemctl", "list-units", "--plain", "--no-legend", "--full",
        "--state=active,activating,reloading", "visiond.service", "visiond@*.service",
    )  # fmt: skip
    return [line.split()[0] for line in listed.splitlines()]


def is_active(unit: str) -> bool:
    return run("systemctl", "show", "--value", "--property=ActiveState", unit) == "active"


def variables_of(unit: str) -> dict[str, str]:
    """The environment of the unit's process, whose settings may be there; empty if it has none."""
    process = run("systemctl", "show", "--value", "--property=MainPID", unit)
    try:
        pairs = Path("/proc", process, "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def start(unit: str) -> None:
    """Start or restart a unit, and wait until its models are loaded. Raises CalledProcessError."""
    subprocess.run(["systemctl", "reset-failed", unit], capture_output=True, check=False)
    watch("systemctl", "restart", unit, note=lambda: describe(unit), every=POLL_SECONDS)


def describe(unit: str) -> str:
    """What the unit says about itself."""
    return run("systemctl", "show", "--value", "--property=StatusText", unit) or "starting"


def stop(*units: str) -> None:
    if units:
        run("systemctl", "stop", *units)
