"""Exports all results to one file: CSV and Parquet with a column for each value (columns.py, parquet.py), or
JSON lines with complete records."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

from daemon import __version__
from daemon.config.state import closed_to_others
from daemon.core.cells import write_rows
from daemon.core.errors import WrongArgument
from daemon.core.files import PARQUET, SIDECAR, STDOUT, VERSION, written_whole
from daemon.core.hints import command, quantity
from daemon.core.labels import Kind, LookUp, no_labels
from daemon.core.notices import list_notices
from daemon.exports.choice import Chosen, ExportChoice
from daemon.exports.columns import ExportColumns, line_of
from daemon.exports.datasets import name_inboxes, write_folder, write_images
from daemon.exports.lance import load_library, write_lance
from daemon.exports.parquet import write_table
from daemon.ledger.record import UNKNOWN, Model, Record, describe_models
from daemon.ledger.records import Reader

UNREADABLE = "their files are gone, have changed since, or cannot be read"
FILES = ("csv", "jsonl", "parquet")
WITH_COLUMNS = ("csv", "parquet", "lance")
WITH_EMBEDDINGS = ("parquet", "lance")
# The files of an export: the rows, the list of their models, records, Parquet.
BEGINS = (
    b"id,inbox,path,",
    b"\xef\xbb\xbfid,inbox,path,",
    b"fingerprint,stage,",
    SIDECAR,
    PARQUET,
)

Step = Callable[[int, int | None], None]


def export_records(
    reader: Reader,
    file: Path,
    format: str,
    choice: ExportChoice,
    columns: ExportColumns,
    step: Step,
    *,
    inboxes: Mapping[bytes, str] = MappingProxyType({}),
    force: bool = False,
    mark: bool = False,
    half: bool = False,
    warn: Callable[[str], None] = lambda sentence: None,
) -> int:
    """Write the chosen images that are DONE to `file`, whole or not at all; returns how many.

    file: a file, STDOUT, or for formats that are not in FILES a folder. columns: of CSV, Parquet and Lance; if they have
    models, a second file beside CSV says what these are. step: called with the number of images written, and of all. inboxes:
    their names by their roots. force: replace what an export wrote. mark: begin CSV with a byte order mark. half: embeddings in
    half precision. Raises WrongArgument, NotWritable, MissingLibrary; LedgerDamaged, after all others, if images are damaged.
    """
    chosen, written, labelled = Chosen(reader, choice, columns), 0, 0
    columns = chosen.columns
    _check_options(file, format, columns, only_columns=chosen.has_columns_only, mark=mark, half=half)

    def count() -> Iterator[Record]:
        nonlocal written, labelled
        for written, record in enumerate(chosen, 1):
            labelled += bool(columns.labels(record.digest))
            yield record
            step(written, chosen.total)

    sizes = _embedding_sizes(reader, choice.bins, warn) if format in WITH_EMBEDDINGS else []
    writers: dict[str, Callable[[BinaryIO, Iterator[Record]], None]] = {
        "csv": functools.partial(write_csv, columns=columns, encoding="utf-8-sig" if mark else "utf-8"),
        "jsonl": functools.partial(write_jsonl, labels=columns.labels),
        "parquet": functools.partial(
            write_parquet, columns=columns, sizes=sizes, half=half, notes=lambda: note_models(chosen.models)
        ),
    }
    if format in FILES:
        others = [models_file(file)] if columns.has_models and format == "csv" else []
        _write_file(file, lambda out: writers[format](out, count()), chosen, reader.path, others, force=force)
        if format == "csv" and not others:
            _check_older(file, warn)
    else:
        left_out: list[str] = []
        said: dict[str, dict[Kind, str]] = {}
        names = name_inboxes(reader.inboxes().values(), inboxes)
        write_folder(
            file,
            lambda to: (
                write_lance(to, count(), columns, sizes, half=half)
                if format == "lance"
                else said.update(write_images(to, format, count(), names, left_out, columns, chosen.explain))
            ),
            lambda: {"visiond": __version__, "models": describe_models(chosen.models), "labels": said},
            force=force,
        )
        if left_out:
            warn(f"{quantity(len(left_out), 'image')} left out, as {UNREADABLE}; the first is {left_out[0]}.")
            written -= len(left_out)
    for line in _list_notes(chosen, columns, labelled):
        warn(f"Note: {line}.")
    chosen.check()
    return written


def _write_file(
    file: Path,
    write: Callable[[BinaryIO], None],
    chosen: Chosen,
    ledger: Path,
    others: Sequence[Path],
    *,
    force: bool,
) -> None:
    """others: a second file, for the models."""
    if file == STDOUT:
        write(sys.stdout.buffer)
        return
    with closed_to_others(), ExitStack() as stack:
        partials = [
            stack.enter_context(written_whole(each, ledger, force=force, begins=BEGINS))
            for each in (file, *others)
        ]
        with partials[0].open("wb") as out:
            write(out)
        for partial in partials[1:]:
            with partial.open("wb") as out:
                write_rows(out, describe_models([UNKNOWN])[0], describe_models(chosen.models))


def _list_notes(chosen: Chosen, columns: ExportColumns, labelled: int) -> Iterator[str]:
    """labelled: how many of the chosen images have labels of people."""
    if columns.labels is not no_labels:
        images = quantity(chosen.total, "image")
        yield f"people have labelled {labelled:,} of the {images} that were chosen"
    yield from list_notices((model.stage, model.notice) for model in chosen.models)


def _check_older(file: Path, warn: Callable[[str], None]) -> None:
    if file != STDOUT and (other := models_file(file)).exists():
        warn(f"{other} is of another export, not of {file}: delete it, or export with --models --force.")


def format_of(file: Path) -> str:
    """The format of the file's suffix; CSV for standard output. Raises WrongArgument."""
    suffix = file.suffix.removeprefix(".").lower()
    if file != STDOUT and suffix not in (known := (*FILES, "lance")):
        raise WrongArgument(
            f"{file} does not end in any of {', '.join(f'.{name}' for name in known)}. Choose the format, for example with "
            "--format csv."
        )
    return suffix or "csv"


