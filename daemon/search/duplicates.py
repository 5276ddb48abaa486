"""Near-duplicates of a ledger: groups of images whose embeddings are near the best one of the group."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.ledger import publications
from daemon.ledger.publications import Picture
from daemon.ledger.records import Reader
from daemon.search.covering import Cosines, Cover, Places
from daemon.search.grouping import ONE_THREAD, Grouping, GroupingState
from daemon.search.index import SQL, Index, SearchUnusable, transaction
from daemon.search.matrix import PARTS
from daemon.search.tower import receive, send
from stages.contract import processes
from stages.registry.registry import BUILT_IN

SILENT_SECONDS = 900.0  # between two reports of the process; then it is killed

Note = Callable[[int, int], object]


class NearBest(NamedTuple):
    """An image of a group, mostly the best one, and the cosine with that."""

    best: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """images: their numbers, the best first. bytes: the sizes of their files. leaders: for each the place of the best image of
    its group, perhaps its own. without: images that have no embedding of the model, oldest first. model: its fingerprint."""

    near: float
    model: str
    images: NDArray[np.int64]
    bytes: NDArray[np.int64]
    leaders: Places
    cosines: Cosines
    without: list[int]

    @property
    def others(self) -> Places:
        """The places of the images that are near a better one."""
        return np.flatnonzero(self.leaders != np.arange(len(self.leaders)))

    @property
    def freed_bytes(self) -> int:
        """The size of the files of all images that are near a better one."""
        return int(self.bytes[self.others].sum())

    def groups(self) -> list[Places]:
        """The places of the images of each group of at least two, the best image first; the groups whose other files have
        most bytes first."""
        others = self.others
        by_leader = others[np.argsort(self.leaders[others], kind="stable")]
        leaders, starts = np.unique(self.leaders[by_leader], return_index=True)
        if not len(leaders):
            return []
        freed = np.add.reduceat(self.bytes[by_leader], starts)
        parts = np.split(by_leader, starts[1:])
        return [
            np.concatenate([leaders[group : group + 1], parts[group]])
            for group in np.lexsort((leaders, -freed))
        ]

    def better(self) -> dict[int, NearBest]:
        """By image, the best one of its group; without the best ones."""
        others = self.others
        best, cosines = self.images[self.leaders[others]], self.cosines[others]
        found = map(NearBest, best.tolist(), cosines.tolist())
        return dict(zip(self.images[others].tolist(), found, strict=True))


def find_duplicates(
    reader: Reader,
    index: Index,
    near: float,
    *,
    bins: Collection[str] = (),
    among: NDArray[np.int64] | None = None,
    note: Note = lambda done, total: None,
) -> Duplicates:
    """Group the images that are in the index, which is up to date. Takes minutes for a million. near: the least cosine, at
    most 0.999. bins, among: only images of these bins, and of these numbers. note: called with how many images have their
    group, and with all. Raises SearchUnusable."""
    plug_ins = _plug_ins(reader)
    kinds = np.dtype([(name, "f8" if name == "sharpness" else "i8") for name in Picture._fields])
    with reader.lend() as ledger:
        pictures = np.fromiter(publications.read_pictures(ledger, index.about().place, bins, plug_ins), kinds)
    if among is not None:
        pictures = pictures[np.isin(pictures["image"], among)]
    model, rows, (folder, count, dim) = _choose_model(index, pictures["number"])
    without = pictures["image"][rows < 0].tolist()
    pictures, rows = pictures[rows >= 0], rows[rows >= 0]
    order = np.lexsort((pictures["image"], -pictures["bytes"], -pictures["sharpness"], -pictures["pixels"]))
    threads = processes.count_cores()
    asked = Grouping(str(folder), count, dim, rows[order].astype(np.int64).tobytes(), near, threads)
    cover = group_rows(asked, lambda done: note(done, len(order)))
    ordered = pictures[order]
    return Duplicates(near, model, ordered["image"], ordered["bytes"], cover.leaders, cover.cosines, without)


class KeptGroups(NamedTuple):
    """What is known of the groups that were kept. last: the last publication by then. made_at: Unix seconds. groups: how many
    there are. others: images that are near a better one."""

    near: float
    images: int
    last: int
    made_at: float
    groups: int
    others: int


def keep_groups(index: Index, found: Duplicates) -> None:
    """For the page and the search, instead of those that were kept before. Raises SearchUnusable."""
    about = index.about()
    rows = [
        (*row, float(found.cosines[place]))
        for number, group in enumerate(found.groups())
        for at, place in enumerate(group)
        for row in [(int(found.images[place]), number, at)]
    ]
    with index.lend() as connection, transaction(connection):
        connection.execute(SQL["drop_duplicates"])
        connection.execute(SQL["drop_grouping"])
        connection.executemany(SQL["add_duplicate"], rows)
        connection.execute(SQL["note_grouping"], (found.near, len(found.images), about.place, time.time()))


def about_groups(index: Index) -> KeptGroups | None:
    """None if none were ever kept. Raises SearchUnusable."""
    with index.lend() as connection:
        row = connection.execute(SQL["grouping"]).fetchone()
    return KeptGroups(*row) if row else None


def read_groups(index: Index, first: int, count: int) -> list[list[NearBest]]:
    """Of these groups the images, the best first: each with its number, and the cosine with the best one. Raises
    SearchUnusable."""
    with index.lend() as connection:
        rows = connection.execute(SQL["groups"], (first, first + count)).fetchall()
    return [[NearBest(*row[1:]) for row in group] for _, group in groupby(rows, itemgetter(0))]


def read_group_of(index: Index, image: int) -> list[int]:
    """The images of its group, the best first; none if it has no group. Raises SearchUnusable."""
    with index.lend() as connection:
        return [row[0] for row in connection.execute(SQL["group_of"], (image,))]


def read_others(reader: Reader, index: Index) -> frozenset[int]:
    """The images that are near a better one that is still shown. Raises SearchUnusable."""
    with index.lend() as connection:
        rows = connection.execute(SQL["others"]).fetchall()
    with reader.lend() as ledger:
        shown = publications.read_shown_images(ledger, [*{best for _, best in rows}])
    return frozenset(image for image, best in rows if best in shown)


def _plug_ins(reader: Reader) -> list[int]:
    """The models of plug-ins, which may measure how sharp an image is."""
    names = {stage.name for stage in BUILT_IN}
    return [number for number, model in reader.models.items() if model.stage not in names]


def _choose_model(index: Index, numbers: Places) -> tuple[str, Places, tuple[Path, int, int]]:
    """The model that has embedded most of these publications, the row of each or -1, and its matrix. Embeddings of two models
    cannot be compared. Raises SearchUnusable."""
    best: tuple[int, str, Places, tuple[Path, int, int]] | None = None
    for maker, (folder, count, dim) in sorted(index.matrices().items()):
        try:
            known = np.fromfile(folder / "numbers", PARTS["numbers"], count)
        except OSError as error:
            raise SearchUnusable(f"the embeddings in the search index cannot be read: {error}.") from error
        places = np.minimum(np.searchsorted(known, numbers), max(0, len(known) - 1))
        rows = np.where(known[places] == numbers, places, -1) if len(known) else np.full(len(numbers), -1)
        having = int(np.count_nonzero(rows >= 0))
        if best is None or having > best[0]:
            best = having, maker, rows, (folder, count, dim)
    if best is None or (len(numbers) and not best[0]):
        raise SearchUnusable(
            "no image has an embedding, by which images are compared: the stage clip makes them; see [stages]."
        )
    return best[1:]


def group_rows(asked: Grouping, note: Callable[[int], object]) -> Cover:
    """Raises SearchUnusable."""
    child = subprocess.Popen(
        processes.python("-m", "daemon.search.grouping"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=processes.environment(ONE_THREAD),
    )
    assert child.stdin
    assert child.stdout
    try:
        for state in _listen(child, asked):
            if state.problem:
                raise SearchUnusable(f"images could not be compared: {state.problem}.")
            note(state.done)
            if state.is_last:
                return Cover(np.frombuffer(state.leaders, np.int64), np.frombuffer(state.cosines, np.float64))
    except (OSError, EOFError, msgspec.DecodeError):
        pass  # it was killed, perhaps as memory was short
    finally:
        child.kill()
        status = child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()
    raise SearchUnusable(
        f"the process that compares images {processes.describe_end(status)}; it needs about 1 KiB of memory for "
        "each image, and its output is above."
    )


def _listen(child: subprocess.Popen[bytes], asked: Grouping) -> Iterator[GroupingState]:
    assert child.stdin
    assert child.stdout
    send(child.stdin, msgspec.msgpack.encode(asked))
    while True:
        late = threading.Timer(SILENT_SECONDS, child.kill)
        late.start()
        try:
            message = receive(child.stdout)
        finally:
            late.cancel()
        yield msgspec.msgpack.decode(message, type=GroupingState)
