"""Which images an export has: of a bin, a mix of bins, a condition, a sample, equal files once, of near-duplicates the best."""

from __future__ import annotations

import functools
import itertools
import math
import random
import sqlite3
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from daemon.core.errors import LedgerDamaged, WrongArgument
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.exports.answered import Explain
from daemon.exports.columns import ExportColumns
from daemon.exports.conditions import open_condition, reads_near
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from daemon.ledger.statements import run_rows
from stages.contract.binning import BINS

CHUNK = 1024  # images for which a condition is evaluated at once
DRAWN = 256  # images that are looked up at once
# From numbers of images to the best image of the group of each that is near a better one, and the nearness of the two.
FindNear = Callable[[Sequence[int]], Mapping[int, tuple[int, float]]]
# From bins, and numbers of images or None for all, to those of them that a person should look at, in that order; and what says
# of them why, one after another.
FindFirst = Callable[[Sequence[str], Collection[int] | None], tuple[Sequence[int], Explain]]
SEED = 0  # so that a mix leaves out the same images each time


@dataclass(frozen=True)
class ExportChoice:
    """bins: none for all. ratio: the share of each bin. where: conditions of SQL on the columns of an export, all of which must
    be true. sample: how many images, evenly at random by the seed; 0 for all. unique: of files with equal bytes, the oldest
    one. near: finds near-duplicates; with `unique` too, only the best of them. first: finds which come first, and leaves out
    others; without it the oldest come first."""

    bins: Sequence[str] = ()
    ratio: Mapping[str, float] = field(default_factory=dict)
    where: Sequence[str] = ()
    sample: int = 0
    seed: int = SEED
    unique: bool = False
    near: FindNear | None = None
    first: FindFirst | None = None

    @property
    def looks_first(self) -> bool:
        """Whether all images are read once before it is known which are chosen."""
        return bool(self.where or self.unique or self.near)


