"""`visiond setup`: in one command from the demonstration pack to models that know real images."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
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
    from daemon.models.pulls import Parts

HEADER = "# Made by `visiond setup`. Every key and its meaning: docs/configuration.md.\n"


def setup(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[SET]", help="fast, balanced or best. Default: balanced.", show_default=False
        ),
    ] = "balanced",
    permissive: Annotated[
        bool, flag("--permissive", "Only models under the licenses Apache, MIT and BSD.")
    ] = False,
    allow_pickle: Annotated[
        bool,
        flag("--allow-pickle", "Read pickled weights of models that have no others, as `models pull` does."),
    ] = False,
    quick: Annotated[bool, flag("--quick", "Check only files and folders, as `check --quick` does.")] = False,
    yes: Annotated[bool, flag("--yes -y", "Do not ask.")] = False,
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
    from daemon.server import control

    use_set(name, config, permissive=permissive, allow_pickle=allow_pickle, quick=quick, yes=yes)
    settings = read_config(config)
    running = control.find_snapshot(settings) is not None
    if running:
        console.print("A daemon is running: restart it to give it these models.")
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
    permissive: bool,
    allow_pickle: bool,
    quick: bool,
    yes: bool,
) -> None:
    """Download the models of a set, write them into daemon.toml, and check them. Raises WrongArgument, ModelsUnusable,
    NotWritable, ConfigError, also for what works only without these models; daemon.toml is then as it was."""
    from daemon.models.pulls import check_room, find_missing

    settings = read_config(config, needs_file=True)
    file = (find_config(config) or DEFAULT_CONFIG).absolute()
    models = choose_models(settings, name, permissive=permissive)
    before, after = change(file, settings, models)
    try:
        missing = find_missing(
            settings.models.folder, filter(None, models.values()), allow_pickle=allow_pickle
        )
        if missing or before != after:
            show_plan(settings, models, missing)
            check_place(file)
            check_room(settings.models.folder, missing)
            if not yes:
                ask(f"Set this up in {file}?")
            pull(settings, missing, allow_pickle=allow_pickle)
    except (ModelsUnusable, NotWritable) as error:
        state = f"{file} is as it was" if before else "No settings were written"
        folder = settings.models.folder
        kept = f"; what was downloaded is kept in {folder}" * folder.exists()
        raise type(error)(f"{error}\n{state}{kept}.") from error
    known = find_errors(settings, file if before else None, quick=True)
    before, said = write(file, config, models)
    print(said)
    if new := find_errors(read_config(config), file, quick=quick, show=True) - known:
        restore(file, before)
        raise ConfigError([f"{file} is as it was: with these models {problem}" for problem in sorted(new)])


def change(file: Path, settings: Config, models: Mapping[str, str]) -> tuple[str, str]:
    """The text of daemon.toml, or nothing, and the text with these models. Raises ConfigError."""
    from daemon.config.values import read_text
    from daemon.measure.edit import set_keys

    before = read_text(file) if file.exists() else ""
    try:
        return before, set_keys(before or HEADER, list_keys(settings, models))
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem}" for problem in error.problems]) from None


def choose_models(settings: Config, name: str, *, permissive: bool) -> dict[str, str]:
    """The model of each stage that runs here. A model of OCR that is of no set stays: it is for another script.
    Raises WrongArgument."""
    from stages.registry.registry import UnknownName
    from stages.weights import sets

    try:
        chosen = sets.choose_models(name, permissive=permissive)
    except UnknownName as error:
        raise WrongArgument(str(error)) from error
    own = not sets.sets_of(section_of(settings, "ocr").model)
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


def show_plan(settings: Config, models: Mapping[str, str], missing: Parts) -> None:
    """Print the models with licenses and sizes, whether the GPUs have memory for them, and rates that were measured."""
    from daemon.measure.explain import compare
    from daemon.models.offered import describe_rate
    from daemon.models.pulls import describe_size
    from daemon.system.gpus import list_gpus
    from stages.weights.catalog import CATALOG
    from stages.weights.measured import GPU
    from stages.weights.sets import license_of
    from stages.weights.standard import MODELS

    print_table(
        ("stage", "now", "model", "license", "download", f"images/s alone, {GPU}"),
        (
            (
                stage,
                describe_present(section_of(settings, stage)),
                model or "included",
                license_of(model),
                describe_size(missing[model]) if model in missing else "-",
                describe_rate(CATALOG[model])[0] if model else "-",
            )
            for stage, model in models.items()
        ),
    )
    console.print(printable(f"Placement: {describe_placement(settings, models, missing)}."))
    if {*filter(None, models.values())} == {*MODELS.values()}:
        for sentence in compare(list_gpus()):
            console.print(printable(sentence))


def describe_present(section: StageSection) -> str:
    """What a stage has in daemon.toml, which the set replaces."""
    return " ".join(filter(None, (section.backend, section.model))) or "-"


def describe_placement(settings: Config, models: Mapping[str, str], missing: Parts) -> str:
    """Where the stages will run, and why: whether each GPU has memory for all of them. Raises ConfigError."""
    from daemon.layout.devices import select_devices, used_gpus
    from daemon.layout.placement import choose_batches, plan
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
    batches = choose_batches(used_gpus(selected, gpus), selected.pipeline.prefer)
    return plan(selected, gpus, weights, Host.here(), batches).why


def check_place(file: Path) -> None:
    """Raises NotWritable, before gigabytes are downloaded and not after it."""
    if not os.access(file.resolve().parent, os.W_OK):
        raise NotWritable(
            f"{file.resolve().parent} is not writable. Run this as a user who may change {file}."
        )


def ask(question: str) -> None:
    """Raises WrongArgument if nobody can answer, and Abort if the answer is no."""
    if not sys.stdin.isatty():
        raise WrongArgument("There is no terminal to ask on. Add --yes to go on without a question.")
    typer.confirm(question, default=True, abort=True)


def pull(settings: Config, models: Parts, *, allow_pickle: bool) -> None:
    from daemon.core.files import written_into
    from daemon.models.pulls import pull_named
    from daemon.system.ownership import hand_over

    folder = settings.models.folder
    if models and not folder.exists():
        with written_into(folder):
            folder.mkdir(parents=True)
            hand_over(folder)  # root pulls for the service, whose account may pull others later
    try:
        pull_named(settings, list(models), allow_pickle=allow_pickle, missing=models, explain=False)
    finally:
        if os.geteuid() == 0:
            for path in sorted(folder.rglob("*")):
                hand_over(path)


def write(file: Path, config: Path | None, models: Mapping[str, str]) -> tuple[str, str]:
    """Change daemon.toml, all at once, as it is now: somebody may have changed it during the download. Returns its text
    before, or none, and a sentence. Raises NotWritable, ConfigError."""
    from daemon.config.state import LEDGER
    from daemon.core.files import written_whole
    from daemon.measure.edit import replace_file

    settings = read_config(config)
    (before, after), ledger = change(file, settings, models), settings.state.path / LEDGER
    if before == after:
        return before, f"The models are here, and {file} names them."
    if before:
        kept = replace_file(file, after, ledger, name_copy(file))
        return before, f"{file} is changed; the old one is {kept}."
    with written_whole(file, ledger, force=True) as partial:
        partial.write_text(after)
    return before, f"{file} is made."


def name_copy(file: Path) -> str:
    """For `replace_file`, which would overwrite the copy of an earlier setup."""
    names = ("setup", *(f"setup-{number}" for number in range(2, 1000)))
    file = file.resolve()
    return next(name for name in names if not file.with_name(f"{file.name}.before-{name}").exists())


def restore(file: Path, text: str) -> None:
    if text:
        file.resolve().write_text(text)
    else:
        file.unlink(missing_ok=True)


def find_errors(settings: Config, file: Path | None, *, quick: bool, show: bool = False) -> set[str]:
    """The errors of `visiond check`. Beside a daemon no stage is built: it has the GPU's memory. show: print all findings."""
    from daemon.cli.check import examine
    from daemon.server import control

    errors = set()
    for finding in examine(settings, file, quick=quick or control.find_snapshot(settings) is not None):
        if show:
            print_finding(finding)
        if finding.grade == "error":
            errors.add(finding.text)
    return errors


def count_stale(settings: Config) -> int:
    """The images whose results would differ now."""
    from daemon.ledger.records import open_reader
    from daemon.maintenance.redo import choose_stale

    with contextlib.suppress(NothingFound), open_reader(settings) as reader:
        with Progress("images", after=LATE_SECONDS) as progress:
            progress.begin("images", sum(reader.bin_counts().values()))
            return len(choose_stale(reader, settings, progress.track).ids)
    return 0
