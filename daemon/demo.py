"""`visiond demo`: sample images and two photographs through the real daemon, and a table of what came out."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from daemon.config import load
from daemon.control import open_reader
from daemon.log import escape, set_up
from daemon.progress import Progress
from daemon.records import Record
from daemon.service import run_service
from stages.training import scenes

SEED = 7
LONGEST_TEXT = 60  # characters of a cell

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


def run_demo(folder: Path, count: int, console: Console) -> None:
    """Fill `folder`/inbox, run the daemon over it once, print the table. What was done before is not done again."""
    inbox = folder / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    config_file = folder / "daemon.toml"
    if not config_file.exists():
        config_file.write_text(CONFIG)
    drop_images(folder, count)
    config = load(config_file)
    set_up("warning")  # the table is to be read
    config = config.model_copy(update={"http": config.http.model_copy(update={"listen": ""})})  # another daemon may run
    console.print(f"{sum(1 for _ in inbox.iterdir())} images lie in {inbox}; the daemon loads its models and takes them up.")
    started = time.monotonic()
    command = os.path.relpath(sys.argv[0]) if shutil.which("visiond") is None else "visiond"
    with Progress("images") as progress:
        anyio.run(lambda: run_service(config, once=True, show=progress.show), backend_options={"use_uvloop": True})
    with open_reader(config) as reader:
        records = list(reader.finished())
        failed = len(reader.failed_ids())
    print_records(records, console)
    console.print(
        f"\n{len(records)} images in {time.monotonic() - started:.1f} s with the models' loading"
        + (f", {failed} failed" if failed else "")
        + f".\nSidecars are in {config.output.results}, images by bin in {config.output.bins_folder}.\n"
        f"Now try:  {command} show {inbox / 'bus.jpg'} -c {config_file}\n"
        f"          {command} export -c {config_file} {folder / 'results.csv'}\n"
        f"          {command} run -c {config_file}      and drop images into {inbox}"
    )


def drop_images(folder: Path, count: int) -> None:
    """Synthetic scenes and ultralytics' two photographs into the inbox, each arriving whole by rename."""
    samples = folder / "samples"
    if not (samples / "truth.jsonl").exists():
        scenes.write_samples(samples, count, SEED)
    spec = importlib.util.find_spec("ultralytics")
    assets = [Path(root) / "assets" for root in (spec.submodule_search_locations or [])] if spec else []
    photographs = [asset / name for asset in assets for name in ("bus.jpg", "zidane.jpg")]
    images = [path for path in samples.iterdir() if path.suffix != ".jsonl"]
    for source in (*sorted(images), *photographs):
        target = folder / "inbox" / source.name
        if not target.exists():
            partial = target.with_name(f".{source.name}.part")
            shutil.copyfile(source, partial)
            partial.rename(target)


def print_records(records: list[Record], console: Console) -> None:
    """A row for each image: file, bin, caption, text, objects; with the notice of the models that spoke."""
    table = Table("file", "bin", "caption", "text", "objects", title="What came out", title_justify="left")
    notices: set[str] = set()
    for record in sorted(records, key=lambda record: record.path):
        document: dict[str, Any] = msgspec.json.decode(record.encode())
        notices |= {document["notice"]} if "notice" in document else set()
        labels = Counter(found["label"] for found in document["objects"]["detections"])
        cells = (
            record.path.decode(errors="replace"),
            record.bin,
            document["caption"]["text"],
            " / ".join(line["text"] for line in document["ocr"]["lines"]),
            ", ".join(f"{number} {label}" if number > 1 else label for label, number in labels.items()),
        )
        table.add_row(*(escape_markup(shorten(escape(cell))) for cell in cells))
    console.print(table)
    for notice in sorted(notices):
        console.print(f"[yellow]Note: {escape_markup(notice)}[/yellow]")


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
