"""What the stages of plug-ins add to an export: a column for each figure and each text of their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from stages.descriptor import Descriptor
from stages.registry import BUILT_IN, STAGES

KINDS: dict[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BoolType: bool,
}


class Column(NamedTuple):
    """name: the result's key, a _ and the field's name. kind: what its cells hold."""

    name: str
    kind: type
    key: str
    field: str


def list_columns(stages: Iterable[Descriptor]) -> list[Column]:
    """What is neither a number nor text is only in the sidecars and in an export as JSON lines."""
    return [
        Column(f"{stage.key}_{field.encode_name}", kind, stage.key, field.encode_name)
        for stage in stages
        for field in msgspec.structs.fields(stage.result)
        if (kind := kind_of(inspect.type_info(field.type)))
    ]


def read_cells(document: dict[str, Any]) -> dict[str, Any]:
    """The columns of plug-ins in a sidecar; None where a stage said nothing."""
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
