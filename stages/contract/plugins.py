"""Loads stages of other distributions. Each has an entry point in the group `visiond.stages` that names its descriptor.

[project.entry-points."visiond.stages"]
quality = "visiond_quality:QUALITY"
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stages.contract.descriptor import Backend, Descriptor

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "visiond.stages"
NAME = re.compile(r"[a-z][a-z0-9]{0,40}")
HEAVY = {"torch"}  # importing it takes seconds
# The other names in a sidecar, in a rule's record and in the configuration, and the first words of an export's columns.
TAKEN = {
    "schema", "id", "source", "notice", "bin", "timings", "models", "status", "reason", "detail", "attempts",
    "finished", "path", "width", "height", "objects", "caption", "fake", "copy", "decoding",
    "text", "object", "unique", "spatial", "clip", "tag", "embedding", "detections",
}  # fmt: skip


class Unfit(Exception):
    """A descriptor cannot be used; the message says why."""


class Gathered(NamedTuple):
    """All stages that are installed.

    stages: by name, in the order in which they run.
    sources: the distributions of those that are not visiond's own.
    problems: what is wrong with a plug-in, by the name of its entry point; it may work in spite of it.
    """

    stages: dict[str, Descriptor]
    sources: dict[str, str]
    problems: dict[str, str]


def gather(built_in: Iterable[Descriptor], named: Iterable[Descriptor] = ()) -> Gathered:
    """All stages that are installed.

    Stages of other distributions come last, by name, but each after those that it uses.

    named: stages of visiond that run only if a configuration names them. If another distribution has a stage of this
    name, neither is used: a configuration may mean the other one, as visiond had no such stage in earlier versions.
    """
    optional = {stage.name: stage for stage in named}
    stages = {stage.name: stage for stage in built_in} | optional
    found: dict[str, Descriptor] = {}
    sources, problems = {}, {}
    entries = find_entries()
    for entry in entries:
        loaded = set(sys.modules)
        try:
            refuse_twins(entry, entries)
            found[entry.name] = check(load(entry), entry, stages)
            sources[entry.name] = describe(entry)
            if imported := HEAVY & sys.modules.keys() - loaded:
                problems[entry.name] = explain_import(entry, sorted(imported))
        except Unfit as error:
            problems[entry.name] = f"{title(entry)} cannot be used: {error}."
    for name in optional.keys() & problems.keys():
        del stages[name]
    stages |= sort_by_use(found)
    for entry in entries:
        if entry.name in found and (unknown := [n for n in found[entry.name].uses if n not in stages]):
            known = problems.get(entry.name)
            problems[entry.name] = " ".join(filter(None, (known, explain_unknown(entry, unknown, stages))))
    return Gathered(stages, sources, problems)


def refuse_twins(entry: EntryPoint, entries: Iterable[EntryPoint]) -> None:
    """Raises Unfit."""
    if twins := [describe(other) for other in entries if other.name == entry.name and other != entry]:
        raise Unfit(f"{', '.join(twins)} has a stage with this name too; uninstall one of them")


def find_entries() -> list[EntryPoint]:
    """The entry points of stages, sorted. Importing importlib.metadata slows every start, so it is imported only if a
    distribution on sys.path may have stages."""
    if not any(map(names_group, sys.path)) and not any(map(finds_distributions, sys.meta_path)):
        return []
    from importlib.metadata import entry_points

    return sorted(entry_points(group=GROUP))


def names_group(place: str) -> bool:
    """Whether a distribution in a place of sys.path may have stages. Yes for whatever is not an ordinary folder, such
    as an archive: importlib.metadata then decides."""
    try:
        if os.fspath(place).lower().endswith(".egg"):
            return True
        with os.scandir(place or os.curdir) as found:
            folders = [e.path for e in found if e.name.lower().endswith((".dist-info", ".egg-info"))]
    except FileNotFoundError:
        return False
    except Exception:  # noqa: BLE001 - such a place must not end every command
        return True
    return any(map(has_group, folders))


def has_group(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), "rb") as file:
            return GROUP.encode() in file.read()
    except OSError:
        return False


def finds_distributions(finder: object) -> bool:
    """Whether one of sys.meta_path finds distributions elsewhere than in the places of sys.path."""
    return finder is not PathFinder and hasattr(finder, "find_distributions")


def explain_import(entry: EntryPoint, imported: Iterable[str]) -> str:
    return (
        f"{title(entry)} imports {', '.join(imported)} with its descriptor, which makes every command slow: "
        "import it in the module of the stage's class instead."
    )


def explain_unknown(entry: EntryPoint, unknown: Iterable[str], stages: Iterable[str]) -> str:
    names = []
    for name in unknown:
        near = difflib.get_close_matches(name, stages, n=1, cutoff=0.5)
        names.append(f'"{name}"' + (f' (did you mean "{near[0]}"?)' if near else ""))
    return f"{title(entry)} uses stages that are not installed: {', '.join(names)}."


def title(entry: EntryPoint) -> str:
    return f'The stage "{entry.name}" of the plug-in {describe(entry)}'


def load(entry: EntryPoint) -> object:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the output of the command
            return entry.load()
    except (Exception, SystemExit) as error:  # a plug-in's module may raise anything
        raise Unfit(f"{type(error).__name__}: {error}") from error


def check(stage: object, entry: EntryPoint, stages: Mapping[str, Descriptor]) -> Descriptor:
    """Raises Unfit."""
    if not isinstance(stage, Descriptor):
        raise Unfit(f"{entry.value} is not a stages.contract.descriptor.Descriptor")
    check_name(stage, entry, stages)
    if not isinstance(stage.uses, tuple) or not all(isinstance(name, str) for name in stage.uses):
        raise Unfit("its `uses` must be a tuple of stages' names")
    check_backends(stage)
    if not is_struct(stage.result):
        raise Unfit("its result must be a msgspec.Struct")
    try:
        msgspec.json.Decoder(stage.result)
        msgspec.inspect.type_info(stage.result)
    except Exception as error:  # as above
        raise Unfit(f"the type of its result cannot be read: {type(error).__name__}: {error}") from error
    return stage


def check_backends(stage: Descriptor) -> None:
    """Raises Unfit."""
    if not isinstance(stage.backends, Mapping) or not stage.backends:
        raise Unfit("it has no backends")
    for name, backend in stage.backends.items():
        if not isinstance(backend, Backend) or not is_struct(backend.options):
            raise Unfit(f'its backend "{name}" must be a Backend whose options are a msgspec.Struct')


def check_name(stage: Descriptor, entry: EntryPoint, stages: Mapping[str, Descriptor]) -> None:
    """Raises Unfit."""
    if stage.name != entry.name or stage.key != stage.name:
        raise Unfit(
            f'name "{stage.name}" and key "{stage.key}" must both be "{entry.name}", the name of its entry point'
        )
    if not NAME.fullmatch(stage.name) or stage.name in TAKEN:
        raise Unfit("its name must be lowercase letters and digits, and not one that visiond uses itself")
    if stage.name in stages:
        raise Unfit(
            "visiond itself has a stage with this name; rename the stage of the plug-in, or uninstall the plug-in"
        )


def is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def sort_by_use(found: Mapping[str, Descriptor]) -> dict[str, Descriptor]:
    """Each after those of them that it uses; two that use each other by name."""
    left, ordered = dict(sorted(found.items())), {}
    while left:
        ready = next(
            (name for name, stage in left.items() if not ({*stage.uses} & left.keys()) - {name}),
            next(iter(left)),
        )
        ordered[ready] = left.pop(ready)
    return ordered


def describe(entry: EntryPoint) -> str:
    """The distribution of an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
