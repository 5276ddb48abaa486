"""Stages of other distributions: each has an entry point in the group `visiond.stages` that names its descriptor.

[project.entry-points."visiond.stages"]
quality = "visiond_quality:QUALITY"
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

import msgspec

from stages.descriptor import Backend, Descriptor

GROUP = "visiond.stages"
NAME = re.compile(r"[a-z][a-z0-9]{0,40}")
# What stands in a sidecar, in a rule's record or in the configuration beside the stages' results, and how the columns of an
# export begin.
TAKEN = frozenset(
    (
        *("schema", "id", "source", "notice", "bin", "timings", "models", "status", "reason", "detail", "attempts"),
        *("finished", "path", "width", "height", "objects", "caption", "fake", "copy", "decoding"),
        *("text", "object", "unique", "spatial", "clip", "tag", "embedding", "detections"),
    )
)


class Unfit(Exception):
    """A descriptor that cannot be used, for the reason given."""


class Gathered(NamedTuple):
    """All stages by name, in the order in which they run; the distributions of those that are not visiond's own; and a sentence
    for each that cannot be used, by the name of its entry point."""

    stages: dict[str, Descriptor]
    sources: dict[str, str]
    broken: dict[str, str]


def gather(built_in: Iterable[Descriptor]) -> Gathered:
    """What is installed here.

    Stages of other distributions come last, by name, but each behind those that it uses.
    """
    stages = {stage.name: stage for stage in built_in}
    found: dict[str, Descriptor] = {}
    sources, broken = {}, {}
    entries = sorted(entry_points(group=GROUP))
    for entry in entries:
        try:
            if twins := [describe(other) for other in entries if other.name == entry.name and other != entry]:
                raise Unfit(f"{', '.join(twins)} has a stage of that name too; uninstall one of them")
            found[entry.name] = check(load(entry), entry, stages)
            sources[entry.name] = describe(entry)
        except Unfit as error:
            broken[entry.name] = f'The stage "{entry.name}" of the plug-in {describe(entry)} cannot be used: {error}.'
    for stage in sort_by_use(found):
        stages[stage.name] = stage
    return Gathered(stages, sources, broken)


def load(entry: EntryPoint) -> object:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the command that runs
            return entry.load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises is its own fault
        raise Unfit(f"{type(error).__name__}: {error}") from error


def check(stage: object, entry: EntryPoint, stages: Mapping[str, Descriptor]) -> Descriptor:
    """Raises Unfit."""
    if not isinstance(stage, Descriptor):
        raise Unfit(f"{entry.value} is not a stages.descriptor.Descriptor")
    if stage.name != entry.name or stage.key != stage.name:
        raise Unfit(f'name "{stage.name}" and key "{stage.key}" must both be "{entry.name}", as its entry point is called')
    if not NAME.fullmatch(stage.name) or stage.name in TAKEN:
        raise Unfit("its name must be small letters and digits, and none that visiond uses itself")
    if stage.name in stages:
        raise Unfit("visiond has a stage of that name itself")
    if not isinstance(stage.backends, Mapping) or not stage.backends:
        raise Unfit("it has no backends")
    if not isinstance(stage.uses, tuple) or not all(isinstance(name, str) for name in stage.uses):
        raise Unfit("its `uses` must be a tuple of stages' names")
    for name, backend in stage.backends.items():
        if not isinstance(backend, Backend) or not is_struct(backend.options):
            raise Unfit(f'its backend "{name}" must be a Backend whose options are a msgspec.Struct')
    if not is_struct(stage.result):
        raise Unfit("its result must be a msgspec.Struct")
    try:
        msgspec.json.Decoder(stage.result)
        msgspec.inspect.type_info(stage.result)
    except Exception as error:  # as above
        raise Unfit(f"the type of its result cannot be read: {type(error).__name__}: {error}") from error
    return stage


def is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def sort_by_use(found: Mapping[str, Descriptor]) -> Iterator[Descriptor]:
    """Each behind those of them that it uses; of two that use each other, by name."""
    left = dict(sorted(found.items()))
    while left:
        ready = next((name for name, stage in left.items() if not ({*stage.uses} & left.keys()) - {name}), next(iter(left)))
        yield left.pop(ready)


def describe(entry: EntryPoint) -> str:
    """The distribution that an entry point belongs to, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
