"""The commands that run models on images: `visiond run`, the daemon or one pass over the images in the inboxes; and `visiond
compare`, another model on a sample of those that are done."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.errors import Incomplete, Unfinished, VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.system.signals import SHELL_OFFSET
from daemon.terminal.display import console, print_found, print_json, print_outcomes, print_trial, printable
from daemon.terminal.options import (
    ConfigOption,
    ForceOption,
    JsonOption,
    SeedOption,
    find_config,
    flag,
    option,
    read_changed,
    read_changes,
    read_config,
)
from daemon.terminal.progress import LATE_SECONDS, Progress

if TYPE_CHECKING:
    from daemon.models.comparing import ModelComparison

LISTED = 10  # images that change most
MOST_SAMPLE = 100_000  # images whose answers are in memory


def run(
    config: ConfigOption = None,
    once: Annotated[
        bool,
        flag("--once", "Process the images in the inboxes, then exit: 0 if all succeeded, 1 if some failed."),
    ] = False,
    limit: Annotated[
        int | None, option("--limit -n N", "With --once: process at most N images, as a trial.", min=1)
    ] = None,
    allow_failed: Annotated[
        bool, flag("--allow-failed", "With --once: exit 0 even if some images failed.")
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

    read = partial(read_config, config)
    if not once:
        if limit or allow_failed:
            raise typer.BadParameter("--limit and --allow-failed can only be used with --once")
        run_daemon(read_config(config, needs_file=True), read=read)
        return
    settings = read()
    shortfall: Incomplete | None = None
    with Progress("images") as progress:
        try:
            outcomes = run_daemon(settings, once=True, limit=limit or 0, show=progress.show, read=read)
        except Incomplete as error:
            outcomes, shortfall = error.outcomes, error
    print_outcomes(outcomes, progress, settings)
    if limit and not isinstance(shortfall, Unfinished):
        print_trial(outcomes[JobStatus.PENDING], limit)
    if shortfall:
        raise shortfall
    raise typer.Exit(bool(outcomes[JobStatus.FAILED]) and not allow_failed)


StageOption = Annotated[str, option("--stage STAGE", "The stage: ocr, yolo, clip, blip or another.")]
ModelOption = Annotated[str, option("--model MODEL", "The new model, as `model =` in daemon.toml names it.")]
ChangesOption = Annotated[
    list[str] | None,
    option("--set KEY=VALUE", "Another setting of the stage, such as dtype=float16 or options.conf=0.4."),
]
SampleOption = Annotated[int, option("--sample N", "How many images, at random.", min=1, max=MOST_SAMPLE)]
PageOption = Annotated[
    Path | None, option("--page FILE", "Write a page (HTML) with the images that change most.")
]
KwhOption = Annotated[
    float | None, option("--price-per-kwh PRICE", "Of energy, for the price of all.", min=0)
]
HourOption = Annotated[float | None, option("--price-per-hour PRICE", "Of the machine, the same.", min=0)]


def compare(
    stage: StageOption,
    model: ModelOption = "",
    changes: ChangesOption = None,
    sample: SampleOption = 2000,
    seed: SeedOption = 0,
    page: PageOption = None,
    price_per_kwh: KwhOption = None,
    price_per_hour: HourOption = None,
    force: ForceOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try another model of a stage on a sample before a redo.

    Runs the stage on a sample of the images that are DONE, and holds its
    answers against the stored ones: the share that would change, with the
    range that holds it 95 of 100 times, the images that change most, and
    how many images a redo would compute, with its hours and energy. Results
    stay as they are. The new answers are kept every few seconds: neither a
    later redo with this model nor this command computes them again, even
    after Ctrl-C, an error or a crash.

    Examples:
      visiond compare --stage yolo --model rf-detr-small
      visiond compare --stage ocr --set dtype=float32 --sample 500
      visiond compare --stage blip --model ./mine --page compared.html
    """
    from daemon.exports.datasets import check_target
    from daemon.ledger.records import open_reader
    from daemon.models import comparison_page as pages
    from daemon.models.comparing import compare as compare_answers
    from daemon.models.verdict import Prices, as_document, describe, say_what_next
    from daemon.server.control import keep_answers
    from daemon.system import log

    log.set_up("warning", "console")  # a sentence, also where nobody sees it on a terminal

    named = read_changes(model, changes or [])
    settings = read_changed(config, stage, named)
    if page:
        check_target(settings, page, find_config(config))
        pages.check_page(page, settings, force=force)
    with open_reader(settings) as reader, Progress("images", after=LATE_SECONDS) as progress:
        keep = partial(keep_answers, settings)
        found = compare_answers(settings, stage, reader, sample, seed, progress, keep)
    trouble = found.run.trouble  # raised after what was found is printed
    prices = Prices(price_per_kwh, price_per_hour)
    lines = [*describe(found, prices, seed), *say_what_next(found, named)]
    try:
        if page:
            pages.write_page(page, settings, found, lines, force=force)
    except VisiondError as error:
        page, trouble = None, trouble or error
    if as_json:
        print_json(as_document(found, prices))
    else:
        _print_comparison(found, lines, page)
    if trouble:
        raise trouble
    if found.run.stop:
        raise typer.Exit(SHELL_OFFSET + found.run.stop)


def _print_comparison(found: ModelComparison, lines: list[str], page: Path | None) -> None:
    changed = [pair for pair in found.pairs if pair.change.amount][:LISTED]
    rows = ((p.record.id, os.fsdecode(p.record.location), f"{p.change.amount:.2f}") for p in changed)
    print_found(("number", "those that change most", "change"), rows)
    if kept := found.run.kept:
        again = "a redo with these settings does not compute them again, and neither does this command"
        lines.append(f"{quantity(kept, 'new answer')} kept: {again}.")
    if page:
        lines.append(f"Both answers side by side: {page}")
    for line in lines:
        console.print(printable(line))
