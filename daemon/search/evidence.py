"""Keeps how much answers disagree, in the index of words: of each signal and stage one byte for each publication, in parts of
BLOCK publications; and orders images by that.

Scores of different measures cannot be compared: a margin of 0.9 is nothing rare. So each is multiplied with the surprisal of
the share of measured images that have as high a one, -log(share) (Shannon, A mathematical theory of communication, 1948), and
with the weight of its signal; the highest product of an image counts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.core.errors import LedgerDamaged, LedgerUnusable
from daemon.core.labels import NO_LABELS, Kind, Label
from daemon.labels.store import LabelStore, stamp_of
from daemon.ledger import publications
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.ledger.rows import read_stored
from daemon.search.disagreement import MEASURES, SIGNALS, STAGES, measure

BLOCK = 4096
PART = 4096  # publications of an order, looked up at once
STEPS = 254  # of a score in a byte: 0 was not measured, 1 is a score of 0
# A person is more often right than a model, and two models that differ say more than one that is not sure.
WEIGHTS = {"labels": 2.0, "looks": 1.0, "models": 1.0, "scores": 0.5}
# The digest of each image's bytes, as far as 8 bytes have it, and the stamp of its labels: see LabelStore.stamps.
DIGEST, STAMP = "digest", "stamp"
KINDS: Mapping[str, Any] = {DIGEST: np.uint64, STAMP: np.uint32}
NAMES = tuple(":".join(key) for key in MEASURES)
ORDERS: dict[str, tuple[str, ...]] = {}  # by name, which of NAMES it looks at
for signal, stage in MEASURES:
    for given in ((), (signal,), (stage,), (signal, stage), (stage, signal)):
        order = ":".join(("disagreement", *given))
        ORDERS[order] = (*ORDERS.get(order, ()), f"{signal}:{stage}")
OF_LABELS = tuple(name for name in NAMES if name.startswith("labels:"))
SENTENCES = {
    "labels": "people and answers differ: {}, {:.2f}",
    "looks": "first and second look differ: {}, {:.2f}",
    "models": "this model and a former or tried one differ: {}, {:.2f}",
    "scores": "low scores: {}, {:.2f}",
}
SAID = {"ocr": "text", "yolo": "objects", "clip": "tags", "blip": "caption", "classifier": "classes"}
LAST = np.uint16(65535)  # of an image that nothing speaks for
READ = "SELECT block, part FROM evidence WHERE name = ? ORDER BY block"
FIND = "SELECT part FROM evidence WHERE name = ? AND block = ?"
WRITE = "INSERT OR REPLACE INTO evidence VALUES (?, ?, ?)"

Numbers = NDArray[np.int64]


class Evidence(NamedTuple):
    """What disagrees most, for its measure, in an image: score, from 0 to 1."""

    signal: str
    stage: str
    score: float

    @property
    def sentence(self) -> str:
        """As it goes on after the name of the image."""
        return SENTENCES[self.signal].format(SAID[self.stage], self.score)


def parse_order(order: str) -> tuple[str, ...] | None:
    """Names of columns for "disagreement", "disagreement:labels", "disagreement:yolo", "disagreement:labels:yolo". None if
    there is no such order."""
    return ORDERS.get(order)


def list_orders() -> list[str]:
    parts = [*SIGNALS, *STAGES, *NAMES]
    return ["disagreement", *(f"disagreement:{part}" for part in parts)]


def encode_score(score: float) -> int:
    return 1 + round(STEPS * score)


def digest_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def write(connection: sqlite3.Connection, name: str, values: Mapping[int, int]) -> None:
    """values: by number of a publication."""
    blocks: dict[int, dict[int, int]] = {}
    for number, value in values.items():
        blocks.setdefault(number // BLOCK, {})[number % BLOCK] = value
    for block, some in blocks.items():
        row = connection.execute(FIND, (name, block)).fetchone()
        kind = KINDS.get(name, np.uint8)
        part = np.frombuffer(row[0], kind).copy() if row else np.zeros(BLOCK, kind)
        part[[*some]] = [*some.values()]
        if row or part.any():
            connection.execute(WRITE, (name, block, part.tobytes()))


def write_all(connection: sqlite3.Connection, scores: Mapping[int, Mapping[tuple[str, str], float]]) -> None:
    """By number of a publication, what `measure` has found."""
    columns: dict[str, dict[int, int]] = {}
    for number, found in scores.items():
        for key, score in found.items():
            columns.setdefault(":".join(key), {})[number] = encode_score(score)
    for name, values in columns.items():
        write(connection, name, values)


class Gathering:
    """Measures images for the index, when they are published and when their labels change."""

    def __init__(self, labels: LabelStore) -> None:
        self.labels = labels

    def add(self, connection: sqlite3.Connection, reader: Reader, records: Mapping[int, Record]) -> bool:
        """records: by the number of a publication. Returns whether the labels could be read. Raises LedgerUnusable,
        LedgerDamaged: of the ledger."""
        done = {number: record for number, record in records.items() if record.outputs}
        others = _read_others(reader, done.values())
        try:
            labels, is_whole = self._find(done.values()), True
        except (LedgerUnusable, LedgerDamaged):
            labels, is_whole = {}, False
        scores = {
            number: measure(record, others.get(record.digest, {}), labels.get(record.digest, {}))
            for number, record in done.items()
        }
        write(connection, DIGEST, {number: digest_of(record.digest) for number, record in done.items()})
        self._write_stamps(connection, done, labels)
        write_all(connection, scores)
        return is_whole

    def find_changed(self, connection: sqlite3.Connection) -> list[int]:
        """The publications whose labels are others than those that were measured. Raises LedgerUnusable, LedgerDamaged."""
        known = Columns.read(connection, (DIGEST, STAMP))
        if DIGEST not in known.values:
            return []
        digests, none = known.values[DIGEST], np.zeros(len(known.values[DIGEST]), np.uint32)
        said = sorted((digest_of(digest), stamp) for digest, stamp in self.labels.stamps().items())
        labelled = np.array([digest for digest, _ in said], np.uint64)
        stamps = np.array([0, *(stamp for _, stamp in said)], np.uint32)
        places = np.minimum(np.searchsorted(labelled, digests), max(0, len(said) - 1))
        is_labelled = labelled[places] == digests if len(said) else none.astype(np.bool_)
        wanted = stamps[np.where(is_labelled, places + 1, 0)]
        changed = np.flatnonzero((wanted != known.values.get(STAMP, none)) & (digests != 0))
        return known.numbers_at(changed)

    def measure_again(self, connection: sqlite3.Connection, reader: Reader, numbers: Sequence[int]) -> None:
        """Against the present labels. Raises LedgerUnusable, LedgerDamaged."""
        with reader.lend() as ledger:
            shown = publications.read_shown(ledger, numbers)
        images = {image: number for number, image in shown.items()}
        records = {images[record.id]: record for record in reader.find_numbers([*images])}
        labels = self._find(records.values())
        scores = {number: measure(record, {}, labels[record.digest]) for number, record in records.items()}
        for name in OF_LABELS:
            key = (name.split(":")[0], name.split(":")[1])
            write(connection, name, {n: encode_score(s[key]) if key in s else 0 for n, s in scores.items()})
        self._write_stamps(connection, records, labels)

    def _find(self, records: Iterable[Record]) -> dict[bytes, Mapping[Kind, Label]]:
        """By digest, what people say. Raises LedgerUnusable, LedgerDamaged."""
        digests = {record.digest for record in records}
        if not self.labels.path.exists():
            return dict.fromkeys(digests, NO_LABELS)
        with self.labels.lookup() as lookup:
            return {digest: lookup(digest) for digest in digests}

    def _write_stamps(
        self,
        connection: sqlite3.Connection,
        records: Mapping[int, Record],
        labels: Mapping[bytes, Mapping[Kind, Label]],
    ) -> None:
        stamps = {number: stamp_of(labels.get(record.digest, {})) for number, record in records.items()}
        write(connection, STAMP, stamps)


def _read_others(reader: Reader, records: Iterable[Record]) -> dict[bytes, dict[str, bytes]]:
    """By digest and stage, the last answer that the ledger has by another model than those of the record."""
    stages = [model.stage for model in reader.models.values()]
    if len(stages) == len({*stages}):
        return {}
    used = {record.digest: {*record.all_models()} for record in records}
    with reader.lend() as ledger:
        stored = read_stored(ledger, used, reader.models)
    return {
        digest: {
            reader.models[number].stage: outputs[number].payload
            for number in sorted(outputs)
            if reader.models[number] not in used[digest]
        }
        for digest, outputs in stored.results.items()
    }


@dataclass(frozen=True)
class Columns:
    """Some of the columns, of the same publications. blocks: [n]; values: by name, [n * BLOCK]."""

    blocks: Numbers
    values: dict[str, NDArray[Any]]

    @classmethod
    def none(cls) -> Columns:
        return cls(np.empty(0, np.int64), {})

    @classmethod
    def read(cls, connection: sqlite3.Connection, names: Sequence[str]) -> Columns:
        """Without those in which nothing was measured."""
        rows = {name: found for name in names if (found := connection.execute(READ, (name,)).fetchall())}
        blocks = np.array(sorted({block for found in rows.values() for block, _ in found}), np.int64)
        values = {}
        for name, found in rows.items():
            kind = KINDS.get(name, np.uint8)
            whole = np.zeros((len(blocks), BLOCK), kind)
            places = np.searchsorted(blocks, [block for block, _ in found])
            whole[places] = np.frombuffer(b"".join(part for _, part in found), kind).reshape(-1, BLOCK)
            values[name] = whole.reshape(-1)
        return cls(blocks, values)

    def numbers_at(self, places: Numbers) -> list[int]:
        numbers: list[int] = (self.blocks[places // BLOCK] * BLOCK + places % BLOCK).tolist()
        return numbers

    def expand(self, bits: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Of a mask of publications, the bit of each place."""
        size = BLOCK // 8
        whole = np.zeros((len(self.blocks), size), np.uint8)
        some = np.flatnonzero(self.blocks * size < len(bits))
        padded = np.pad(bits, (0, -len(bits) % size)).reshape(-1, size)
        whole[some] = padded[self.blocks[some]]
        return np.unpackbits(whole, bitorder="little").astype(np.bool_)


