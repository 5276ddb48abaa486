"""The commands `visiond verify`, `repair` and `backup`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.hints import quantity
from daemon.terminal.display import console, errors, print_json, printable
from daemon.terminal.options import ConfigOption, ForceOption, JsonOption, read_config

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.recovery.rebuild import Finding


REPAIRED = {
    "missing": " and written again",
    "edited": " and written again",
    "foreign": " and left alone",
    "damaged": " and repaired",
}


LEFT_OUT = (
    "{} could not be used, so their results are not in the ledger. Their images are processed again at the next start if they "
    "are still in an inbox."
)


def verify(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the ledger's integrity, and compare every sidecar with it.

    Stop the daemon first. Exits with 1 if a sidecar is missing, edited or
    damaged, or belongs to no image in the ledger.

    Examples:
      visiond verify
      visiond verify --json
    """
    from daemon.recovery import verify as recovery

    settings = read_config(config, needs_stages=False)
    counts = _show(recovery.verify(settings), settings, as_json=as_json)
    raise typer.Exit(1 if counts.keys() - {"whole"} else 0)


def repair(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Write missing and edited sidecars again, or rebuild a lost ledger from them.

    If the ledger is damaged, it is rebuilt from the sidecars too, and the old
    one is kept beside it. No model runs. Stop the daemon first.

    Examples:
      visiond repair
    """
    from daemon.recovery import verify as recovery

    settings = read_config(config)
    counts = _show(recovery.repair(settings), settings, as_json=as_json, done=REPAIRED)
    raise typer.Exit(1 if counts["left out"] else 0)


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
    from daemon.recovery import verify as recovery

    recovery.back_up(read_config(config, needs_stages=False), file, force=force)
    print(f"The ledger is backed up to {file}")


def _show(
    findings: Iterable[Finding], config: Config, *, as_json: bool, done: Mapping[str, str] | None = None
) -> Counter[str]:
    """Print how many sidecars are of each kind, and name all that are not "whole". Returns the counts.
    done: what was done about a kind."""
    from daemon.recovery import verify as recovery
    from daemon.terminal.progress import Progress

    counts: Counter[str] = Counter()
    amiss: list[Finding] = []
    kept = ""  # where the old ledger is, if it was replaced
    with Progress("sidecars") as progress:
        for number, finding in enumerate(findings, 1):
            if finding.kind == "kept":
                kept = finding.file.decode(errors="replace")
                continue
            counts[finding.kind] += 1
            amiss += [finding] if finding.kind not in ("whole", "restored") else []
            progress.step(number)
    notes = recovery.describe_left_out(config)
    if left_out := counts["left out"]:
        notes.append(LEFT_OUT.format(quantity(left_out, "sidecar")))
    rows = [(finding.kind, finding.file.decode(errors="replace"), finding.detail) for finding in amiss]
    if as_json:
        document = {
            "counts": counts,
            "amiss": [dict(zip(("kind", "file", "detail"), row, strict=True)) for row in rows],
        }
        print_json(document | ({"old_ledger": kept} if kept else {}) | ({"notes": notes} if notes else {}))
        return counts
    for kind, file, detail in rows:
        console.print(f"{kind:10}{printable(file)}  {printable(detail)}".rstrip())
    summary = ", ".join(f"{count} {kind}{(done or {}).get(kind, '')}" for kind, count in counts.items())
    print(f"sidecars: {summary or 'none'}")
    if kept:
        console.print(f"The ledger was rebuilt from the sidecars. The old one is kept as {printable(kept)}.")
    for note in notes:
        errors.print(f"[yellow]Note: {printable(note)}[/yellow]")
    return counts
