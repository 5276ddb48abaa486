"""The command `visiond prune`."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from daemon.errors import WrongArgument
from daemon.hints import quantity
from daemon.terminal.display import console, print_json, print_table
from daemon.terminal.options import ConfigOption, JsonOption, flag, read_config

UNITS = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0, "y": 365 * 86_400.0}


def prune(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="For example 12h, 90d, 8w or 2y. Default: prune_age_days of the configuration.",
        ),
    ] = "",
    dry_run: Annotated[bool, flag("--dry-run", help="Only print what would be removed.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove old rows that nothing needs any more from the ledger.

    Removes versions of files that were gone before they were read, and
    versions that a newer one with a result replaced, if that is longer ago
    than AGE; and results of bytes that no version has. Keeps the newest
    version of each file and everything that is on disk or pending. Works
    with or without a running daemon.

    Examples:
      visiond prune --older-than 90d --dry-run
      visiond prune --older-than 90d
    """
    from daemon import control
    from daemon.upkeep.pruning import survey

    # No stage runs, and which rows are needed does not depend on what is installed.
    settings = read_config(config, needs_stages=False)
    age_seconds = parse_age(older_than) if older_than else settings.upkeep.prune_age_days * UNITS["d"]
    before = time.time() - age_seconds
    if dry_run:
        with control.open_reader(settings) as reader:
            amounts = survey(reader.path, before, lambda: False)
    else:
        amounts = control.prune(settings, before)
    if as_json:
        print_json({"removed": not dry_run, "before": before, "amounts": amounts})
        return
    print_table(
        ("kind", "rows", "bytes (approximate)"),
        ((kind, f"{amount.rows:,}", f"{amount.bytes:,}") for kind, amount in amounts.items()),
    )
    total = sum(amount.bytes for amount in amounts.values())
    rows = sum(amount.rows for amount in amounts.values())
    console.print(
        f"{quantity(rows, 'row')}, about {total:,} bytes, {'would be' if dry_run else 'were'} removed"
    )


def parse_age(text: str) -> float:
    """ "90d" in seconds. Raises WrongArgument."""
    found = re.fullmatch(r"(\d{1,6})([hdwy])", text.strip())
    if not found or not int(found[1]):
        raise WrongArgument(
            f'--older-than "{text}" is not an age; write hours, days, weeks or years, for example 12h, 90d, 8w or 2y.'
        )
    return int(found[1]) * UNITS[found[2]]
