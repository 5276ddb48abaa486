"""Entry of the command `visiond`. An order to stop is obeyed before anything is imported that takes its time."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        from daemon.signals import leave_at_once

        leave_at_once(once="--once" in sys.argv)
    from daemon.commands import main as run_command

    run_command()