class Ranking:
    """Images by what disagrees most; of equal ones the newest first. Those in which nothing disagrees are not in it."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        gains = {name: _weigh(name, values) for name, values in columns.values.items()}
        known = np.unique(-np.concatenate([*gains.values(), [0.0]]))  # the highest first
        self._ranks = {
            name: np.where(gain > 0, np.searchsorted(known, -gain), LAST).astype(np.uint16)
            for name, gain in gains.items()
        }
        ranks = np.full(len(columns.blocks) * BLOCK, LAST)
        for name, values in columns.values.items():
            np.minimum(ranks, np.take(self._ranks[name], values), out=ranks)
        self._all = ranks

    def in_order(self, count: int, allowed: NDArray[np.uint8] | None = None) -> Iterator[dict[int, int]]:
        """Parts of the order: by number of a publication, its place. count: how many are likely to be read. allowed: a mask
        of publications."""
        ranks = self._all if allowed is None else np.where(self._columns.expand(allowed), self._all, LAST)
        many = np.cumsum(np.bincount(ranks, minlength=int(LAST) + 1)[:LAST])
        start = 0
        while start < many[-1]:
            last = min(int(np.searchsorted(many, start + count)), int(LAST) - 1)
            places = np.flatnonzero(ranks <= last)[::-1]
            best = places[np.argsort(ranks[places], kind="stable")]
            for first in range(start, len(best), PART):
                part = best[first : first + PART]
                yield dict(zip(self._columns.numbers_at(part), part.tolist(), strict=True))
            start, count = len(best), 4 * count

    def evidence_at(self, place: int) -> Evidence:
        values = {name: int(column[place]) for name, column in self._columns.values.items()}
        name = min(values, key=lambda each: (self._ranks[each][values[each]], -values[each]))
        signal, stage = name.split(":")
        return Evidence(signal, stage, (values[name] - 1) / STEPS)


def _weigh(name: str, values: NDArray[np.uint8]) -> NDArray[np.float64]:
    """For each value of a column, what it counts; 0 if nothing was measured, or for a score of 0."""
    # two bytes at once, which is twice as fast
    pairs = np.bincount(values.view(np.uint16), minlength=1 << 16).reshape(1 << 8, 1 << 8)
    counts = pairs.sum(axis=0) + pairs.sum(axis=1)
    counts[0] = 0
    shares = np.maximum(1, np.cumsum(counts[::-1])[::-1]) / (counts.sum() + 1)
    scores = np.maximum(np.arange(1 << 8) - 1, 0) / STEPS
    gains: NDArray[np.float64] = WEIGHTS[name.split(":")[0]] * scores * -np.log(shares)
    return gains
