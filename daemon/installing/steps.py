"""Carries out steps one after another. Each can be repeated: what is there already is left as it is. Runs the commands of
the system that they need, and shows that it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.core.errors import VisiondError

LINE_SECONDS = 10.0  # between two lines about a command that takes long
QUICK_SECONDS = 0.5  # a step that takes longer shows how long


class StepFailed(VisiondError):
    """One step of an installation: a sentence with the reason."""

    exit_status = os.EX_CANTCREAT


@dataclass(frozen=True)
class Step:
    """what: a noun, such as "the account visiond". make: raises StepFailed, OSError or CalledProcessError.
    by_hand: commands that do the same, or that help when it fails. is_slow: people wait for it."""

    what: str
    is_there: Callable[[], bool]
    make: Callable[[], object]
    by_hand: Sequence[str] = ()
    is_slow: bool = False


def carry_out(steps: Sequence[Step], *, dry_run: bool = False, again: str = "") -> None:
    """Print each step with how it went. again: the command that continues after a failure.
    Raises StepFailed with what is done, what is not, and what to type."""
    for number, step in enumerate(steps):
        if step.is_there():
            say(f"already   {step.what}")
            continue
        if dry_run:
            say(f"to do     {step.what}", *step.by_hand)
            continue
        if step.is_slow:
            say(f"…         {step.what}")
        started = time.monotonic()
        try:
            step.make()
        except (OSError, subprocess.SubprocessError, StepFailed, KeyboardInterrupt) as error:
            raise StepFailed(_report(steps, number, _reason(error), again)) from error
        seconds = time.monotonic() - started
        say(f"done      {step.what}" + (f", in {seconds:.0f} s" if seconds > QUICK_SECONDS else ""))


def say(*lines: str) -> None:
    """The first line, and the others indented below it."""
    print(*lines, sep="\n          ", flush=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = [line for line in f"{error.stdout or ''}{error.stderr or ''}".splitlines() if line.strip()]
        command = " ".join(map(str, error.cmd))
        return "\n".join([f"`{command}` ended with status {error.returncode}:", *said[-12:]])
    return str(error) or "interrupted"


def _report(steps: Sequence[Step], failed: int, reason: str, again: str) -> str:
    def names(some: Sequence[Step]) -> str:
        return ", ".join(step.what for step in some) or "nothing"

    lines = [
        f"{steps[failed].what}: {reason}",
        f"Done: {names(steps[:failed])}.",
        f"Not done: {names([step for step in steps[failed:] if not step.is_there()])}.",
    ]
    if steps[failed].by_hand:
        lines += [
            "To see what is wrong, or to do this step yourself:",
            *map("    {}".format, steps[failed].by_hand),
        ]
    if again:
        lines.append(f"Then `{again}` goes on from there.")
    return "\n".join(lines)


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
