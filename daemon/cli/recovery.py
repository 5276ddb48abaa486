"""The commands that make results again, and those that maintain the ledger: `visiond retry`, `redo`, `verify`, `repair`,
`backup` and `prune`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.errors import WrongArgument
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.system.mounts import is_there
from daemon.terminal.display import (
    console,
    errors,
    print_json,
    print_older_settings,
    print_put_back,
    print_table,
    print_warning,
    printable,
)
from daemon.terminal.options import (
    IMAGE_HELP,
    ConfigOption,
    ForceOption,
    JsonOption,
    flag,
    option,
    read_config,
)
from daemon.terminal.progress import LATE_SECONDS, Progress

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.maintenance.sidecars import SidecarState

TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z"]
UNITS = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0, "y": 365 * 86_400.0}


REPAIRED = {
    "missing": " and written again",
    "edited": " and written again",
    "foreign": " and left alone",
    "damaged": " and repaired",
    "unreadable": " and left alone",
}


TO_REPAIR = {
    "missing": ", to be written again",
    "edited": ", to be written again",
    "foreign": ", to be left alone",
    "damaged": ", to be repaired",
    "unreadable": ", to be left alone",
    "restored": " for a new ledger, as this one is lost or damaged",
}

LEFT_OUT = (
    "{} could not be used, so their results are not in the ledger. Their images are processed again at the next start if they "
    "are still in an inbox."
)


def retry(
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help=f"Failed images. {IMAGE_HELP}")
    ] = None,
    every: Annotated[bool, flag("--all", "Queue all failed images.")] = False,
    config: ConfigOption = None,
) -> None:
    """Queue failed images again, with a fresh set of attempts.

    Works with or without a running daemon.

    Examples:
      visiond retry inbox/a.jpg 17
      visiond retry --all
    """
    from daemon.ledger.records import open_reader
    from daemon.server import control

    settings = read_config(config)
    if bool(images) == every:
        raise typer.BadParameter("name the images to retry, or use --all, but not both")
    with open_reader(settings) as reader:
        ids = (
            reader.failed_ids()
            if every
            else [control.find_ended(reader, n, JobStatus.FAILED, "retry").id for n in images or []]
        )
    with Progress("images", total=len(ids), after=LATE_SECONDS) as progress:
        queued = control.put_back(settings, JobStatus.FAILED, ids, progress.step)
    print_put_back(
        queued, len(set(ids)), is_running=not queued or control.find_snapshot(settings) is not None
    )


def redo(
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help=f"Finished images. {IMAGE_HELP}")
    ] = None,
    every: Annotated[bool, flag("--all", "Queue all finished images.")] = False,
    stale: Annotated[
        bool,
        flag(
            "--stale",
            "Queue the images whose result would change: other models, options, thresholds or rule.",
        ),
    ] = False,
    since: Annotated[
        datetime | None,
        option(
            "--since TIME",
            "Queue the images with results of this time or later, and run all models again: their answers may be wrong.",
            formats=TIMES,
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Process finished images again with the current configuration.

    Results of models that have not changed are reused, except with --since.
    Each image keeps its result until the new one replaces it. Works with or
    without a running daemon.

    Examples:
      visiond redo --stale
      visiond redo inbox/a.jpg 17
      visiond redo --since 2026-11-29T18:30:00+00:00
    """
    from daemon.ledger.records import open_reader
    from daemon.maintenance.redo import choose, choose_newer, choose_stale
    from daemon.server import control
    from daemon.system import log

    log.set_up("critical", "console")  # what a rule raises is said below, in one line

    settings = read_config(config)
    if bool(images) + every + stale + bool(since) != 1:
        raise typer.BadParameter("use exactly one of: image names, --all, --stale, --since")
    with open_reader(settings) as reader, Progress("images", after=LATE_SECONDS) as progress:
        if images:
            named = [control.find_ended(reader, name, JobStatus.DONE) for name in images]
            choice = choose(named, settings)
        else:
            progress.begin("images", sum(reader.bin_counts().values()))
            choice = (
                choose_stale(reader, settings, progress.track)
                if stale
                else choose(
                    choose_newer(progress.track(reader.newest_done(with_results=False)), since), settings
                )
            )
        progress.begin("images", len(choice.ids))
        queued = control.put_back(
            settings, JobStatus.DONE, choice.ids, progress.step, distrust=since is not None
        )
        if choice.lost:  # from now on they are not counted as outdated
            control.note_lost(settings, choice.lost)
    daemon = control.find_snapshot(settings) if choice.ids else None
    print_put_back(queued, len(set(choice.ids)), is_running=daemon is not None)
    for why, count in choice.left.items():
        errors.print(f"{quantity(count, 'image')} not queued: {why}.")
    if stale and daemon and daemon.settings_digest not in ("", choice.settings_digest):
        print_older_settings()