class Chosen:
    """Iterates over the chosen images that are not damaged in the ledger, oldest first.

    total: how many there are, before any is found damaged; known when the first is passed. models: those of the images that
    were passed so far. better: what `near` of the choice has found; known when the first is passed. columns: also for that.
    by_near: the conditions that ask for it. has_columns_only: nothing else does.
    """

    def __init__(self, reader: Reader, choice: ExportChoice, columns: ExportColumns) -> None:
        """Raises WrongArgument."""
        self._reader, self._choice = reader, choice
        if named := {*choice.bins, *choice.ratio}:
            refuse_unknown_bins(named, self._counts)
        _check(choice)
        self._damaged: set[int] = set()
        self.models: dict[Model, None] = {}  # in the order of the stages
        self.total = 0
        self.better: dict[int, tuple[int, float]] = {}
        self._explain: Explain = lambda image: None
        self.columns = columns.with_near(self.better) if choice.near else columns
        self.by_near = [where for where in choice.where if reads_near(where, self.columns)]
        self.has_columns_only = bool(choice.near) and not (choice.unique or self.by_near)

    @functools.cached_property
    def _counts(self) -> dict[str, int]:
        """By bin, how many images there are: half a minute for ten million, so only if that matters."""
        return self._reader.bin_counts()

    def __iter__(self) -> Iterator[Record]:
        """Raises WrongArgument for a condition that fails on an image."""
        choice, found = self._choice, self._whole()
        if choice.first:
            chosen = {*self._find()} if choice.looks_first or choice.sample else None
            ids, self._explain = choice.first(choice.bins, chosen)
            found, self.total = self._without_damaged(find_records(self._reader, ids)), len(ids)
        elif choice.sample and not choice.looks_first:
            drawn = itertools.islice(draw(self._reader, choice.seed, choice.bins), choice.sample)
            ids = array("q", sorted(number for number, _ in drawn))
            found, self.total = self._without_damaged(find_records(self._reader, ids)), len(ids)
        elif choice.looks_first:
            ids = self._find()
            found, self.total = _merge(found, ids), len(ids)
        elif choice.ratio:
            wanted = mix(self._counts, choice.ratio)
            found, self.total = pick(found, self._counts, wanted), sum(wanted.values())
        else:
            self.total = sum(self._counts.get(name, 0) for name in choice.bins or self._counts)
        for record in found:
            self.models.update(dict.fromkeys(record.all_models()))
            yield record

    def explain(self, image: int) -> Mapping[str, Any] | None:
        """What disagrees, of one image after another, if `first` has chosen them."""
        return self._explain(image)

    def check(self) -> None:
        """Raises LedgerDamaged if images had to be left out."""
        if self._damaged:
            raise LedgerDamaged(
                f"{quantity(len(self._damaged), 'image')} left out because the ledger is damaged there; the first has number "
                f"{min(self._damaged)}. Stop the daemon and run `{command('repair')}`, which restores them from the sidecars. "
                "All others are exported."
            )

    def _whole(self) -> Iterator[Record]:
        return self._without_damaged(self._reader.finished(self._choice.bins))

    def _without_damaged(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if record.damage:
                self._damaged.add(record.id)
            else:
                yield record

    def _find(self) -> array[int]:
        """The numbers of the images, in order."""
        choice, found = self._choice, self._whole()
        for where in choice.where:
            found = found if where in self.by_near else _filter(found, where, self.columns)
        if choice.unique:
            found = _unique(found)
        ids = array("q", (record.id for record in found))
        if choice.near:
            self.better.update(choice.near(ids))
        for where in self.by_near:
            found = _filter(_merge(self._whole(), ids), where, self.columns)
            ids = array("q", (record.id for record in found))
        if choice.unique:
            ids = array("q", (number for number in ids if number not in self.better))
        if choice.sample < len(ids) and choice.sample:
            places = random.Random(choice.seed).sample(range(len(ids)), choice.sample)
            ids = array("q", (ids[place] for place in sorted(places)))
        return ids


def refuse_unknown_bins(named: Iterable[str], counts: Iterable[str]) -> None:
    """counts: the bins that have images, as the ledger counts them. Raises WrongArgument."""
    bins = {*BINS, *counts}
    if unknown := {*named} - bins:
        raise WrongArgument(
            f"There is no bin {', '.join(sorted(unknown))}; bins are {', '.join(sorted(bins))}."
        )


def _check(choice: ExportChoice) -> None:
    """Raises WrongArgument."""
    if choice.seed and not choice.sample:
        raise WrongArgument("--seed is for --sample; add --sample N.")
    if choice.ratio and (choice.bins or choice.sample or choice.looks_first or choice.first):
        raise WrongArgument(
            "--ratio mixes whole bins; it cannot be combined with --bin, --where, --sample, --unique, --near or --order."
        )


def draw(reader: Reader, seed: int, bins: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """The numbers of all images that are DONE, in a random order: the first n are a sample of n. With each, how many numbers
    were looked at until then. No more of the ledger is read. bins: only images of these."""
    wanted = msgspec.json.encode(bins).decode()
    numbers, looked = _shuffle(reader.last_number(), seed), 0
    while chunk := list(itertools.islice(numbers, DRAWN)):
        with reader.lend() as connection:
            rows = run_rows(connection, "drawn", [(number,) for number in chunk], wanted, wanted)
        done = {number for (number,) in rows}
        yield from ((number, place) for place, number in enumerate(chunk, looked + 1) if number in done)
        looked += len(chunk)


def _shuffle(last: int, seed: int) -> Iterator[int]:
    """1 to `last` in a random order, without a list of them all while only few are wanted. `randint` draws bits until they are
    a number in its range. So mostly the same come first if `last` grows, and images that arrive change a sample little."""
    chance, drawn = random.Random(seed), set[int]()
    while 2 * len(drawn) < last:
        if (number := chance.randint(1, last)) not in drawn:
            drawn.add(number)
            yield number
    rest = [number for number in range(1, last + 1) if number not in drawn]
    chance.shuffle(rest)
    yield from rest


def find_records(reader: Reader, numbers: Iterable[int]) -> Iterator[Record]:
    """Those that are still DONE, in this order, a few in memory at a time."""
    left = iter(numbers)
    while chunk := list(itertools.islice(left, DRAWN)):
        yield from (record for record in reader.find_numbers(chunk) if record.status is JobStatus.DONE)


def _merge(records: Iterable[Record], ids: array[int]) -> Iterator[Record]:
    """Those with these numbers. Both are in order."""
    wanted = iter(ids)
    number = next(wanted, None)
    for record in records:
        while number is not None and number < record.id:  # it is not DONE any more
            number = next(wanted, None)
        if number is None:
            return
        if number == record.id:
            yield record


def _unique(records: Iterable[Record]) -> Iterator[Record]:
    """The first of those with equal bytes. SQLite moves what it knows to the disk if it becomes large."""
    with sqlite3.connect("") as known:
        known.execute("CREATE TABLE known (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        for record in records:
            if known.execute("INSERT OR IGNORE INTO known VALUES (?)", (record.digest,)).rowcount:
                yield record


def _filter(records: Iterable[Record], where: str, columns: ExportColumns) -> Iterator[Record]:
    """Those for which the condition is true. Raises WrongArgument."""
    found, is_empty = iter(records), True
    with open_condition(where, columns) as condition:
        while chunk := list(itertools.islice(found, CHUNK)):
            matching = condition.find(chunk)
            is_empty = is_empty and not matching
            yield from (record for record in chunk if record.id in matching)
        if is_empty:
            condition.check_labels()


def parse_ratio(text: str) -> dict[str, float]:
    """ "A=0.4,B=0.4,C=0.2" as shares that add up to 1. Raises WrongArgument."""
    try:
        shares = {
            name.strip(): float(share)
            for name, share in (part.split("=") for part in text.split(",") if part)
        }
    except ValueError:
        raise WrongArgument(
            f'--ratio "{text}" is not a list of shares; write it like A=0.4,B=0.4,C=0.2.'
        ) from None
    if text and not shares:
        raise WrongArgument(f'--ratio "{text}" names no bin; write it like A=0.4,B=0.4,C=0.2.')
    if not all(0 < share < math.inf for share in (*shares.values(), sum(shares.values()) or 1.0)):
        raise WrongArgument(
            f'--ratio "{text}": a share must be more than 0; leave out the bins that you do not want.'
        )
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def mix(counts: Mapping[str, int], ratio: Mapping[str, float]) -> dict[str, int]:
    """The number of images from each bin: as many as the smallest bin allows at these shares."""
    total = min(counts.get(name, 0) / share for name, share in ratio.items())
    return {name: round(total * share) for name, share in ratio.items()}


def pick(
    records: Iterable[Record], counts: Mapping[str, int], wanted: Mapping[str, int], seed: int = SEED
) -> Iterator[Record]:
    """This number of records of each bin, evenly at random (Knuth's algorithm S), in one pass."""
    chance = random.Random(seed)
    left, missing = dict(counts), dict(wanted)
    for record in records:
        if not left.get(record.bin):  # added after the count
            continue
        if chance.random() * left[record.bin] < missing.get(record.bin, 0):
            missing[record.bin] -= 1
            yield record
        left[record.bin] -= 1
