"""Forms units: groups of inputs that one actor takes, and whose rows are one part."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from visiond.cluster.plans import FINISHED, FRESH, DigestSet, Ids, Plans, name_of
from visiond.cluster.reading.inputs import ClusterInput

LISTED = 1 << 14  # inputs that are looked up together


class Unit(NamedTuple):
    """ids: of its inputs, in their order. fresh: no plan has it yet. packed: its inputs."""

    name: str
    ids: Ids
    fresh: bool
    packed: bytes

    def inputs(self) -> list[ClusterInput]:
        return msgspec.msgpack.decode(zlib.decompress(self.packed), type=list[ClusterInput])


def id_of(each: ClusterInput) -> int:
    """8 bytes of a digest. Of ten million inputs two have the same one with a probability of 3 in a million; then
    the second counts as listed twice."""
    return _digest(b"%s\0%d\0%s" % (each.at, each.offset, each.version))


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


class Planner:
    """inputs, finished and duplicates are counts, while `units` is read. Each row of a list is an input, also if its
    address stands there before; in a folder, what is listed again is not."""

    def __init__(self, plans: Plans, inputs: Iterable[ClusterInput], part_images: int) -> None:
        self._plans, self._listed, self._most = plans, inputs, part_images
        self._known, self._addresses = DigestSet(), DigestSet()
        self._begun: dict[int, list[tuple[int, ClusterInput]]] = {}  # units of an earlier run, by number
        self._fresh: list[tuple[int, ClusterInput]] = []
        self._images = 0  # of these
        self.inputs = self.finished = self.duplicates = 0

    def units(self) -> Iterator[Unit]:
        """First come the units of an earlier run whose inputs have all been listed, and new ones; at the end those of
        an earlier run that lack an input, because it is gone."""
        listed = iter(self._listed)
        while chunk := list(islice(listed, LISTED)):
            ids = self._find_ids(chunk)
            owners = self._plans.look_up(ids)
            left = np.flatnonzero(owners != FINISHED)
            self.finished += len(chunk) - len(left)
            new = self._known.add(ids[left])
            self.duplicates += len(left) - int(new.sum())
            for place in left[new].tolist():
                self.inputs += chunk[place].images
                yield from self._take(int(ids[place]), chunk[place], int(owners[place]))
        for owner, members in self._begun.items():
            yield self._unit(members, self._plans.units[owner])
        if self._fresh:
            yield self._unit(self._fresh)

    def _find_ids(self, chunk: list[ClusterInput]) -> Ids:
        """The first row with an address has the digest that it always had, whatever else is in the list; so a list may
        grow or shrink between runs. A further row with it has a digest with its number."""
        ids = np.fromiter(map(id_of, chunk), np.uint64, len(chunk))
        if chunk[0].row >= 0:
            for place in np.flatnonzero(~self._addresses.add(ids)).tolist():
                ids[place] = _digest(b"%d\0%d" % (ids[place], chunk[place].row))
        return ids

    def _take(self, number: int, each: ClusterInput, owner: int) -> Iterator[Unit]:
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

    def _unit(self, members: list[tuple[int, ClusterInput]], name: str = "") -> Unit:
        """name: of a unit that is planned."""
        ids = np.array([number for number, _ in members], np.uint64)
        packed = zlib.compress(msgspec.msgpack.encode([each for _, each in members]), 1)
        return Unit(name or name_of(ids), ids, not name, packed)


def to_table(unit: Unit) -> Any:
    """A unit as a table of Arrow with one row, which is small: Ray need not store it apart."""
    import pyarrow as pa

    return pa.table({"unit": [unit.name], "ids": [unit.ids.tobytes()], "packed": [unit.packed]})


def from_table(table: Any) -> Iterator[Unit]:
    """The units in a table."""
    for row in table.to_pylist():
        yield Unit(row["unit"], np.frombuffer(row["ids"], np.uint64), False, row["packed"])
