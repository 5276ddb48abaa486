"""`visiond run`: the daemon, or one pass over the images in the inboxes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from daemon.core.errors import Incomplete, Unfinished
from daemon.core.jobs import JobStatus
from daemon.terminal.display import print_outcomes, print_trial
from daemon.terminal.options import ConfigOption, flag, read_config


def run(
    config: ConfigOption = None,
    once: Annotated[
        bool,
        flag(
            "--once",
            help="Process the images in the inboxes, then exit: 0 if all succeeded, 1 if some failed.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="N", min=1, help="With --once: process at most N images, as a trial."
        ),
    ] = None,
    allow_failed: Annotated[
        bool, flag("--allow-failed", help="With --once: exit 0 even if some images failed.")
    ] = False,
) -> None:
    """Run the daemon: watch the inboxes and process every image.

    On SIGTERM, Ctrl-C or a closed terminal it finishes the images in flight
    and stops. `run --once` then exits with 128 + the signal's number (130 for
    Ctrl-C, 143 for SIGTERM) if images are left. Without a terminal, as under
    systemd, SIGHUP is a reload: see `visiond reload`.

    Examples:
      visiond run
      visiond run --once --limit 20
      visiond run --config /etc/visiond/daemon.toml
    """
    from daemon.service.start import run as run_daemon
    from daemon.terminal.progress import Progress

    if not once and (limit or allow_failed):
        raise typer.BadParameter("--limit and --allow-failed can only be used with --once")
    settings = read_config(config, needs_file=not once)
    shortfall: Incomplete | None = None
    with Progress("images", shown=once) as progress:
        try:
            outcomes = run_daemon(
                settings,
                once=once,
                limit=limit or 0,
                show=progress.show if once else None,
                read=partial(read_config, config),
            )
        except Incomplete as error:
            outcomes, shortfall = error.outcomes, error
    if once:
        print_outcomes(outcomes, progress, settings)
        if limit and not isinstance(shortfall, Unfinished):
            print_trial(outcomes[JobStatus.PENDING], limit)
        if shortfall:
            raise shortfall
        raise typer.Exit(1 if outcomes[JobStatus.FAILED] and not allow_failed else 0)
