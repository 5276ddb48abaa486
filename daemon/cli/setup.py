"""`visiond setup`: in one command from the demonstration pack to models that know real images."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.errors import ConfigError, ModelsUnusable, NothingFound, NotWritable, WrongArgument
from daemon.core.hints import DEFAULT_CONFIG, command, quantity
from daemon.terminal.display import console, print_finding, print_table, printable
from daemon.terminal.options import ConfigOption, find_config, flag, read_config
from daemon.terminal.progress import LATE_SECONDS, Progress

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.config.models import StageSection
    from daemon.measure.edit import Keys
    from stages.weights.pulling import Part

HEADER = "# Made by `visiond setup`. Every key and its meaning: docs/configuration.md.\n"
PICKLES = (".bin", ".pt")  # which are on the disk twice while they are converted


def setup(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[SET]", help="fast, balanced or best. Default: balanced.", show_default=False
        ),
    ] = "balanced",
    permissive: Annotated[
        bool, flag("--permissive", help="Only models under the licenses Apache, MIT and BSD.")
    ] = False,
    allow_pickle: Annotated[
        bool,
        flag(
            "--allow-pickle",
            help="Read pickled weights of models that have no others, as `models pull` does.",
        ),
    ] = False,
    quick: Annotated[
        bool, flag("--quick", help="Check only files and folders, as `check --quick` does.")
    ] = False,
    yes: Annotated[bool, flag("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = None,
) -> None:
    """Download models that know real images, use them, and check that they work.

    A set has one model for each stage; docs/models.md lists the three sets.
    Shows names, licenses and sizes and asks, before it downloads the models,
    writes their names into daemon.toml and checks them. Comments and other
    settings stay. After an interruption the same command goes on.

    Examples:
      visiond setup
      visiond setup fast --permissive --allow-pickle
      visiond setup best --yes
    """
    from daemon.cli.recovery import redo
    from daemon.terminal import control

    if not use_set(name, config, permissive=permissive, allow_pickle=allow_pickle, quick=quick, yes=yes):
        raise typer.Exit(os.EX_CONFIG)
    settings = read_config(config)
    running = control.find_snapshot(settings) is not None
    if running:
        console.print(f"A daemon is running: `{printable(command('reload'))}` gives it these models.")
    else:
        console.print(f"`{printable(command('run'))}` works with these models from now on.")
    if not (stale := count_stale(settings)):
        return
    have = f"{quantity(stale, 'image')} {'has' if stale == 1 else 'have'} results of other models or settings"
    console.print(
        f"{have}; `{printable(command('redo', '--stale'))}` processes {'it' if stale == 1 else 'them'} again."
    )
    if not yes and not running and sys.stdin.isatty() and typer.confirm("Do that now?", default=True):
        redo(None, every=False, stale=True, config=config)


def use_set(
    name: str,
    config: Path | None,
    *,
    permissive: bool = False,
    allow_pickle: bool = False,
    quick: bool = False,
    yes: bool = False,
) -> bool:
    """Download the models of a set, write them into daemon.toml, and check them. Returns whether the check found no error.
    Raises WrongArgument, ModelsUnusable, NotWritable, ConfigError; daemon.toml is then as it was."""
    from daemon.config.values import read_text
    from daemon.measure.edit import set_keys

    settings, file = read_config(config), (find_config(config) or DEFAULT_CONFIG).absolute()
    models = choose_models(settings, name, permissive=permissive)
    before = read_text(file) if file.exists() else ""
    try:
        after = set_keys(before or HEADER, list_keys(settings, models))
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem}" for problem in error.problems]) from None
    try:
        missing = find_missing(settings, models.values(), allow_pickle=allow_pickle)
        if missing or before != after:
            show_plan(settings, models, missing)
            check_room(settings, file, missing)
            if not yes:
                ask(f"Set this up in {file}?")
            pull(settings, missing, allow_pickle=allow_pickle)
    except (ModelsUnusable, NotWritable) as error:
        raise type(error)(
            f"{error}\n{file} is as it was; models are kept in {settings.models.folder}."
        ) from error
    print(write(settings, file, before, after))
    return check(read_config(config), file, quick=quick)


def choose_models(settings: Config, name: str, *, permissive: bool) -> dict[str, str]:
    """The model of each stage that runs here. A model of OCR that is of no set stays: it is for another script.
    Raises WrongArgument."""
    from stages.registry.registry import UnknownName
    from stages.weights import sets

    try:
        chosen = sets.choose_models(name, permissive=permissive)
    except UnknownName as error:
        raise WrongArgument(str(error)) from error
    own = not sets.is_of_a_set(section_of(settings, "ocr").model)
    return {
        stage: model
        for stage, model in chosen.items()
        if stage in settings.stage_names and not (stage == "ocr" and own)
    }


def section_of(settings: Config, stage: str) -> StageSection:
    section: StageSection = getattr(settings.stages, stage)
    return section


def list_keys(settings: Config, models: Mapping[str, str]) -> Keys:
    """The keys of daemon.toml to change: models, and for their images the tags of the standard pack, as those of the mini
    pack do not fit. A model decides its backend."""
    import tomlkit

    from stages.weights.hub import SCENES

    keys: dict[tuple[str, ...], object] = {}
    for stage, model in models.items():
        section = section_of(settings, stage)
        if section.model != model:
            keys["stages", stage, "model"] = model
        if section.backend:
            keys["stages", stage, "backend"] = ""
    if (
        "clip" in models
        and settings.models.pack == "mini"
        and "labels" not in section_of(settings, "clip").options
    ):
        keys["stages", "clip", "options", "labels"] = tomlkit.item(list(SCENES)).multiline(True)
    return keys


def find_missing(settings: Config, models: Iterable[str], *, allow_pickle: bool) -> dict[str, list[Part]]:
    """What to download for each model that is not here. Asks the hub only for these. Raises ModelsUnusable."""
    from daemon.layout.layout import pack_errors
    from stages.weights import names, pulling
    from stages.weights.hub import HuggingFaceHub

    with pack_errors():
        return {
            model: pulling.plan_parts(
                HuggingFaceHub(), names.read_reference(model), allow_pickle=allow_pickle
            )
            for model in models
            if model and not names.find_pulled(model, settings.models.folder)
        }


def show_plan(settings: Config, models: Mapping[str, str], missing: Mapping[str, list[Part]]) -> None:
    """Print the models with licenses and sizes, whether the GPUs have memory for them, and rates that were measured."""
    from daemon.cli.packs import describe_rate
    from daemon.measure.explain import compare
    from daemon.system.gpus import list_gpus
    from stages.weights.catalog import CATALOG
    from stages.weights.hub import SOURCES
    from stages.weights.measured import GPU
    from stages.weights.sets import license_of

    print_table(
        ("stage", "model", "license", "download", f"images/s alone, {GPU}"),
        (
            (
                stage,
                model or "included",
                license_of(model),
                describe_size(missing[model]) if model in missing else "-",
                describe_rate(CATALOG[model])[0] if model else "-",
            )
            for stage, model in models.items()
        ),
    )
    console.print(printable(f"Placement: {describe_placement(settings, models, missing)}."))
    if {CATALOG[model].repository for model in models.values() if model} == {*SOURCES.values()}:
        for sentence in compare(list_gpus()):
            console.print(printable(sentence))


def describe_size(parts: Iterable[Part]) -> str:
    sizes = [part.size_bytes for part in parts]
    return "size not known" if None in sizes else describe_bytes(sum(filter(None, sizes)))


def describe_bytes(size: int) -> str:
    return f"{-(-size // (1 << 20)):,} MiB"


def describe_placement(settings: Config, models: Mapping[str, str], missing: Mapping[str, list[Part]]) -> str:
    """Where the stages will run, and why: whether each GPU has memory for all of them. Raises ConfigError."""
    from daemon.layout.layout import used_gpus
    from daemon.placement.devices import select_devices
    from daemon.placement.placement import choose_batches, plan
    from daemon.system.gpus import list_gpus
    from daemon.system.host import Host
    from stages.contract.manifest import list_files
    from stages.weights.names import find_pulled

    gpus = list_gpus()
    selected = select_devices(settings, gpus)
    weights = dict.fromkeys(settings.stage_names, 0)
    for stage, model in models.items():
        if model in missing:
            weights[stage] = sum(part.size_bytes or 0 for part in missing[model])
        elif folder := find_pulled(model, settings.models.folder):
            weights[stage] = sum(file.stat().st_size for file in list_files(folder))
    batches = choose_batches(used_gpus(selected, gpus))
    return plan(selected, gpus, weights, Host.here(), batches).why


def check_room(settings: Config, file: Path, missing: Mapping[str, list[Part]]) -> None:
    """Raises NotWritable, before gigabytes are downloaded and not after it."""
    from daemon.monitoring.disks import find_existing

    if not os.access(file.parent, os.W_OK):
        raise NotWritable(f"{file.parent} is not writable. Run this as a user who may change {file}.")
    if not missing:
        return
    folder = settings.models.folder
    begun = sum(path.stat().st_size for path in folder.glob(".*.partial/**/*") if path.is_file())
    free = shutil.disk_usage(find_existing(folder)).free + begun
    sizes = {name: size for parts in missing.values() for part in parts for name, size in needed(part)}
    need = sum(sizes.values())
    console.print(
        printable(
            f"Disk: the models need {describe_bytes(need)}; {describe_bytes(free)} are free for {folder}."
        )
    )
    if need > free:
        raise NotWritable(
            f"{folder} has no room for these models: {describe_bytes(need - free)} are missing. Free them, or name a folder "
            "of another disk as `folder` under [models]."
        )


def needed(part: Part) -> Iterable[tuple[str, int]]:
    """By file, the bytes on the disk while it is pulled."""
    for name in part.order.files:
        twice = 2 if name.endswith(PICKLES) else 1
        yield f"{part.repository}/{name}", part.listing.sizes.get(name, 0) * twice


def ask(question: str) -> None:
    """Raises WrongArgument if nobody can answer, and Abort if the answer is no."""
    if not sys.stdin.isatty():
        raise WrongArgument("There is no terminal to ask on. Add --yes to go on without a question.")
    typer.confirm(question, default=True, abort=True)


def pull(settings: Config, models: Collection[str], *, allow_pickle: bool) -> None:
    from daemon.cli.packs import pull_named
    from daemon.ledger.files import written_into
    from daemon.system.ownership import hand_over

    folder = settings.models.folder
    if models and not folder.exists():
        with written_into(folder):
            folder.mkdir(parents=True)
            hand_over(folder)  # root pulls for the service, whose account may pull others later
    pull_named(settings, list(models), allow_pickle=allow_pickle, explain=False)


def write(settings: Config, file: Path, before: str, after: str) -> str:
    """Change daemon.toml, all at once. Returns a sentence about it. Raises NotWritable."""
    from daemon.config.state import LEDGER
    from daemon.ledger.files import written_whole
    from daemon.measure.edit import replace_file

    if before == after:
        return f"The models are here, and {file} names them."
    ledger = settings.state.path / LEDGER
    if before:
        return f"{file} is changed; the old one is {replace_file(file, after, ledger, 'setup')}."
    with written_whole(file, ledger, force=True) as partial:
        partial.write_text(after)
    return f"{file} is made."


def check(settings: Config, file: Path, *, quick: bool) -> bool:
    """As `visiond check`. Beside a daemon no stage is built, as it has the GPU's memory."""
    from daemon.cli.check import examine
    from daemon.terminal import control

    grades = set()
    for finding in examine(settings, file, quick=quick or control.find_snapshot(settings) is not None):
        print_finding(finding.grade, finding.text)
        grades.add(finding.grade)
    return "error" not in grades


def count_stale(settings: Config) -> int:
    """The images whose results would differ now."""
    from daemon.ledger.records import open_reader
    from daemon.maintenance.redo import choose_stale

    with contextlib.suppress(NothingFound), open_reader(settings) as reader:
        with Progress("images", after=LATE_SECONDS) as progress:
            progress.begin("images", sum(reader.bin_counts().values()))
            return len(choose_stale(reader, settings, progress.track).ids)
    return 0
