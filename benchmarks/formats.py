"""Exports images of a daemon with fake stages in every format, reads each export back with the library of the programs that it
is for, and compares every row with the ledger; and the same for each sink that has one of these formats.

    python -m benchmarks.formats --images 10000
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from pathlib import Path

from benchmarks.harness import FAKES, TEMPORARY, fake_daemon, make_files, read_options, run_fakes, work_folder
from daemon.config.loading import Config
from daemon.config.output import FOLDER_SINKS
from daemon.exports.answered import Answered
from daemon.exports.choice import ExportChoice
from daemon.exports.columns import ExportColumns
from daemon.exports.datasets import name_images
from daemon.exports.export import WITH_COLUMNS, export_records
from daemon.ledger.records import Reader
from tests.daemon.exports.comparing import compare
from tests.daemon.exports.reading import READERS

STAGES = ["ocr", "yolo", "clip", "blip", "blip_long", "classifier_safety"]
MORE = "".join(f'[stages.{name}]\nbackend = "fake"\n' for name in STAGES[4:])


def main() -> None:
    options = read_options(__doc__, images=10_000, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        make_files(folder / "inbox", options.images, seed=1)
        sinks = f"[output]\nsinks = {sorted(FOLDER_SINKS)}\n[pipeline]\nstages = {STAGES}\n"
        run_fakes(folder, sinks + FAKES + MORE)
        config = fake_daemon(folder, settings=sinks + FAKES + MORE).config
        with contextlib.closing(Reader(config.state.path / "ledger.sqlite")) as reader:
            images = [*name_images(reader.finished(), {}, [])]
            print(
                "| format | read by | images | differences | seconds to export, to read |\n|---|---|---|---|---|"
            )
            for format in READERS:
                judge(format, images, reader, config, folder)


def judge(format: str, images: list[Answered], reader: Reader, config: Config, folder: Path) -> None:
    """Prints a line for an export, and one for a sink."""
    target, started = folder / f"all.{format}", time.monotonic()
    columns = ExportColumns(config.stage_names, models=format in WITH_COLUMNS)
    export_records(reader, target, format, ExportChoice(), columns, lambda done, total: None)
    say(format, target, images, time.monotonic() - started)
    if format in FOLDER_SINKS:
        results = config.output.folder_of(format)
        if format == "label-studio":  # the sink writes single tasks only
            shutil.copy(config.output.labeling_file, results / "config.xml")
            (results / "tasks.json").write_text("[]")
        whole = format in ("lance", "yolo", "label-studio")
        say(format, results if whole else results / config.inbox[0].name, images)


def say(format: str, target: Path, images: list[Answered], seconds: float | None = None) -> None:
    """seconds: that an export took."""
    started = time.monotonic()
    sink_name = name_in_sink if format == "yolo" and seconds is None else None
    found = compare(format, target, images, Path(images[0].location).parent, sink_name)
    took = f"{time.monotonic() - started:.1f}"
    title, before = (f"{format}, sink", "") if seconds is None else (format, f"{seconds:.1f}, ")
    reader = f"{READERS[format].library} {found.version}"
    print(
        f"| {title} | {reader} | {found.images:,} | {len(found.differences):,} | {before}{took} |", flush=True
    )
    print(*found.differences[:3], sep="\n", end="")


def name_in_sink(image: Answered) -> str:
    """Of an inbox without a name."""
    mark = hashlib.sha256(image.record.path).hexdigest()[:16]
    return f"{mark[:2]}/{image.own_name('.jpg', mark).name}"


if __name__ == "__main__":
    main()
