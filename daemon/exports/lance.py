"""Lance: an export of all results, and a sink, whose data set has a row for each image and a version for each group."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.state import IDENTITY
from daemon.core.errors import MissingLibrary, NotWritable, VisiondError
from daemon.core.files import sync_folders
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.exports.columns import ExportColumns
from daemon.exports.parquet import CHUNK, make_schema, make_tables
from daemon.ledger import identity
from daemon.ledger.record import Record
from daemon.system.mounts import KnownFolder, describe_closed

FORMAT = "2.2"  # of the files: the first that has maps
LEDGER_KEY = b"visiond.ledger"  # in the schema's metadata: the id of the ledger whose numbers the rows have
MAGIC = b"LANC"  # the last bytes of a manifest, which lists the files of a version
FRAGMENTS = 64  # small files of rows are merged when there are so many
ROWS = 8192  # a file with fewer rows is small
KEPT = timedelta(minutes=10)  # how long old versions stay, for programs that are reading them


def load_library(otherwise: str = "") -> Any:
    """otherwise: what else the user can do. Raises MissingLibrary."""
    os.environ.setdefault("LANCE_LOG", "error")  # else it prints a line when it makes a data set
    # What the daemon forks becomes another program at once, in which nothing of Lance is left.
    warnings.filterwarnings("ignore", "lance is not fork-safe")
    try:
        import lance
        import lance.optimize
    except ImportError as error:
        raise MissingLibrary(f"Lance needs pylance: pip install 'visiond[lance]'{otherwise}") from error
    return lance


def write_lance(
    folder: Path,
    records: Iterable[Record],
    columns: ExportColumns,
    sizes: Collection[int],
    *,
    half: bool = False,
) -> None:
    """Make a data set with a row for each of these DONE images, as one version, in an empty folder. sizes, half: as of
    `make_schema`. Raises MissingLibrary."""
    lance = load_library()
    import pyarrow

    # Group by group: Lance would read a single stream in a thread of its own, and turn what that raises into its own errors.
    schema = make_schema(columns.kinds, sizes, half=half)
    tables, files = make_tables(columns.rows_of(records), schema), []
    while group := [*itertools.islice(tables, ROWS // CHUNK)]:
        table = pyarrow.concat_tables(group)
        files += lance.fragment.write_fragments(table, folder, data_storage_version=FORMAT)
    lance.LanceDataset.commit(folder, lance.LanceOperation.Overwrite(schema, files))


class LanceSink:
    """Records that are DONE: a row for each image in <results>.lance, with its last state.

    A version is a group of records, whole or not at all. Its rows replace those with the same `id`, so a group that comes again
    after a crash leaves one row for each image too. Another ledger gives the same numbers to other images, so a data set takes
    the rows of one ledger only.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = config.output.folder_of("lance")
        self._folder = os.fsencode(self._path)
        self._known = KnownFolder(self._folder)
        self._is_sound = False  # the newest version is known to be complete

    @cached_property
    def _columns(self) -> ExportColumns:
        return ExportColumns(self._config.stage_names, models=True)

    def problem(self) -> str:
        try:
            lance = load_library()
            # A data set that cannot be opened is not judged here: `_open` makes a new one, or removes a torn version.
            with contextlib.suppress(OSError, ValueError):
                if identity.read(self._config.state.path):  # else there is no ledger yet
                    self._check_ledger(lance.dataset(self._path))
        except VisiondError as error:
            return str(error)
        return describe_closed(self._path)

    async def append(self, records: Sequence[Record]) -> None:
        """Raises NotWritable, MissingLibrary, OSError."""
        last = {record.id: record for record in records if record.status is JobStatus.DONE}
        if last:
            await to_thread.run_sync(self._put, [*last.values()], abandon_on_cancel=True)

    def _put(self, records: Sequence[Record]) -> None:
        lance = load_library()
        self._known.check()
        try:
            rows = [*self._columns.rows_of(records)]
            sizes = {doc["clip"]["embedding"]["dim"] for _, doc in rows if "clip" in doc}
            schema = make_schema(self._columns.kinds, sizes)
            dataset = self._open(lance, schema if sizes else schema.remove(len(schema) - 1))
            self._check_sizes(dataset, sizes)
            [table] = make_tables(iter(rows), schema)
            put = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            change, _ = put.execute_uncommitted(_fit(table, dataset.schema))
            sync_folders([self._folder])  # a version must not be on the disk before its rows are
            dataset = lance.LanceDataset.commit(dataset, change)
            sync_folders([self._folder])
            self._is_sound = True
            self._compact(lance, dataset)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            # An error of Lance, which has no errno and ends with a place in Lance's code, or one of Arrow.
            raise NotWritable(
                f"{self._path} does not take the records: {str(error).partition(', /')[0]}. "
                f"If that stays so, {_way_out()}"
            ) from error
        self._known.check()

    def _open(self, lance: Any, schema: Any) -> Any:
        """The data set, with all these columns; older rows have nothing in new ones."""
        if not self._is_sound and not _has_version(self._path / "_versions"):
            empty = schema.with_metadata({LEDGER_KEY: self._ledger}).empty_table()
            return lance.write_dataset(empty, self._path, data_storage_version=FORMAT)
        dataset = lance.dataset(self._path)
        self._check_ledger(dataset)
        if new := [field for field in schema if field.name not in dataset.schema.names]:
            dataset.add_columns(new)
        return dataset

    @cached_property
    def _ledger(self) -> str:
        """Its id. Raises NotWritable, IdentityDamaged, OSError."""
        if known := identity.read(self._config.state.path):
            return known.ledger
        raise NotWritable(
            f"{self._config.state.path / IDENTITY}, which says which ledger this is, is lost. Restart the daemon: it writes "
            "the file again"
        )

    def _check_ledger(self, dataset: Any) -> None:
        """Raises NotWritable, IdentityDamaged, OSError."""
        if (dataset.schema.metadata or {}).get(LEDGER_KEY) != self._ledger.encode():
            raise NotWritable(
                f"{self._path} has rows of another ledger, where other images may have the same `id`. Nothing is written "
                f"there. To go on, {_way_out()}"
            )

    def _check_sizes(self, dataset: Any, sizes: set[int]) -> None:
        """Raises NotWritable."""
        kind = dataset.schema.field("embedding").type if sizes else None
        there = getattr(kind, "list_size", 0)  # plain lists have none
        if there and (other := sizes - {there}):
            raise NotWritable(
                f"{self._path} has embeddings of {there} numbers, and those of the model have {min(other)}. "
                f"To go on, {_way_out()}"
            )

    def _compact(self, lance: Any, dataset: Any) -> None:
        """Merge small files of rows, and remove old versions that have no tag."""
        small = [each for each in dataset.get_fragments() if each.physical_rows < ROWS]
        if len(small) < FRAGMENTS:
            return
        compaction = lance.optimize.Compaction
        plan = compaction.plan(dataset, {"target_rows_per_fragment": ROWS})
        rewritten = [task.execute(dataset) for task in plan.tasks]
        sync_folders([self._folder])
        compaction.commit(dataset, rewritten)
        sync_folders([self._folder])
        lance.dataset(self._path).cleanup_old_versions(KEPT, error_if_tagged_old_versions=False)


def _way_out() -> str:
    return (
        "move that folder away and restart the daemon: the sink makes a new one, and "
        f"`{command('redo', '--all')}` writes the rows of older images"
    )


def _has_version(folder: Path) -> bool:
    """Whether there is a complete version. One that a power failure has left incomplete is removed: its records come again, as
    the sink's place in the ledger moves only when a version is on the disk."""
    for file in sorted(folder.glob("*.manifest")):  # their names count down
        if file.read_bytes().endswith(MAGIC):
            return True
        file.unlink()
    return False


def _fit(table: Any, schema: Any) -> Any:
    """The table with the columns of the data set, in their order. A column that the table lacks is null: that of a stage that
    is no longer configured, or the embedding if no image has one."""
    import pyarrow

    columns = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pyarrow.nulls(len(table), field.type)
        for field in schema
    ]
    return pyarrow.table(columns, schema)
