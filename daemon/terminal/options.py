"""Options that several commands share, and how the commands read the configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daemon.core.hints import DEFAULT_CONFIG, VARIABLE, command, keep_config, quantity

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.core.errors import ConfigError


IMAGE_HELP = "Path, path within the inbox, file name, or number as `visiond list` prints it."


def flag(names: str, help: str) -> Any:
    """An option without a value; names: such as "--yes -y". Typer would print its type, <bool>."""
    return typer.Option(*names.split(), metavar="", help=help)


def option(form: str, help: str, *, panel: str | None = None, **limits: Any) -> Any:
    """An option with a value. form: as people type it, such as "--limit -n N". limits: as of typer.Option."""
    *names, metavar = form.split()
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **limits)


ConfigOption = Annotated[
    Path | None,
    option(
        "--config -c FILE",
        "Configuration file. Default: daemon.toml in the current folder, if it exists.",
        envvar=VARIABLE,
    ),
]
ForceOption = Annotated[
    bool, flag("--force", "Replace FILE if it is empty or looks like one that this command made.")
]
LEAST_NEAR, MOST_NEAR = 0.5, 0.999  # equal embeddings in half precision may have a cosine below 1
NEAR = {"clip": 0.95, "hash": 0.8}  # by stage; hashes with at most 6 of 64 bits that differ
JsonOption = Annotated[bool, flag("--json", "Print JSON.")]
WandbOption = Annotated[bool, flag("--wandb", "Also send the figures to Weights & Biases.")]

# Of `visiond export`
Format = Literal[
    "csv", "jsonl", "parquet", "lance", "coco", "yolo", "label-studio", "cvat", "huggingface", "webdataset", "captions", "hocr",
    "alto", "xmp", "xmp-adobe",
]  # fmt: skip
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="Default: taken from the suffix of FILE; csv for standard output."),
]

ModelsOption = Annotated[
    bool,
    flag(
        "--models",
        "A column for each stage with the fingerprint of its model; beside CSV a second file, NAME.models.csv, says what "
        "each model is. Parquet says it in its metadata, Lance in visiond.json.",
    ),
]
Float16Option = Annotated[
    bool, flag("--float16", "Embeddings of Parquet and Lance in half precision, as the ledger has them.")
]
BomOption = Annotated[
    bool, flag("--bom", "Begin CSV with a byte order mark, without which Excel misreads letters.")
]
WhereOption = Annotated[
    list[str] | None,
    option(
        "--where CONDITION",
        'Only images for which this condition of SQL on the columns is true, for example "object_count > 2". Several '
        "must all be true.",
    ),
]
SampleOption = Annotated[
    int | None, option("--sample N", "Only N images, evenly at random.", min=1, show_default=False)
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of --sample: another number, other images.")]
BinOption = Annotated[
    list[str] | None, option("--bin BIN", "Only images of this bin. Several: of any of them.")
]
RatioOption = Annotated[
    str,
    option(
        "--ratio SHARES",
        "Share of each bin, for example A=0.4,B=0.4,C=0.2. Exports as many images as these shares allow.",
    ),
]
UniqueOption = Annotated[
    bool,
    flag(
        "--unique",
        "Of files with equal bytes only the oldest; with --near, of near-duplicates only the best.",
    ),
]
NearOption = Annotated[
    str,
    option(
        "--near NEARNESS",
        "Two columns: the best of the chosen images that each one is so near to (0.95 or hash:0.8, for example), and how "
        "near; see `visiond duplicates`.",
    ),
]
LabelsOption = Annotated[
    bool,
    flag(
        "--labels",
        "What people say too (`visiond labels`): a column or a key labels; in data sets in the place of the answers.",
    ),
]
OrderOption = Annotated[
    str,
    option(
        "--order ORDER",
        "disagreement: what a person should look at first comes first; also disagreement:labels:yolo and the like, see "
        "`visiond search`. Images in which nothing disagrees are left out.",
    ),
]
LimitOption = Annotated[
    int | None, option("--limit -n N", "With --order: only the first N.", min=1, show_default=False)
]


def find_config(path: Path | None) -> Path | None:
    """The file to read; None if there is none, so that every key has its default."""
    return path or (DEFAULT_CONFIG if os.path.lexists(DEFAULT_CONFIG) else None)


def read_config(path: Path | None, *, needs_stages: bool = True, needs_file: bool = False) -> Config:
    """needs_stages: without, a stage whose plug-in is missing is only a warning. needs_file: the command reads the
    configuration again, or writes to it."""
    from daemon.config.loading import load
    from daemon.config.values import descriptor_of
    from daemon.core.errors import ConfigError

    if path and needs_file and descriptor_of(path) is not None:
        why = "can be read only once, and this command reads its configuration again or changes it"
        raise ConfigError([f"{path} {why}. Save the configuration as a file, and name that with --config."])
    keep_config(path)
    return load(find_config(path), warn=None if needs_stages else _warn)


def read_changes(model: str, changes: Sequence[str]) -> dict[str, str]:
    """Settings of a stage by their keys, from --model and --set. Raises WrongArgument."""
    from daemon.core.errors import WrongArgument

    named = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not key or not equals:
            raise WrongArgument(
                f"--set {key} has no value; write --set KEY=VALUE, for example --set dtype=float32."
            )
        named[key.strip()] = value.strip()
    if model:  # a path is seen from here, and not from the folder of the configuration
        named["model"] = os.path.abspath(model) if "/" in model and os.path.exists(model) else model
    if not named:
        raise WrongArgument("Name what is new: --model MODEL, or --set KEY=VALUE.")
    return named


def read_changed(path: Path | None, stage: str, changes: Mapping[str, str]) -> Config:
    """The configuration as it would be with other settings of a stage. changes: values, by keys such as options.conf,
    as variables of the environment would have them. Raises ConfigError, WrongArgument."""
    from daemon.config.loading import load
    from daemon.config.variables import NESTING, PREFIX
    from daemon.core.errors import ConfigError, WrongArgument

    stages = read_config(path, needs_file=True).stage_names
    if stage not in stages:
        raise WrongArgument(f"{stage} is not among the stages of [pipeline]: {', '.join(stages)}.")
    table = f"{PREFIX}STAGES{NESTING}{stage.upper()}{NESTING}"
    names = {f"{table}{key.upper().replace('.', NESTING)}": value for key, value in changes.items()}
    try:
        return load(find_config(path), environ={**os.environ, **names})
    except ConfigError as error:
        plain = [
            re.sub(rf"{table}(\w+)", lambda found: found[1].lower().replace(NESTING, "."), problem)
            for problem in error.problems
        ]
        raise ConfigError(plain) from None


def check_trackers(names: Sequence[str]) -> None:
    """names: of libraries, and of the options that need them. Raises MissingLibrary."""
    from daemon.core.errors import MissingLibrary

    for name in names:
        if find_spec(name) is None:
            raise MissingLibrary(f"--{name} needs {name}: pip install {name}")


def read_roughly(path: Path | None) -> tuple[Config, ConfigError | None]:
    """The configuration without its parts that have a problem, and that problem: enough to find the daemon and its
    ledger. Raises ConfigError if it does not even say where these are."""
    from daemon.config.salvage import load_rest
    from daemon.core.errors import ConfigError

    try:
        return read_config(path, needs_stages=False), None
    except ConfigError as error:
        found = find_config(path)
        if found is None or (rest := load_rest(found)) is None:
            raise
        return rest, error


def read_config_to_look(path: Path | None) -> Config:
    """As read_config, for commands that only look. A problem of the configuration is a line on stderr: a daemon
    that runs goes on with the configuration that it had."""
    from daemon.terminal.display import print_warning

    config, problem = read_roughly(path)
    if problem:
        lines = str(problem).splitlines()
        more = f" (and {quantity(len(lines) - 1, 'other problem')})" if lines[1:] else ""
        rest = f"This command leaves that part out; `{command('check')}` lists all problems."
        first = f"{lines[0].rstrip('.')}{more}"
        print_warning(f"Warning: {first}{'' if first.endswith('?') else '.'} {rest}")
    return config


def _warn(sentence: str) -> None:
    from daemon.terminal.display import print_warning

    until_then = "Until then, commands that need it are refused, such as `run` and `redo`."
    print_warning(f"Warning: {sentence} {until_then}")


def parse_near(text: str) -> tuple[str, float]:
    """The stage whose results are compared, and the least cosine. text: 0.95, hash:0.8 or hash. Raises typer.BadParameter."""
    name, _, number = text.rpartition(":") if text not in NEAR else (text, "", str(NEAR[text]))
    try:
        stage, near = name or "clip", float(number)
        if stage in NEAR and LEAST_NEAR <= near <= MOST_NEAR:
            return stage, near
    except ValueError:
        pass
    raise typer.BadParameter(
        f"write a number from {LEAST_NEAR} to {MOST_NEAR}, such as 0.95; or hash, or hash:0.9, to compare hashes.",
        param_hint="--near",
    )
