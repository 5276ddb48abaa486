"""Makes up results of a given type, for fakes of stages whose descriptor has no `fake`. Imports no torch."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect

VARIANTS = 64  # different answers of a fake; made-up fractions are multiples of 1 / VARIANTS
LABELS = ("cat", "dog", "car", "tree", "cup", "sign", "book")  # of the objects and tags of fakes


Text = TypeVar("Text", str, bytes)
Sized = inspect.StrType | inspect.BytesType | inspect.ByteArrayType | inspect.MemoryViewType
Repeated = inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType


@lru_cache(maxsize=4096)
def invent(
    kind: type[msgspec.Struct], variant: int, width: int, height: int, earlier: frozenset[str]
) -> msgspec.Struct:
    """A meaningless result that fits its type and is different for each variant, as far as the type allows."""
    return msgspec.convert(invent_value(inspect.type_info(kind), variant), kind)


def invent_value(kind: inspect.Type, number: int) -> Any:
    """A value of a type, as it would be in JSON; None for a type that is not in the table."""
    way = WAYS.get(type(kind))
    return way(kind, number) if way else None


def invent_struct(kind: inspect.StructType, number: int) -> Any:
    values = {
        field.encode_name: invent_value(field.type, number + place) for place, field in enumerate(kind.fields)
    }
    tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
    return [*tag.values(), *values.values()] if kind.array_like else {**tag, **values}


def invent_integer(kind: inspect.IntType, number: int) -> int:
    """The number, or the nearest one that the type allows."""
    step = kind.multiple_of or 1
    value = int(hold(number, above(kind.gt, 1, kind.ge), above(kind.lt, -1, kind.le)))
    down = value - value % step
    allowed = all(bound is None or down >= bound for bound in (kind.ge, above(kind.gt, 1, None)))
    return down if allowed else down + step


def above(exclusive: int | None, step: int, inclusive: int | None) -> int | None:
    """A bound as an inclusive one."""
    return inclusive if exclusive is None else exclusive + step


def invent_fraction(kind: inspect.FloatType, number: int) -> float:
    """A number from 0 up to 1, or the nearest one within inclusive bounds, or one between exclusive bounds."""
    place = number % VARIANTS
    value = float(hold(place / VARIANTS, kind.ge, kind.le))
    if (kind.gt is None or value > kind.gt) and (kind.lt is None or value < kind.lt):
        return value
    low, high = kind.ge if kind.gt is None else kind.gt, kind.le if kind.lt is None else kind.lt
    low = low if low is not None else (high or 0) - 1
    high = high if high is not None else low + 1
    return low + (high - low) * (place + 1) / (VARIANTS + 1)


def fit_length(value: Text, kind: Sized, filler: Text) -> Text:
    """The end of a value, as it differs, or the value filled up, so that its length is allowed."""
    if kind.max_length is not None:
        value = value[max(len(value) - kind.max_length, 0) :]
    return value + filler * ((kind.min_length or 0) - len(value))


def hold(number: float, least: float | None, most: float | None) -> float:
    """The nearest number within bounds."""
    number = number if least is None else max(number, least)
    return number if most is None else min(number, most)


def invent_bytes(kind: Sized, number: int) -> str:
    return base64.b64encode(fit_length(f"bytes {number}".encode(), kind, b"x")).decode()


def invent_list(kind: Repeated, number: int) -> list[Any]:
    count = max(min(number % 4, 4 if kind.max_length is None else kind.max_length), kind.min_length or 0)
    return [invent_value(kind.item_type, number + place) for place in range(count)]


def invent_table(kind: inspect.DictType, number: int) -> dict[Any, Any]:
    numbers = range(number, number + (kind.min_length or 0))
    return {invent_value(kind.key_type, each): invent_value(kind.value_type, each) for each in numbers}


def invent_part(kind: inspect.UnionType, number: int) -> Any:
    return invent_value(next(each for each in kind.types if not isinstance(each, inspect.NoneType)), number)


WAYS: dict[type[inspect.Type], Callable[[Any, int], Any]] = {
    inspect.StructType: invent_struct,
    inspect.IntType: invent_integer,
    inspect.FloatType: invent_fraction,
    inspect.DecimalType: lambda kind, number: f"{number}.5",
    inspect.BoolType: lambda kind, number: number % 2 == 0,
    inspect.StrType: lambda kind, number: fit_length(f"text {number}", kind, "x"),
    **dict.fromkeys((inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType), invent_bytes),
    inspect.DateTimeType: lambda kind, number: (
        f"2026-01-{1 + number % 28:02}T12:00:00{'' if kind.tz is False else 'Z'}"
    ),
    inspect.DateType: lambda kind, number: f"2026-01-{1 + number % 28:02}",
    inspect.TimeType: lambda kind, number: f"12:{number % 60:02}:00{'Z' if kind.tz else ''}",
    inspect.TimeDeltaType: lambda kind, number: f"PT{number}S",
    inspect.UUIDType: lambda kind, number: str(uuid.UUID(int=number)),
    inspect.LiteralType: lambda kind, number: kind.values[number % len(kind.values)],
    inspect.EnumType: lambda kind, number: list(kind.cls)[number % len(kind.cls)].value,
    **dict.fromkeys(get_args(Repeated), invent_list),
    inspect.TupleType: lambda kind, number: [
        invent_value(item, number + place) for place, item in enumerate(kind.item_types)
    ],
    inspect.UnionType: invent_part,
    inspect.Metadata: lambda kind, number: invent_value(kind.type, number),
    inspect.DictType: invent_table,
}
