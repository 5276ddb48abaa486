"""Makes up results of a given type, for fakes of stages whose descriptor has no `fake`. Imports no torch."""

from __future__ import annotations

import base64
import uuid
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

VARIANTS = 64  # different answers of a fake; made-up fractions are multiples of 1 / VARIANTS
LABELS = ("cat", "dog", "car", "tree", "cup", "sign", "book")  # of the objects and tags of fakes


Text = TypeVar("Text", str, bytes)
Sized = inspect.StrType | inspect.BytesType | inspect.ByteArrayType | inspect.MemoryViewType


@lru_cache(maxsize=4096)
def invent(
    kind: type[msgspec.Struct], variant: int, width: int, height: int, earlier: frozenset[str]
) -> msgspec.Struct:
    """A meaningless result that fits its type and is different for each variant, as far as the type allows."""
    return msgspec.convert(invent_value(inspect.type_info(kind), variant), kind)


def invent_value(kind: inspect.Type, number: int) -> Any:
    """A value of a type, as it would be in JSON."""
    match kind:
        case inspect.StructType():
            values = {
                field.encode_name: invent_value(field.type, number + place)
                for place, field in enumerate(kind.fields)
            }
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return [*tag.values(), *values.values()] if kind.array_like else {**tag, **values}
        case inspect.IntType():
            return invent_integer(kind, number)
        case inspect.FloatType():
            return invent_fraction(kind, number)
        case inspect.DecimalType():
            return f"{number}.5"
        case inspect.BoolType():
            return number % 2 == 0
        case inspect.StrType():
            return fit_length(f"text {number}", kind, "x")
        case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
            return base64.b64encode(fit_length(f"bytes {number}".encode(), kind, b"x")).decode()
        case inspect.DateTimeType():
            return f"2026-01-{1 + number % 28:02}T12:00:00{'' if kind.tz is False else 'Z'}"
        case inspect.DateType():
            return f"2026-01-{1 + number % 28:02}"
        case inspect.TimeType():
            return f"12:{number % 60:02}:00{'Z' if kind.tz else ''}"
        case inspect.TimeDeltaType():
            return f"PT{number}S"
        case inspect.UUIDType():
            return str(uuid.UUID(int=number))
        case inspect.LiteralType():
            return kind.values[number % len(kind.values)]
        case inspect.EnumType():
            return list(kind.cls)[number % len(kind.cls)].value
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            count = max(
                min(number % 4, kind.max_length if kind.max_length is not None else 4), kind.min_length or 0
            )
            return [invent_value(kind.item_type, number + place) for place in range(count)]
        case inspect.TupleType():
            return [invent_value(item, number + place) for place, item in enumerate(kind.item_types)]
        case inspect.UnionType():
            return invent_value(
                next(part for part in kind.types if not isinstance(part, inspect.NoneType)), number
            )
        case inspect.Metadata():
            return invent_value(kind.type, number)
        case inspect.DictType():
            places = range(kind.min_length or 0)
            return {
                invent_value(kind.key_type, number + place): invent_value(kind.value_type, number + place)
                for place in places
            }
    return None


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
