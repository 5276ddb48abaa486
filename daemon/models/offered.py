"""The models that can be downloaded, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.config.loading import Config
from daemon.core.hints import command
from daemon.models.sizes import find_sizes
from daemon.terminal.display import print_json, print_table
from stages.weights import catalog, names
from stages.weights.measured import GPU, RATES
from stages.weights.sets import SETS, choose_models, sets_of

if TYPE_CHECKING:
    from stages.weights.catalog import PublishedModel


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
        count_parameters(entry),
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


def count_parameters(entry: PublishedModel) -> str:
    """ "3.2 M"; "-" if their number is not known."""
    return "-" if entry.parameters is None else f"{entry.parameters / 1e6:g} M"
