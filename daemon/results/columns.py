"""The columns that plug-in stages add to an export: one for each number and each text of their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from stages.contract.descriptor import Descriptor
from stages.registry.registry import BUILT_IN, STAGES

KINDS: dict[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BoolType: bool,
}


class Column(NamedTuple):
    """name: the result's key, a _ and the field's name. kind: the type of its cells."""

    name: str
    kind: type
    key: str
    field: str


def list_columns(stages: Iterable[Descriptor]) -> list[Column]:
    """A column for each field that is a number or text. Other
    fields are only in sidecars and in exports as JSON lines."""
    return [
        Column(f"{stage.key}_{field.encode_name}", kind, stage.key, field.encode_name)
        for stage in stages
        for field in msgspec.structs.fields(stage.result)
        if (kind := kind_of(inspect.type_info(field.type)))
    ]


def read_cells(document: dict[str, Any]) -> dict[str, Any]:
    """The columns of plug-ins in a sidecar; None if a stage has no result."""
    return {name: document.get(key, {}).get(field) for name, _, key, field in COLUMNS}


def kind_of(kind: inspect.Type) -> type | None:
    """The type of a plain value, or of one that may also be missing."""
    if isinstance(kind, inspect.Metadata):
        return kind_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        kinds = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
        return kind_of(kinds[0]) if len(kinds) == 1 else None
    return KINDS.get(type(kind))


COLUMNS = list_columns(stage for stage in STAGES.values() if stage not in BUILT_IN)
