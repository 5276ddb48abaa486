"""Forms units: groups of inputs that one actor takes, and whose rows are one part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from visiond.cluster.inputs import Input
from visiond.cluster.plans import FINISHED, FRESH, Ids, Known, Plans, name_of

LISTED = 4096  # inputs that are looked up together

Store = Callable[[Any], Any]


@dataclass(frozen=True)
class Unit:
    """ids: of its inputs, in their order. fresh: no plan has it yet. table: its inputs, or where these are stored."""

    name: str
    ids: Ids
    fresh: bool
    table: Any

    def stored(self, store: Store) -> Unit:
        return replace(self, table=store(self.table))


def id_of(each: Input) -> int:
    """8 bytes of a digest. Of ten million inputs two have the same one with a probability of 3 in a million; then
    the second counts as listed twice."""
    text = b"%s\0%d\0%s" % (each.at, each.offset, each.version)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


class Planner:
    """inputs, finished and duplicates are counts, while `units` is read."""

    def __init__(self, plans: Plans, inputs: Iterable[Input], part_images: int) -> None:
        self._plans, self._listed, self._most = plans, inputs, part_images
        self._known = Known()
        self._begun: dict[int, list[tuple[int, Input]]] = {}  # units of an earlier run, by number
        self._fresh: list[tuple[int, Input]] = []
        self._images = 0  # of these
        self.inputs = self.finished = self.duplicates = 0

    def units(self) -> Iterator[Unit]:
        """First come the units of an earlier run whose inputs have all been listed, and new ones; at the end those of
        an earlier run that lack an input, because it is gone."""
        listed = iter(self._listed)
        while chunk := list(islice(listed, LISTED)):
            ids = np.array([id_of(each) for each in chunk], np.uint64)
            new = self._known.add(ids)
            self.duplicates += len(chunk) - int(new.sum())
            owners = self._plans.look_up(ids)
            self.finished += int((new & (owners == FINISHED)).sum())
            for place in np.flatnonzero(new & (owners != FINISHED)).tolist():
                self.inputs += chunk[place].images
                yield from self._take(int(ids[place]), chunk[place], int(owners[place]))
        for owner, members in self._begun.items():
            yield self._unit(members, self._plans.units[owner])
        if self._fresh:
            yield self._unit(self._fresh)

    def _take(self, number: int, each: Input, owner: int) -> Iterator[Unit]:
        if owner != FRESH:
            members = self._begun.setdefault(owner, [])
            members.append((number, each))
            if len(members) == self._plans.sizes[owner]:
                yield self._unit(self._begun.pop(owner), self._plans.units[owner])
            return
        self._fresh.append((number, each))
        self._images += each.images
        if self._images >= self._most:
            yield self._unit(self._fresh)
            self._fresh, self._images = [], 0

    def _unit(self, members: list[tuple[int, Input]], name: str = "") -> Unit:
        """name: of a unit that is planned."""
        ids = np.array([number for number, _ in members], np.uint64)
        unit = name or name_of(ids)
        return Unit(unit, ids, not name, to_table(unit, ids, [each for _, each in members]))


def to_table(unit: str, ids: Ids, members: list[Input]) -> Any:
    """A table of Arrow with a row for each input: the fields of Input, its id, and the unit's name."""
    import pyarrow as pa

    columns = [list(column) for column in zip(*members, strict=True)]
    text, number = pa.binary(), pa.int64()
    types = (text, text, text, pa.string(), number, number, number, pa.string())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    names = [pa.array([unit] * len(members), pa.string()), pa.array(ids, pa.uint64())]
    return pa.table([*names, *arrays], names=["unit", "id", *Input._fields])


def from_table(table: Any) -> Iterator[tuple[str, Ids, list[Input]]]:
    """The units in a table, each with its name, ids and inputs. Ray Data passes one at a time; it may pass more."""
    rows = table.to_pylist()
    for name in dict.fromkeys(row["unit"] for row in rows):
        own = [row for row in rows if row["unit"] == name]
        members = [Input(**{field: row[field] for field in Input._fields}) for row in own]
        yield name, np.array([row["id"] for row in own], np.uint64), members
