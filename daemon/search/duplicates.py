"""Near-duplicates of a ledger: groups of images whose embeddings are near the best one of the group."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.core.errors import SearchUnusable
from daemon.ledger import publications
from daemon.ledger.publications import Picture
from daemon.ledger.records import Reader
from daemon.search.covering import Cosines, Leaders, Places, extend_cover, find_axes, shorten
from daemon.search.grouping import Grouping, group_rows
from daemon.search.index import SQL, Index, transaction
from daemon.search.matrix import PARTS, Rows, open_rows
from daemon.system.ownership import hand_over, make_folder
from stages.contract import processes
from stages.contract.folders import sync

BATCH = 256  # images that are added to groups at once
EXTEND_SECONDS = 1.0  # for which images are added while somebody waits
GROUPS = "groups"  # the folder of the leaders, in that of the index
AXES = "axes.npy"
AGAIN = "the search index or its groups were made again meanwhile: run `visiond duplicates` again."
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

Note = Callable[[int, int], object]


class NearBest(NamedTuple):
    """An image of a group, mostly the best one, and the cosine with that."""

    best: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """images: their numbers, the best first. numbers: of their publications. bytes: the sizes of their files. leaders: for each
    the place of the best image of its group, perhaps its own. rows: of their embeddings. without: images that have no embedding
    of the model, oldest first. model: its fingerprint. last: the last publication that was looked at."""

    near: float
    model: str
    last: int
    images: NDArray[np.int64]
    numbers: NDArray[np.int64]
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
    by: str = "clip",
    bins: Collection[str] = (),
    among: NDArray[np.int64] | None = None,
    note: Note = lambda done, total: None,
) -> Duplicates:
    """Group the images that are in the index, which is up to date. Takes minutes for a million. near: the least cosine, at
    most 0.999. by: the stage whose results are compared, clip or hash. bins, among: only images of these bins, and of these
    numbers. note: called with how many images have their group, and how many there are. Raises SearchUnusable."""
    last, kinds = index.about().place, np.dtype([(name, "i8") for name in Picture._fields])
    with reader.lend() as ledger:
        pictures = np.fromiter(publications.read_pictures(ledger, last, bins), kinds)
    if among is not None:
        pictures = pictures[np.isin(pictures["image"], among)]
    model, rows, (folder, count, dim) = _choose_model(reader, index, by, pictures["number"])
    without = pictures["image"][rows < 0].tolist()
    pictures, rows = pictures[rows >= 0], rows[rows >= 0]
    sharpness = _read_part(folder, "sharpness", count)[rows]
    order = np.lexsort((pictures["image"], -pictures["bytes"], -sharpness, -pictures["pixels"]))
    threads = processes.count_cores()
    asked = Grouping(str(folder), count, dim, rows[order].astype(np.int64).tobytes(), near, threads)
    cover = group_rows(asked, lambda done: note(done, len(order)))
    ordered = pictures[order]
    images, numbers, sizes = (ordered[name] for name in ("image", "number", "bytes"))
    return Duplicates(near, model, last, images, numbers, sizes, *cover, rows[order], without)


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
    """For the page and the search, instead of those that were kept before. The index can be written while its leaders are
    read. Raises SearchUnusable."""
    rows = [
        (int(found.images[place]), int(found.numbers[place]), number, at, float(found.cosines[place]))
        for number, group in enumerate(found.groups())
        for at, place in enumerate(group)
    ]
    leading = np.flatnonzero(found.leaders == np.arange(len(found.leaders)))
    folder = index.folder / GROUPS / secrets.token_hex(8)
    about = (found.near, len(found.images), found.last, time.time(), found.model, folder.name, len(leading))
    with index.lend() as connection:
        exact = _open_same(index, found).exact
        axes = find_axes(exact, found.rows[leading], found.near)
        kept = shorten(exact, found.rows[leading], axes)
        try:
            make_folder(folder.parent)
            make_folder(folder)
            np.save(folder / AXES, axes)
            hand_over(folder / AXES)
            sync(folder / AXES)
            _append(folder, 0, found.images[leading], found.rows[leading], kept)
        except OSError as error:
            if not folder.exists():  # as below
                raise SearchUnusable(AGAIN) from error
            raise
        with transaction(connection):
            _open_same(index, found)
            if not folder.exists():  # another process has kept its groups, and removed this folder
                raise SearchUnusable(AGAIN)
            for made in ("drop_duplicates", "drop_grouping"):
                connection.execute(SQL[made])
            connection.executemany(SQL["add_duplicate"], rows)
            connection.execute(SQL["note_grouping"], about)
        # A folder of another process is complete before that gets the lock, or is lost.
        with transaction(connection):
            [current] = connection.execute(SQL["groups_folder"]).fetchone() or ("",)
            for other in folder.parent.iterdir():
                if other.name != current:
                    shutil.rmtree(other, ignore_errors=True)


def _open_same(index: Index, found: Duplicates) -> Rows:
    """Raises SearchUnusable, also if the rows are no longer those that were compared."""
    matrix = _open(index, found.model)
    if not np.array_equal(_rows_of(matrix.numbers, found.numbers), found.rows):
        raise SearchUnusable(AGAIN)
    return matrix


def extend_groups(reader: Reader, index: Index) -> None:
    """Add the images that were published since, some hundred at a time, as if they had been the last of the order. The index
    can be written while they are compared. After EXTEND_SECONDS no more are begun. Raises SearchUnusable."""
    ends = time.monotonic() + EXTEND_SECONDS
    while _extend_some(reader, index) and time.monotonic() < ends:
        pass


def _extend_some(reader: Reader, index: Index) -> bool:
    """Whether there may be more."""
    place = index.about().place
    if (kept := about_groups(index)) is None or kept.last >= place:
        return False
    folder = index.folder / GROUPS / kept.folder
    with reader.lend() as ledger:
        shown = publications.read_shown_after(ledger, kept.last, BATCH)
    shown = {number: image for number, image in shown.items() if number <= place}
    numbers, images = np.array([*shown], np.int64), np.array([*shown.values()], np.int64)
    matrix = _open(index, kept.model)
    rows = _rows_of(matrix.numbers, numbers)
    with index.lend() as connection:
        try:
            known, leaders = _read_leaders(folder, kept.leaders)
        except (OSError, ValueError, EOFError) as error:  # for example after a power failure
            if about_groups(index) != kept:
                return True
            raise SearchUnusable(
                f"the kept groups cannot be read: {error}. `visiond duplicates` makes them again."
            ) from error
        grouped = [row[0] for row in connection.execute(SQL["grouped"], (_json(images),))]
        new = np.flatnonzero((rows >= 0) & ~np.isin(images, known) & ~np.isin(images, grouped))
        found = extend_cover(matrix.exact, leaders, rows[new], kept.near)
        leading = new[found.leaders == len(known) + np.arange(len(new))]
        short = shorten(matrix.exact, rows[leading], leaders.axes)
        best = np.concatenate([known, images[new]])[found.leaders]
        with transaction(connection):
            if connection.execute(SQL["grouping"]).fetchone() != kept:
                return True  # another process was faster
            connection.executemany(
                SQL["note_publication"], zip(numbers.tolist(), images.tolist(), strict=True)
            )
            for at, leader, cosine in zip(new.tolist(), best.tolist(), found.cosines.tolist(), strict=True):
                if images[at] != leader:
                    connection.execute(SQL["begin_group"], (leader,))
                    joining = {"image": int(images[at]), "publication": int(numbers[at])}
                    connection.execute(SQL["join_group"], joining | {"leader": leader, "cosine": cosine})
            _append(folder, len(known), images[leading], rows[leading], short)
            last = int(numbers[-1]) if len(numbers) == BATCH else place
            connection.execute(SQL["extend_grouping"], (len(new), last, len(leading)))
    return len(numbers) == BATCH


def _read_leaders(folder: Path, count: int) -> tuple[NDArray[np.int64], Leaders]:
    """The images that lead a group, also one of their own. Raises OSError, ValueError, EOFError."""
    axes = np.load(folder / AXES)
    shape = (count, axes.shape[1] + 2)
    images, rows = (np.fromfile(folder / name, np.int64, count) for name in ("images", "rows"))
    if len(images) < count or len(rows) < count:
        raise EOFError(f"{folder} does not have all of its {count:,} leaders")
    kept = np.memmap(folder / "kept", np.float32, "r", shape=shape) if count else np.empty(shape, np.float32)
    return images, Leaders(rows, kept, axes)


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


def stage_of(reader: Reader, kept: KeptGroups) -> str:
    """The stage whose results were compared."""
    return next((model.stage for model in reader.models.values() if model.fingerprint == kept.model), "clip")


def _matrices(reader: Reader, index: Index, stage: str) -> dict[str, tuple[Path, int, int]]:
    """Of the models of a stage. Raises SearchUnusable."""
    makers = {model.fingerprint for model in reader.models.values() if model.stage == stage}
    return {maker: about for maker, about in index.matrices().items() if maker in makers}


def has_newer_model(reader: Reader, index: Index, kept: KeptGroups) -> bool:
    """Whether the newest result of the stage is of another model: its images are in no group. Raises SearchUnusable."""
    makers = _matrices(reader, index, stage_of(reader, kept))
    newest = {model: int(_open(index, model).numbers[-1]) for model in makers}
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


def choose_grouped(reader: Reader, index: Index, group: str, images: Collection[int]) -> Collection[int]:
    """Those of these images that are in the group of a query. "others": those near a better image that is still shown.
    Raises SearchUnusable."""
    if not group:
        return {*images}
    if group.isdecimal():
        return {*images}.intersection(read_group_of(index, int(group)))
    with index.lend() as connection:
        better = dict(connection.execute(SQL["better"], (_json(images),)).fetchall())
    with reader.lend() as ledger:
        shown = publications.read_shown_images(ledger, [*{*better.values()}])
    others = {image for image, best in better.items() if best in shown}
    return others if group == "others" else {*images} - others


def number_grouped(reader: Reader, index: Index, group: str) -> NDArray[np.int64]:
    """All publications that `choose_grouped` may choose for a group that is not "best". Raises SearchUnusable."""
    if group.isdecimal():
        images = read_group_of(index, int(group))
    else:
        with index.lend() as connection:
            found = np.array(connection.execute(SQL["others"]).fetchall(), np.int64).reshape(-1, 2)
        if (kept := about_groups(index)) and kept.last >= index.about().place:
            return found[:, 0]
        images = found[:, 1].tolist()  # those that were published again since have other numbers
    with reader.lend() as ledger:
        return np.array([*publications.read_shown_images(ledger, images).values()], np.int64)


def _json(numbers: Collection[int] | NDArray[np.int64]) -> str:
    return msgspec.json.encode(numbers.tolist() if isinstance(numbers, np.ndarray) else [*numbers]).decode()


def _choose_model(
    reader: Reader, index: Index, by: str, numbers: Places
) -> tuple[str, Places, tuple[Path, int, int]]:
    """The model of this stage that most of these publications have results of, the row of each or -1, and its matrix. Results
    of two models cannot be compared. Raises SearchUnusable."""
    best: tuple[int, str, Places, tuple[Path, int, int]] | None = None
    for maker, (folder, count, dim) in sorted(_matrices(reader, index, by).items()):
        rows = _rows_of(_read_part(folder, "numbers", count), numbers)
        having = int(np.count_nonzero(rows >= 0))
        if best is None or having > best[0]:
            best = having, maker, rows, (folder, count, dim)
    if best is None or (len(numbers) and not best[0]):
        raise SearchUnusable(
            f"no image has a result of the stage {by}, which is what is compared. Name it in [pipeline] stages, then type "
            "`visiond redo --stale`."
        )
    return best[1:]


def _read_part(folder: Path, name: str, count: int) -> NDArray[Any]:
    """Of the files of a matrix. Raises SearchUnusable."""
    try:
        return np.fromfile(folder / name, PARTS[name], count)
    except OSError as error:
        raise SearchUnusable(f"the embeddings in the search index cannot be read: {error}.") from error


def _rows_of(known: NDArray[np.int64], numbers: NDArray[np.int64]) -> Places:
    """Where these numbers are; -1: nowhere. known: ascending."""
    places = np.minimum(np.searchsorted(known, numbers), max(0, len(known) - 1))
    return np.where(known[places] == numbers, places, -1) if len(known) else np.full(len(numbers), -1)