def _check_options(
    file: Path, format: str, columns: ExportColumns, *, only_columns: bool, mark: bool, half: bool
) -> None:
    """only_columns: whether near-duplicates are looked for and change nothing but columns. Raises WrongArgument,
    MissingLibrary."""
    to_stdout, has_columns = file == STDOUT, format in WITH_COLUMNS
    refused = {
        f"{format} cannot be written to standard output; name a file, or use --format csv or jsonl.": (
            to_stdout and format not in ("csv", "jsonl")
        ),
        f"--bom is for CSV; {format} has no byte order mark.": mark and format != "csv",
        f"--float16 is for the embeddings of Parquet and Lance; {format} has none in a column.": (
            half and format not in WITH_EMBEDDINGS
        ),
        f"--near adds columns to CSV, Parquet and Lance; {format} has none. Add --unique to leave out near-duplicates, or "
        "--where with a condition on near_duplicate_of.": only_columns and not has_columns,
        f"{format} says which models gave the answers already; leave --models out.": (
            columns.has_models and not has_columns
        ),
        "--models writes a second file beside that of the rows; name a file instead of -.": (
            columns.has_models and to_stdout
        ),
    }
    if why := next(filter(refused.__getitem__, refused), ""):
        raise WrongArgument(why)
    if format == "lance":
        load_library(", or use --format parquet.")


def _embedding_sizes(reader: Reader, bins: Sequence[str], warn: Callable[[str], None]) -> list[int]:
    """The different lengths of the embeddings of these bins, or of all images, in order.
    Those of one model have one length."""
    answers = [msgspec.json.decode(payload) for payload in reader.answers_of_each_model("clip", bins)]
    sizes = sorted({answer["embedding"]["dim"] for answer in answers})
    if len(sizes) > 1:
        warn(
            f"Embeddings have several lengths ({', '.join(map(str, sizes))}): the column embedding has plain lists, not lists "
            f"of one size. `{command('redo', '--stale')}` processes all images with the current model."
        )
    return sizes


def write_csv(out: BinaryIO, records: Iterable[Record], columns: ExportColumns, encoding: str) -> None:
    """A row for each of these DONE images. encoding: "utf-8", or "utf-8-sig" to begin with a byte order mark."""
    write_rows(out, columns.kinds, map(columns.row_of, records), encoding)


def models_file(file: Path) -> Path:
    """Beside a file of rows, that of their models: results.models.csv for results.csv."""
    return file.with_name(f"{file.name.removesuffix('.csv')}.models.csv")


def note_models(models: Iterable[Model]) -> dict[bytes, bytes]:
    """For the metadata of a Parquet file: what its models are, and the version of visiond that wrote it."""
    known = msgspec.json.encode(describe_models(models))
    return {b"visiond.models": known, VERSION: __version__.encode()}


def write_jsonl(out: BinaryIO, records: Iterable[Record], labels: LookUp = no_labels) -> None:
    """A line for each of these images: its sidecar, with labels of people if there are any."""
    out.writelines(line_of(record, labels) for record in records)


def write_parquet(out: BinaryIO, records: Iterator[Record], columns: ExportColumns, **options: Any) -> None:
    """options: of `write_table`."""
    write_table(out, columns.rows_of(records), columns.kinds, **options)
