"""[stages.*.options]: checks them, and defines limits that several backends share. Imports no torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from stages.contract.base import StageSpec

Options = TypeVar("Options", bound=msgspec.Struct)

Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Side = Annotated[int, Meta(ge=32, le=4096)]
Fault = Literal["error", "transient", "raise", "oom", "lost", "segfault", "exit", "hang"]


def read_options(spec: StageSpec, kind: type[Options]) -> Options:
    """A stage's options as a struct that forbids unknown fields.
    Raises ValueError that names every wrong one, one in a line."""
    try:
        return msgspec.convert(spec.options, kind)
    except msgspec.ValidationError as error:
        where = f"stages.{spec.name}.options"
        problems = list(_explain(spec, kind, where)) or [f"{where}: {error}"]
        raise ValueError("\n".join(problems)) from error


def _explain(spec: StageSpec, kind: type[msgspec.Struct], where: str) -> Iterator[str]:
    """A sentence for each wrong option: its key, and what to write instead, as for the other keys of daemon.toml."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, value in spec.options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            known = f"{spec.backend} takes {', '.join(fields)}."
            yield f"{where}.{name}: unknown key; " + (f'did you mean "{near[0]}"?' if near else known)
        elif wanted := _refuse(fields[name], value):
            yield f"{where}.{name}: {wanted} (it is {value!r})"
    for name, field in fields.items():
        if field.required and name not in spec.options:
            taken = describe(inspect.type_info(field.type))
            yield f"{where}.{name}: this key is missing" + (f"; write {taken}" if taken else "")


def _refuse(field: msgspec.structs.FieldInfo, value: object) -> str:
    """What to write instead of a value; empty if it is right."""
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        taken = describe(inspect.type_info(field.type))
        return f"write {taken}{_example(field.default)}" if taken else str(error)
    return ""


def describe(kind: inspect.Type) -> str:
    """The values that an option takes, in words; empty for a kind that no stage of visiond has."""
    word = WORDS.get(type(kind))
    return word(kind) if word else ""


WORDS: dict[type[inspect.Type], Callable[[Any], str]] = {
    inspect.Metadata: lambda kind: describe(kind.type),
    inspect.BoolType: lambda kind: "true or false",
    inspect.IntType: lambda kind: f"a whole number{_reach(kind)}",
    inspect.FloatType: lambda kind: f"a number{_reach(kind)}",
    inspect.StrType: lambda kind: (
        "text in quotes" + (f" that matches {kind.pattern}" if kind.pattern else "")
    ),
    inspect.LiteralType: lambda kind: " or ".join(map(json.dumps, kind.values)),
    inspect.ListType: lambda kind: f"a list in square brackets, each entry {describe(kind.item_type)}",
    inspect.DictType: lambda kind: f"a table, each value {describe(kind.value_type)}",
    inspect.UnionType: lambda kind: ", or ".join(filter(None, map(describe, kind.types))),
}


def _example(default: object) -> str:
    """A number or a text as an example; other defaults say nothing new."""
    shown = isinstance(default, int | float | str) and not isinstance(default, bool) and default != ""
    return f", for example {json.dumps(default, ensure_ascii=False)}" if shown else ""


def _reach(kind: inspect.IntType | inspect.FloatType) -> str:
    """The limits of a number: " from 0 to 1"."""

    def figure(number: float) -> str:
        return f"{int(number):_}" if number == int(number) else f"{number:g}"

    if kind.ge is not None and kind.le is not None:
        return f" from {figure(kind.ge)} to {figure(kind.le)}"
    limits = {"above": kind.gt, "from": kind.ge, "below": kind.lt, "at most": kind.le}
    return ",".join(f" {word} {figure(limit)}" for word, limit in limits.items() if limit is not None)


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """fail: marker → the fault that happens when an image's bytes contain the marker.

    "error" and "transient" are that image's answer. "raise" is raised like a bug in a stage, "oom" as
    OutOfMemory for a batch of more than `oom_above` images, "lost" as DeviceLost. "segfault" and "exit" end
    the process. "hang" blocks it forever, with the interpreter lock held. unusable: why the stage cannot be
    built. notice: like that of a pack. device_file: a file that is locked for the time of each forward pass, so
    that all workers together are no faster than one device, and slower by switch_seconds for each pass of a process
    that did not have the one before. memory_folder: the memory of a fake GPU (fake.py) with memory_bytes, of which
    a stage takes load_bytes when it is loaded, and image_bytes for each image of a batch.
    salt: changes all answers, as another model does. reads_pixels: every image is decoded, as for a model.
    """

    load_seconds: float = 0.0
    latency_seconds: float = 0.0  # of a forward pass of at most batch_size images
    latency_per_image_seconds: float = 0.0
    fail: dict[str, Fault] = {}
    oom_above: int = 0
    unusable: str = ""
    notice: str = ""
    device_file: str = ""
    switch_seconds: float = 0.0
    memory_folder: str = ""
    memory_bytes: int = 0
    load_bytes: int = 0
    image_bytes: int = 0
    salt: int = 0
    reads_pixels: bool = False