def verify(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the ledger's integrity, and compare every sidecar with it.

    Works with or without a running daemon. Exits with 1 if a sidecar is
    missing, edited, damaged or unreadable, or belongs to no image in the
    ledger.

    Examples:
      visiond verify
      visiond verify --json
    """
    from daemon.maintenance import verify as recovery

    settings = read_config(config, needs_stages=False)
    counts = _show(partial(recovery.verify, settings), settings, as_json=as_json)
    results = settings.output.results
    if "missing" in counts and is_there(results) is False:
        errors.print(
            f"{printable(results)} is gone. Mount it or move it back; if it is lost, `{command('repair')}` writes it again."
        )
    raise typer.Exit(1 if counts.keys() - {"whole"} else 0)


def repair(
    dry_run: Annotated[bool, flag("--dry-run", "Only print what would be done.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write missing and edited sidecars again, or rebuild a lost ledger from them.

    If the ledger is damaged, it is rebuilt from the sidecars too, and the old
    one is kept beside it. No model runs. Stop the daemon first, unless with
    --dry-run, which exits with 1 if there is something to do.

    Examples:
      visiond repair --dry-run
      visiond repair
    """
    from daemon.maintenance import verify as recovery

    settings = read_config(config, needs_stages=not dry_run)
    if dry_run:
        counts = _show(partial(recovery.would_repair, settings), settings, as_json=as_json, done=TO_REPAIR)
        raise typer.Exit(1 if counts.keys() - {"whole", "foreign"} else 0)
    counts = _show(partial(recovery.repair, settings), settings, as_json=as_json, done=REPAIRED)
    raise typer.Exit(1 if counts["left out"] or counts["unreadable"] else 0)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    force: ForceOption = False,
    config: ConfigOption = None,
) -> None:
    """Copy the ledger to a file.

    The ledger contains every result. Works with or without a running daemon.

    Examples:
      visiond backup /backup/visiond.sqlite
    """
    from daemon.maintenance.backups import back_up

    settings = read_config(config, needs_stages=False)
    with Progress("MiB", after=LATE_SECONDS) as progress:
        back_up(settings, file, force=force, step=progress.step)
    print(f"The ledger is backed up to {file}")


def _show(
    find: Callable[[Progress], Iterable[SidecarState]],
    config: Config,
    *,
    as_json: bool,
    done: Mapping[str, str] = MappingProxyType({}),
) -> Counter[str]:
    """Print how many sidecars are of each kind, and name all that are not "whole". Returns the counts.
    done: what was done about a kind."""
    from daemon.maintenance import verify as recovery

    counts: Counter[str] = Counter()
    amiss: list[dict[str, str]] = []
    kept = ""  # where the old ledger is, if it was replaced
    with Progress("sidecars", after=LATE_SECONDS) as progress:
        for finding in progress.track(find(progress)):
            file = finding.file.decode(errors="replace")
            if finding.kind == "kept":
                kept = file
                continue
            counts[finding.kind] += 1
            if finding.kind not in ("whole", "restored"):
                amiss.append({"kind": finding.kind, "file": file, "detail": finding.detail})
    notes = recovery.describe_left_out(config)
    if left_out := counts["left out"]:
        notes.append(LEFT_OUT.format(quantity(left_out, "sidecar")))
    if as_json:
        extras = {"old_ledger": kept, "notes": notes}
        print_json({"counts": counts, "amiss": amiss} | {key: extras[key] for key in extras if extras[key]})
        return counts
    for each in amiss:
        console.print(f"{each['kind']:10}{printable(each['file'])}  {printable(each['detail'])}".rstrip())
    summary = ", ".join(f"{count} {kind}{done.get(kind, '')}" for kind, count in counts.items())
    print(f"sidecars: {summary or 'none'}")
    if kept:
        console.print(f"The ledger was rebuilt from the sidecars. The old one is kept as {printable(kept)}.")
    for note in notes:
        print_warning(f"Note: {note}")
    return counts


def prune(
    older_than: Annotated[
        str,
        option(
            "--older-than AGE",
            "For example 12h, 90d, 8w or 2y. Default: prune_age_days of the configuration.",
        ),
    ] = "",
    dry_run: Annotated[bool, flag("--dry-run", "Only print what would be removed.")] = False,
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
    from daemon.ledger.records import open_reader
    from daemon.maintenance.pruning import Amounts, survey
    from daemon.server import control

    # No stage runs, and which rows are needed does not depend on what is installed.
    settings = read_config(config, needs_stages=False)
    age_seconds = parse_age(older_than) if older_than else settings.upkeep.prune_age_days * UNITS["d"]
    before = time.time() - age_seconds
    with Progress("rows", after=LATE_SECONDS) as progress:

        def step(found: Amounts, share: float) -> None:
            done = sum(amount.rows for amount in found.values())
            progress.step(done, round(done / share) if share else None)

        if dry_run:
            with open_reader(settings) as reader:
                amounts = survey(reader.path, before, lambda: False, step)
        else:
            amounts = control.prune(settings, before, step)
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
