"""Near-duplicates of a ledger: groups of images whose embeddings are near the best one of the group."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import sqlite3
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
from daemon.ledger.files import sync_file
from daemon.ledger.publications import Picture
from daemon.ledger.records import Reader
from daemon.search.covering import Cosines, Cover, Leaders, Places, extend_cover, find_axes, shorten
from daemon.search.grouping import ONE_THREAD, Grouping, GroupingState
from daemon.search.index import SQL, Index, SearchUnusable, transaction
from daemon.search.matrix import PARTS, Rows, open_rows
from daemon.search.tower import receive, send
from daemon.system.ownership import hand_over, make_folder
from stages.contract import processes
from stages.registry.registry import BUILT_IN

BATCH = 256  # images that are added to groups at once
EXTEND_SECONDS = 1.0  # for which images are added while somebody waits
GROUPS = "groups"  # the folder of the leaders, in that of the index
AXES = "axes.npy"
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
SILENT_SECONDS = 900.0  # between two reports of the process; then it is killed

Note = Callable[[int, int], object]


class NearBest(NamedTuple):
    """An image of a group, mostly the best one, and the cosine with that."""

    best: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """images: their numbers, the best first. bytes: the sizes of their files. leaders: for each the place of the best image of
    its group, perhaps its own. rows: of their embeddings. without: images that have no embedding of the model, oldest first.
    model: its fingerprint. last: the last publication that was looked at."""

    near: float
    model: str
    last: int
    images: NDArray[np.int64]
    bytes: NDArray[np.int64]
    leaders: Places
    cosines: Cosines
    rows: Places
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
    plug_ins, last = _plug_ins(reader), index.about().place
    kinds = np.dtype([(name, "f8" if name == "sharpness" else "i8") for name in Picture._fields])
    with reader.lend() as ledger:
        pictures = np.fromiter(publications.read_pictures(ledger, last, bins, plug_ins), kinds)
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
    return Duplicates(near, model, last, ordered["image"], ordered["bytes"], *cover, rows[order], without)


class KeptGroups(NamedTuple):
    """What is known of the groups that were kept. last: the last publication of these images. made_at: Unix seconds, when the
    best ones were found. model, folder, leaders: as in the index. groups: how many there are, of at least two. others: images
    that are near a better one."""

    near: float
    images: int
    last: int
    made_at: float
    model: str
    folder: str
    leaders: int
    groups: int
    others: int


def keep_groups(index: Index, found: Duplicates) -> None:
    """For the page and the search, instead of those that were kept before. Raises SearchUnusable."""
    rows = [
        (*row, float(found.cosines[place]))
        for number, group in enumerate(found.groups())
        for at, place in enumerate(group)
        for row in [(int(found.images[place]), number, at)]
    ]
    leading = np.flatnonzero(found.leaders == np.arange(len(found.leaders)))
    images = found.images[leading]
    with index.lend() as connection, transaction(connection):
        exact = _open(index, found.model).exact
        folder = index.folder / GROUPS / secrets.token_hex(8)
        make_folder(folder.parent)
        make_folder(folder)
        axes = find_axes(exact, found.rows[leading], found.near)
        np.save(folder / AXES, axes)
        hand_over(folder / AXES)
        sync_file(folder / AXES)
        _append(folder, 0, images, found.rows[leading], shorten(exact, found.rows[leading], axes))
        for made in ("drop_duplicates", "drop_grouping", "drop_leaders"):
            connection.execute(SQL[made])
        connection.executemany(SQL["add_duplicate"], rows)
        connection.executemany(SQL["add_leader"], zip(images.tolist(), strict=True))
        about = (
            found.near,
            len(found.images),
            found.last,
            time.time(),
            found.model,
            folder.name,
            len(images),
        )
        connection.execute(SQL["note_grouping"], about)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def extend_groups(reader: Reader, index: Index, seconds: float = EXTEND_SECONDS) -> None:
    """Add the images that were published since, some hundred at a time, as if they had been the last of the order.
    seconds: after which no more are begun. Raises SearchUnusable."""
    ends = time.monotonic() + seconds
    while _extend_some(reader, index) and time.monotonic() < ends:
        pass


def _extend_some(reader: Reader, index: Index) -> bool:
    """Whether there may be more."""
    place = index.about().place
    if (kept := about_groups(index)) is None or kept.last >= place:
        return False
    with index.lend() as connection, transaction(connection):
        if not (row := connection.execute(SQL["grouping"]).fetchone()):  # another process has begun again
            return False
        kept = KeptGroups(*row)  # another process may have been faster
        matrix = _open(index, kept.model)
        start = int(np.searchsorted(matrix.numbers, kept.last, "right"))
        numbers = matrix.numbers[start : start + BATCH].tolist()
        with reader.lend() as ledger:
            shown = publications.read_shown(ledger, numbers)
        new = [
            (start + at, shown[number])
            for at, number in enumerate(numbers)
            if number in shown
            and not connection.execute(SQL["is_grouped"], {"image": shown[number]}).fetchone()
        ]
        rows, images = (np.array([each[part] for each in new], np.int64) for part in (0, 1))
        leading = _add(connection, index.folder / GROUPS / kept.folder, kept, matrix.exact, rows, images)
        last = place if len(numbers) < BATCH else numbers[-1]
        connection.execute(SQL["extend_grouping"], (len(new), last, leading))
    return len(numbers) == BATCH


def _add(
    connection: sqlite3.Connection,
    folder: Path,
    kept: KeptGroups,
    exact: NDArray[np.float16],
    rows: Places,
    images: NDArray[np.int64],
) -> int:
    """Returns how many of these images lead a group."""
    if not len(rows):
        return 0
    count = kept.leaders
    try:
        axes = np.load(folder / AXES)
        shape = (count, axes.shape[1] + 1)
        known, leaders = (np.fromfile(folder / name, np.int64, count) for name in ("images", "rows"))
        kept_rows = np.memmap(folder / "kept", np.float32, "r", shape=shape) if count else None
    except (OSError, ValueError, EOFError) as error:  # of a power failure, say
        raise SearchUnusable(
            f"the kept groups cannot be read: {error}. `visiond duplicates` makes them again."
        ) from error
    short = np.empty(shape, np.float32) if kept_rows is None else kept_rows
    found = extend_cover(exact, Leaders(leaders, short, axes), rows, kept.near)
    is_leading = found.leaders == count + np.arange(len(rows))
    everyone = np.concatenate([known, images])
    for at in np.flatnonzero(~is_leading).tolist():
        leader = int(everyone[found.leaders[at]])
        connection.execute(SQL["begin_group"], (leader,))
        joining = {"image": int(images[at]), "leader": leader, "cosine": float(found.cosines[at])}
        connection.execute(SQL["join_group"], joining)
    connection.executemany(SQL["add_leader"], zip(images[is_leading].tolist(), strict=True))
    _append(folder, count, images[is_leading], rows[is_leading], shorten(exact, rows[is_leading], axes))
    return int(np.count_nonzero(is_leading))


def _append(
    folder: Path, count: int, images: NDArray[np.int64], rows: Places, kept: NDArray[np.float32]
) -> None:
    """Write leaders behind the first `count`, durably. Raises OSError."""
    for name, part in (("images", images), ("rows", rows), ("kept", kept)):
        with os.fdopen(os.open(folder / name, FLAGS, 0o600), "r+b") as file:
            hand_over(folder / name)
            file.seek(count * part.itemsize * math.prod(part.shape[1:]))
            file.write(part.tobytes())
            file.flush()
            os.fdatasync(file.fileno())


def _open(index: Index, model: str) -> Rows:
    """Raises SearchUnusable."""
    try:
        return open_rows(*index.matrices()[model])
    except (KeyError, ValueError, OSError) as error:
        raise SearchUnusable(f"the embeddings in the search index cannot be read: {error}.") from error


def has_newer_model(index: Index, kept: KeptGroups) -> bool:
    """Whether the newest embedding is of another model: its images are in no group. Raises SearchUnusable."""
    newest = {model: int(_open(index, model).numbers[-1]) for model in index.matrices()}
    return max(newest, key=newest.__getitem__, default=kept.model) != kept.model


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


def read_grouped(reader: Reader, index: Index, group: str) -> Collection[int]:
    """The images of a group that a query names, or all that are near a better one. Raises SearchUnusable."""
    if group.isdecimal():
        return {*read_group_of(index, int(group))}
    return read_others(reader, index) if group else ()


def number_grouped(reader: Reader, index: Index, group: str) -> Collection[int]:
    """The publications of `read_grouped`. Raises SearchUnusable."""
    grouped = read_grouped(reader, index, group)
    with reader.lend() as ledger:
        return publications.read_shown_images(ledger, [*grouped]).values()


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
