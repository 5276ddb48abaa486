"""The options of `visiond train mini`. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.contract.manifest import MANIFEST, PackError

ABOUT = """\
Makes the mini pack: scenes, three trainings in parallel, scores, and the pack with its card.

On one H200 with 16 cores it takes about a quarter of an hour."""

KINDS = ("yolo", "clip", "blip")


@dataclass(frozen=True, kw_only=True)
class Options:
    """out: the pack's folder. workdir: scenes, checkpoints, logs. report: a folder for the pack as one file,
    and logs.

    seconds, epochs: limits of each training; 0 is no limit. data_seconds: when to stop making scenes.
    only: the models to train; the others are taken from the pack at `out`.
    processes: GPUs for CLIP and for BLIP. read: number of scenes for OCR and bins; None: all that are scored.
    """

    out: Path
    workdir: Path
    report: Path | None = None
    scenes: int = 240_000
    data_seconds: float = 240
    seconds: Mapping[str, float] = field(default_factory=lambda: {"yolo": 280, "clip": 280, "blip": 600})
    epochs: float = 0
    only: tuple[str, ...] = KINDS
    resume: bool = False
    score: int = 2000
    read: int | None = None
    seed: int = 1
    processes: int = 1
    workers: int = 9
    batch_sizes: Mapping[str, int] = field(default_factory=lambda: {"yolo": 256, "clip": 1024, "blip": 512})


def parse_count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return count


Number = tuple[str, Callable[[str], float], str | None]  # its name, and what it is
SCENES: tuple[Number, ...] = (
    ("scenes", parse_count, None),
    ("data-seconds", float, "stop making scenes after this time; 0: no limit"),
    ("epochs", float, "limit of each training; 0: no limit"),
)
OTHERS: tuple[Number, ...] = (
    ("score", int, "number of unseen scenes to score on; 0: do not score"),
    ("read", int, "number of these scenes for OCR and bins (default: all)"),
    ("seed", int, None),
    ("processes", parse_count, "GPUs for CLIP and for BLIP each"),
    ("workers", parse_count, "processes that read images for the detector"),
)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    defaults = Options(out=Path(), workdir=Path())
    parser = argparse.ArgumentParser(
        prog="visiond train mini",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of the pack; an existing pack is replaced"
    )
    parser.add_argument(
        "--workdir", type=Path, help="folder for scenes, checkpoints and logs (default: OUT-work)"
    )
    parser.add_argument(
        "--report", type=Path, help="folder for a report: the pack as one file, its log and its curves"
    )
    add_numbers(parser, defaults, SCENES)
    parser.add_argument(
        "--only",
        choices=KINDS,
        action="append",
        help="train only this model, and update the pack at --out; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue with the scenes and checkpoints in the workdir"
    )
    add_numbers(parser, defaults, OTHERS)
    add_limits(parser, defaults)
    given = vars(parser.parse_args(arguments))
    options = _gather(given)
    try:
        check_place(options.out)
    except PackError as error:
        parser.error(f"argument --out: {error}")
    return options


def add_numbers(parser: argparse.ArgumentParser, defaults: Options, options: Sequence[Number]) -> None:
    for name, kind, about in options:
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)


def add_limits(parser: argparse.ArgumentParser, defaults: Options) -> None:
    """Two options for each model."""
    for kind in KINDS:
        about = "time limit of its training; 0: no limit"
        parser.add_argument(f"--{kind}-seconds", type=float, default=defaults.seconds[kind], help=about)
        size = defaults.batch_sizes[kind]
        parser.add_argument(f"--{kind}-batch", type=parse_count, default=size, help="images in one step")


def _gather(given: dict[str, Any]) -> Options:
    given["seconds"] = {kind: given.pop(f"{kind}_seconds") for kind in KINDS}
    given["batch_sizes"] = {kind: given.pop(f"{kind}_batch") for kind in KINDS}
    given["only"] = tuple(given["only"] or KINDS)
    given["workdir"] = given["workdir"] or given["out"].with_name(f"{given['out'].name}-work")
    return Options(**given)


def check_place(out: Path) -> None:
    """Raises PackError if the folder contains something other than a pack."""
    empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not empty and not (out / MANIFEST).is_file():
        raise PackError(
            f"{out} is not a pack and would be replaced: name a new folder, or the folder of a pack."
        )
