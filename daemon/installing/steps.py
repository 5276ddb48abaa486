"""Carries out steps one after another. Each can be repeated: what is there already is left as it is."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daemon.core.errors import VisiondError

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
