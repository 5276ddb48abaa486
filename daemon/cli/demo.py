"""`visiond demo`: process sample images and two photographs with the real daemon,
and print a table of the results."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.table import Table

from daemon.cli.looking import serve_page
from daemon.core.files import written_into
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record
from daemon.ledger.records import open_reader
from daemon.service.start import run as run_daemon
from daemon.terminal.display import console, print_outcomes, printable
from daemon.terminal.options import read_config
from daemon.terminal.progress import Progress
from stages.contract.binning import text_of
from stages.contract.processes import environment, python
from stages.scenes.generator import write_samples
from stages.scenes.photographs import find_photographs
from stages.scenes.truth import TRUTH

SEED = 7
LONGEST_TEXT = 60  # characters of a cell
ROWS = 30  # of the table

CONFIG = """\
# Made by `visiond demo`. Every key and its meaning: docs/configuration.md.

[[inbox]]
path = "inbox"
settle_seconds = 0.5

[output]
bins = "link"

[models]
pack = "mini"

[log]
level = "info"
"""


def run_demo(folder: Path, count: int, *, models: str, keep: bool) -> None:
    """Fill `folder`/inbox, process it once, print the table. Images with a result are not processed again.
    models: a set of models to set up first. keep: then serve the page until Ctrl-C."""
    from daemon.config.variables import is_setting

    for name in [*filter(is_setting, os.environ)]:  # they are for another daemon
        del os.environ[name]
    folder = folder.absolute()  # so that the printed commands work in any folder
    inbox = folder / "inbox"
    config_file = folder / "daemon.toml"
    with written_into(folder):
        inbox.mkdir(parents=True, exist_ok=True)
        if not config_file.exists():
            config_file.write_text(CONFIG)
        new = drop_images(folder, count)
    if models:
        set_up_models(models, config_file)
    config = read_config(config_file)
    quiet = config.log.model_copy(update={"level": "warning"})  # nothing between the lines of the table
    closed = config.http.model_copy(update={"listen": ""})  # another daemon may use the port
    config = config.model_copy(update={"log": quiet, "http": closed})
    console.print(f"{quantity(new, 'new image')} in {inbox}; processing those without a result.")
    with Progress("images") as progress:
        outcomes = run_daemon(config, once=True, show=progress.show)
    with open_reader(config) as reader:
        records = list(reader.newest(JobStatus.DONE, ROWS))
    print_records(records)
    example = inbox / (os.fsdecode(records[0].path) if records else "IMAGE")
    console.print()
    print_outcomes(outcomes, progress, config)
    console.print(
        f"Images by bin: {config.output.bins_folder}\n"
        f"Try next:  {printable(command('setup'))}     models that know real images\n"
        f"           {printable(command('show', example))}\n"
        f"           {printable(command('export', folder / 'results.csv'))}\n"
        f"           {printable(command('run'))}      then drop images into {inbox}\n"
        f"           {printable(command('page'))}     and look at them at http://{config.page.listen}"
    )
    if keep:
        serve_page(config, anywhere=True)


def set_up_models(name: str, config_file: Path) -> None:
    """In a process of its own, as this one becomes a daemon, which never imports torch. Raises Exit if it fails."""
    words = python("-m", "daemon", "setup", name, "--yes", "--config", str(config_file))
    if status := subprocess.run(words, env=environment(), check=False).returncode:
        raise typer.Exit(status)


def drop_images(folder: Path, count: int) -> int:
    """Put synthetic scenes and photographs of installed packages into the inbox, each by rename.
    Returns how many are new."""
    samples = folder / "samples"
    if not (samples / TRUTH).exists():
        write_samples(samples, count, SEED)
    photographs = find_photographs()[:2]
    images = [path for path in sorted(samples.iterdir()) if path.name != TRUTH]
    missing = [source for source in (*images, *photographs) if not (folder / "inbox" / source.name).exists()]
    for source in missing:
        partial = folder / "inbox" / f".{source.name}.part"
        shutil.copyfile(source, partial)
        partial.rename(folder / "inbox" / source.name)
    return len(missing)


def print_records(records: list[Record]) -> None:
    """One row per image: file, bin, caption, text, objects."""
    title = f"Results of the newest {ROWS} images" if len(records) == ROWS else "Results"
    table = Table("file", "bin", "caption", "text", "objects", title=title, title_justify="left")
    for record in sorted(records, key=lambda record: record.path):
        document: dict[str, Any] = msgspec.json.decode(record.sidecar)
        labels = Counter(found["label"] for found in document["objects"]["detections"])
        cells = (
            record.path.decode(errors="replace"),
            record.bin,
            document["caption"]["text"],
            " / ".join(text_of(document["ocr"]).splitlines()),
            ", ".join(f"{number} {label}" if number > 1 else label for label, number in labels.items()),
        )
        table.add_row(*(printable(shorten(cell)) for cell in cells))
    console.print(table)


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
