"""What an actor of Ray holds: an Annotator. It takes a unit of inputs and writes the part with their rows."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import msgspec

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from visiond.cluster.job import Shards
from visiond.cluster.places import open_place
from visiond.cluster.planning import Unit, from_table
from visiond.cluster.plans import Ids, part_of
from visiond.cluster.reading.fetching import Fetched, fetch, opened_threads
from visiond.cluster.reading.joining import Joiner
from visiond.cluster.reading.keeping import NOTHING, Kept
from visiond.cluster.reading.unpacking import ClusterUnpacker, Unpacked
from visiond.cluster.shards import shard_of, write_shard
from visiond.engine import Annotator

COUNTS = b"visiond.counts"  # in a part's own metadata: images by state


class ActorChain:
    """One chain of stages. Threads of the actor share it: while one unit is annotated, the next is read and the
    last is written. Units are read one after another: those that are read together would also end together, and the
    GPU would wait for their parts."""

    def __init__(
        self,
        config: bytes,
        output: str,
        root: str,
        shards: Shards = Shards.none,
        count_sharers: Callable[[], int] = lambda: 1,
        kept: Kept = NOTHING,
        float16: bool = False,
    ) -> None:
        """config: a Config as JSON. root: the folder or prefix of names. count_sharers: returns how many actors
        this machine has."""
        self._shards, self._joiner, self._float16 = shards, Joiner(kept), float16
        settings = Config.model_validate(msgspec.json.decode(config))
        self._annotator = Annotator(settings, sharers=count_sharers())
        self._output, self._root = open_place(output), root
        self._threads = opened_threads()
        self._turn = threading.Lock()  # the unit that is being read
        # An error of a constructor reaches the driver as text among tracebacks, and Ray would try again.
        self._problem: VisiondError | None = None
        self._unpacker: ClusterUnpacker | None = None
        try:
            if settings.inbox[0].unpack:
                self._unpacker = ClusterUnpacker(settings)
            self._annotator.load()
        except VisiondError as error:
            self._problem = error

    def __call__(self, table: Any) -> Any:
        """table: a unit's inputs. Returns a table with a row for each unit: its name, and its counts, or the problem
        that no other actor could solve either with its exit status."""
        import pyarrow as pa

        rows = []
        for unit in from_table(table):
            counts, problem = b"", self._problem
            try:
                counts = b"" if problem else self._finish(unit)
            except VisiondError as error:
                problem = error
            status = problem.exit_status if problem else 0
            rows.append((unit.name, counts, str(problem or ""), status))
        types = {"unit": pa.string(), "counts": pa.binary(), "problem": pa.string(), "status": pa.int64()}
        return pa.Table.from_pylist(
            [dict(zip(types, row, strict=True)) for row in rows], pa.schema([*types.items()])
        )

    def close(self) -> None:
        """End its workers. An actor is killed instead, and they end with it."""
        self._annotator.close()
        self._threads.shutdown()

    def _finish(self, unit: Unit) -> bytes:
        """Write the part, or find that it exists: then another actor has done the same. Returns its counts."""
        part = part_of(unit.name)
        if counts := self._find(part):
            return counts
        fetched: list[Fetched] = []
        inputs, joiner, keeps = unit.inputs(), self._joiner, self._shards is Shards.images
        found = fetch(inputs, self._threads, self._unpacker, joiner.endings)
        images = _in_turn(self._turn, _noting(found, fetched, keeps=keeps))
        with contextlib.closing(images):
            records = self._annotator.records(images, self._root)
        counts = msgspec.json.encode(Counter(record.status.name for record in records))
        numbers = number_rows(fetched, unit.ids)
        if self._shards:  # first, as a unit is finished when its part exists
            shard = write_shard(records, numbers, [image.data for image in fetched], self._shards)
            self._output.write_whole(shard_of(unit.name), shard)
        file = io.BytesIO()
        further = joiner.join(inputs, fetched)
        self._annotator.rows.write(file, records, numbers, further, {COUNTS: counts}, half=self._float16)
        self._output.write_whole(part, file.getvalue())
        return counts

    def _find(self, part: str) -> bytes:
        """The counts in a part that exists; empty if it does not."""
        import pyarrow.parquet

        try:
            data = self._output.read(part)
        except FileNotFoundError:
            return b""
        counts: bytes = pyarrow.parquet.read_metadata(io.BytesIO(data)).metadata[COUNTS]
        return counts


def _in_turn(turn: threading.Lock, images: Iterable[Unpacked]) -> Generator[Unpacked]:
    with turn:
        yield from images


def _noting(images: Iterable[Fetched], noted: list[Fetched], *, keeps: bool) -> Iterator[Unpacked]:
    """Pass images on, and note each; keeps: with its bytes."""
    for image in images:
        noted.append(image if keeps else image._replace(data=b""))
        yield image.name, image.data


def number_rows(fetched: Iterable[Fetched], ids: Ids) -> list[int]:
    """A number for each row. ids: of the unit's inputs."""
    seen: Counter[bytes] = Counter()
    numbers = []
    for image in fetched:
        seen[image.name] += 1
        numbers.append(_number(int(ids[image.place]), image.name, seen[image.name]))
    return numbers


def _number(input_id: int, name: bytes, times: int) -> int:
    """A number for a row, which is the same in each run: 63 bits, as columns of Parquet are signed."""
    text = b"%d\0%s\0%d" % (input_id, name, times)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
