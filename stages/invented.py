"""Makes up results of a given type, for fakes of stages that bring no answers of their own. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

VARIANTS = 64  # answers of a fake that differ; fractions are multiples of one part in so many
LABELS = ("cat", "dog", "car", "tree", "cup", "sign", "book")  # what fakes see


@lru_cache(maxsize=4096)
def invent(kind: type[msgspec.Struct], variant: int, width: int, height: int, earlier: frozenset[str]) -> msgspec.Struct:
    """A result that differs with `variant` and fits its type; what it says means nothing."""
    return msgspec.convert(invent_value(inspect.type_info(kind), variant), kind)


def invent_value(kind: inspect.Type, number: int) -> Any:
    """A value of a type, as JSON would hold it."""
    match kind:
        case inspect.StructType():
            return {field.encode_name: invent_value(field.type, number + place) for place, field in enumerate(kind.fields)}
        case inspect.IntType():
            return int(hold(number, kind.ge, kind.le))
        case inspect.FloatType():
            return float(hold(number % VARIANTS / VARIANTS, kind.ge, kind.le))
        case inspect.BoolType():
            return number % 2 == 0
        case inspect.StrType():
            return f"text {number}"
        case inspect.LiteralType():
            return kind.values[number % len(kind.values)]
        case inspect.EnumType():
            return list(kind.cls)[number % len(kind.cls)].value
        case inspect.ListType() | inspect.VarTupleType():
            return [invent_value(kind.item_type, number + place) for place in range(number % 4)]
        case inspect.TupleType():
            return [invent_value(item, number + place) for place, item in enumerate(kind.item_types)]
        case inspect.UnionType():
            return invent_value(next(part for part in kind.types if not isinstance(part, inspect.NoneType)), number)
        case inspect.Metadata():
            return invent_value(kind.type, number)
        case inspect.DictType():
            return {}
    return None


def hold(number: float, least: float | None, most: float | None) -> float:
    """The nearest number within bounds."""
    number = number if least is None else max(number, least)
    return number if most is None else min(number, most)
