"""Runs the commands of the system that an installation needs, and shows that it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from daemon.installing.steps import say

LINE_SECONDS = 10.0  # between two lines about a command that takes long


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command that takes no time; returns what it prints. Raises CalledProcessError, OSError."""
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, env=env, cwd="/")
    return done.stdout.strip()


def watch(
    *command: str | Path,
    note: Callable[[], str],
    env: Mapping[str, str] | None = None,
    every: float = LINE_SECONDS,
    draws: bool = False,
) -> None:
    """Run a command that takes long, with a line with `note` now and then. draws: on a terminal the command shows its
    progress itself. Raises CalledProcessError with the end of its output, OSError."""
    words, started = [*map(str, command)], time.monotonic()
    if draws and sys.stderr.isatty():
        subprocess.run(words, check=True, env=env, cwd="/")
        return
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, env=env, cwd="/", stdin=subprocess.DEVNULL
        )
        try:
            while True:
                try:
                    status = process.wait(every)
                    break
                except subprocess.TimeoutExpired:
                    say(f"          {time.monotonic() - started:.0f} s, {note()}")
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        if status:
            raise subprocess.CalledProcessError(status, words, output.read())


def written_since(folder: Path) -> Callable[[], str]:
    """How much was written to the folder's disk from now on, and how fast, in words."""
    before, started = shutil.disk_usage(folder).used, time.monotonic()

    def describe() -> str:
        written = max(0, shutil.disk_usage(folder).used - before)
        return f"{written / 1e9:.1f} GB written, {written / 1e6 / (time.monotonic() - started):.0f} MB/s"

    return describe


def as_account(account: str, home: Path, *command: str | Path, variables: Mapping[str, str]) -> str:
    """Run a command as another user; returns what it prints. variables: of its environment, besides those that every program
    needs. Raises CalledProcessError, OSError."""
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8", **variables}
    return run("runuser", "-u", account, "--", *command, env=env)
