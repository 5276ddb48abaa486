"""The models that can be downloaded, and what is known of them. No size is written down anywhere, as a repository may change:
those that are here are looked up on the disk, others are asked of the model hub, if it may be asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from daemon.config.loading import Config
from daemon.core.hints import command, quantity
from daemon.terminal.display import errors, print_json, print_table, printable
from daemon.terminal.progress import LATE_SECONDS, Progress
from stages.contract.manifest import HubUnreachable, PackError, list_files
from stages.weights import catalog, names, pulling
from stages.weights.hub import Hub, HuggingFaceHub
from stages.weights.measured import GPU, RATES
from stages.weights.sets import SETS, choose_models, sets_of

if TYPE_CHECKING:
    from stages.weights.catalog import PublishedModel

AT_ONCE = 8  # models that the hub is asked about


def choose_entries(stages: Sequence[str] | None) -> list[PublishedModel]:
    """The models that this installation can run, for these stages or all."""
    return [entry for entry in catalog.offered().values() if stages is None or entry.stage in stages]


def find_folder(entry: PublishedModel, config: Config) -> Path | None:
    """Where the model is, if it is here. A folder that was copied may have no manifest."""
    return names.find_pulled(entry.name, config.models.folder)


def print_catalog(config: Config, stages: Sequence[str] | None, *, ask: bool) -> list[str]:
    """Print a table of the models that can be pulled. ask: the hub how large they are. Returns the problems."""
    entries = choose_entries(stages)
    sizes, problem = find_sizes(config.models.folder, entries, ask=ask)
    columns = ("model", "set", "stage", "license", "parameters", "published quality")
    rates = (f"images/s, {GPU}", "GPU GB", "MiB", "here")
    rows = (describe_entry(entry, config, sizes) for entry in entries)
    print_table([*columns, *rates], rows)
    print()
    if not ask and len(sizes) < len(entries):
        print(
            f"MiB is known of what is here; `{command('models', 'list', '--sizes')}` asks the model hub for the rest."
        )
    described = ", ".join(describe_set(name, sizes) for name in SETS)
    print(f"To take all models of a set ({described}): {command('setup', 'balanced')}")
    return [problem] if problem else []


def describe_entry(entry: PublishedModel, config: Config, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """A row of the table."""
    return (
        entry.name,
        ", ".join(sets_of(entry.name)) or "-",
        entry.stage,
        entry.license or "-",
        "-" if entry.parameters is None else f"{entry.parameters / 1e6:g} M",
        entry.quality or "-",
        *describe_rate(entry),
        f"{to_mebibytes(sizes[entry.name]):,}" if entry.name in sizes else "-",
        "yes" if find_folder(entry, config) else "-",
    )


def describe_set(name: str, sizes: Mapping[str, int]) -> str:
    """Its name, and how large its models are together if that is known."""
    models = [model for model in choose_models(name, permissive=False).values() if model]
    if not all(model in sizes for model in models):
        return name
    return f"{name}: {to_mebibytes(sum(sizes[model] for model in models)):,} MiB"


def to_mebibytes(size: int) -> int:
    """Rounded up: what is needed for them."""
    return -(-size >> 20)


def print_catalog_json(config: Config, stages: Sequence[str] | None, *, ask: bool) -> list[str]:
    """As `print_catalog`."""
    entries = choose_entries(stages)
    sizes, problem = find_sizes(config.models.folder, entries, ask=ask)
    rows = []
    for entry in entries:
        folder = find_folder(entry, config)
        measured = {GPU: RATES[entry.name]} if entry.name in RATES else {}
        rows.append(
            asdict(entry)
            | {"sets": sets_of(entry.name), "measured": measured}
            | {"bytes": sizes.get(entry.name), "here": folder is not None, "folder": str(folder or "")}
        )
    print_json(rows)
    return [problem] if problem else []


def describe_rate(entry: PublishedModel) -> tuple[str, str]:
    """The rate of a model and its GPU memory in GB; "-" if not measured."""
    if not (rate := RATES.get(entry.name)):
        return "-", "-"
    memory = f"{rate.memory_bytes / 1e9:g}"
    return f"{rate.images_per_second:,g}", memory


class Sizes(NamedTuple):
    """known: bytes by the name of the model. problem: why the hub did not say some; empty if it was not asked, or did."""

    known: dict[str, int]
    problem: str = ""


def find_sizes(folder: Path, models: Sequence[PublishedModel], *, ask: bool) -> Sizes:
    """folder: of the models that were pulled. ask: the hub about the others, which takes some seconds."""
    pulled = {model.name: names.find_pulled(model.name, folder) for model in models}
    known = {
        name: sum(file.stat().st_size for file in list_files(place))
        for name, place in pulled.items()
        if place
    }
    others = [model for model in models if model.name not in known]
    return add_asked(known, others) if ask else Sizes(known)


def add_asked(known: dict[str, int], others: Sequence[PublishedModel]) -> Sizes:
    """What is known, and the sizes of others as the hub says."""
    problems: list[PackError] = []
    hub = HuggingFaceHub(lambda sentence: errors.print(printable(sentence)))
    # One alone: if the hub cannot be reached, each of the others would wait for it too.
    first = [ask_hub(hub, model) for model in others[:1]]
    if first and isinstance(first[0], HubUnreachable):
        return Sizes(known, f"The size is not known of {quantity(len(others), 'model')}: {first[0]}")
    with ThreadPoolExecutor(AT_ONCE) as pool, Progress("models", len(others), after=LATE_SECONDS) as progress:
        answers = itertools.chain(first, pool.map(partial(ask_hub, hub), others[1:]))
        for model, size in zip(others, progress.track(answers), strict=True):
            if isinstance(size, PackError):
                problems.append(size)
            elif size is not None:
                known[model.name] = size
    if not problems:
        return Sizes(known)
    return Sizes(
        known, f"The size is not known of {quantity(len(problems), 'model')}. Of the first: {problems[0]}"
    )


def ask_hub(hub: Hub, model: PublishedModel) -> int | PackError | None:
    """What `models pull` would download; why that is not known; or None if the hub does not say it."""
    try:
        if model.file:
            return hub.describe(model.repository).sizes.get(model.file)
        parts = pulling.plan_parts(hub, names.read_reference(model.name), allow_pickle=True)
    except PackError as error:
        return error
    sizes = [part.size_bytes for part in parts]
    return None if None in sizes else sum(filter(None, sizes))
