"""Exports all results to one file: CSV and Parquet with a column for each value (columns.py, parquet.py), or
JSON lines with complete records."""

from __future__ import annotations

import csv
import functools
import io
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

from daemon import __version__
from daemon.config.loading import Config
from daemon.config.state import closed_to_others
from daemon.core.errors import WrongArgument
from daemon.core.hints import command, quantity
from daemon.formats.formats import FOLDERS, WITH_IMAGES
from daemon.ledger.files import STDOUT, written_whole
from daemon.ledger.record import UNKNOWN, Model, Record, describe_models
from daemon.ledger.records import Reader
from daemon.monitoring.notices import list_notices
from daemon.results.choice import Chosen, ExportChoice
from daemon.results.columns import ExportColumns
from daemon.results.datasets import keep_files, name_images, name_inboxes, write_folder
from daemon.results.parquet import write_table
from daemon.system.mounts import Position, ask

# At the start of a cell. Some programs ignore spaces before it, or what nobody sees (control characters, the byte order mark,
# and the rest of Unicode's Default_Ignorable_Code_Point), or accept wide and small characters.
_UNSEEN = (
    r"\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
FORMULA = re.compile(rf"[{_UNSEEN}]*[=+\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b]|[\t\r\n]")
FILES = ("csv", "jsonl", "parquet")

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

    file: a file, STDOUT, or for the formats in FOLDERS a folder. columns: of CSV and Parquet; if they have models, a second
    file beside CSV says what these are. step: called with the number of images written, and of all. inboxes: their names by
    their roots, for names of images in a folder. force: replace what an export wrote. mark: begin CSV with a byte order mark.
    half: embeddings in half precision. warn: called with what a reader of the file should know. Raises WrongArgument,
    NotWritable, MissingLibrary; LedgerDamaged, after writing all others, when some images are damaged.
    """
    _check_options(file, format, columns, choice, mark=mark, half=half)
    chosen, written = Chosen(reader, choice, columns), 0
    columns = chosen.columns

    def count() -> Iterator[Record]:
        nonlocal written
        for written, record in enumerate(chosen, 1):
            yield record
            step(written, chosen.total)

    if format in FOLDERS:
        left_out: list[str] = []
        images = name_images(count(), name_inboxes(reader.inboxes().values(), inboxes), left_out)
        images = keep_files(images, format) if format in WITH_IMAGES else images
        write_folder(
            file,
            lambda folder: FOLDERS[format](folder, images),
            lambda: {"visiond": __version__, "models": describe_models(chosen.models)},
            force=force,
        )
        if left_out:
            why = "their files are gone, have changed since, or cannot be read"
            warn(f"{quantity(len(left_out), 'image')} left out, as {why}; the first is {left_out[0]}.")
            written -= len(left_out)
    else:
        sizes = _embedding_sizes(reader, choice.bins, warn) if format == "parquet" else []
        writers: dict[str, Callable[[BinaryIO, Iterator[Record]], None]] = {
            "csv": functools.partial(write_csv, columns=columns, encoding="utf-8-sig" if mark else "utf-8"),
            "jsonl": write_jsonl,
            "parquet": functools.partial(
                write_parquet,
                columns=columns,
                sizes=sizes,
                half=half,
                notes=lambda: note_models(chosen.models),
            ),
        }
        others = [models_file(file)] if columns.has_models and format == "csv" else []
        _write_file(file, lambda out: writers[format](out, count()), chosen, reader.path, others, force=force)
        if format == "csv" and not others and file != STDOUT and models_file(file).exists():
            other = models_file(file)
            warn(f"{other} is of another export, not of {file}: delete it, or export with --models --force.")
    for line in list_notices((model.stage, model.notice) for model in chosen.models):
        warn(f"Note: {line}.")
    chosen.check()
    return written


def check_target(config: Config, file: Path, own: Path | None = None) -> None:
    """Raises WrongArgument if a file, or a folder, would be written where the daemon looks for images or keeps its results, or
    in the place of `own`, the file of the configuration. A mount that does not answer is not asked."""
    if own and file.resolve() == own.resolve():
        raise WrongArgument(f"{file} is the configuration. Name another file.")
    if "jsonl" in config.output.sinks and file.resolve() == config.output.jsonl_file.resolve():
        raise WrongArgument(f"The daemon appends the records of the sink jsonl to {file}. Name another file.")
    if file != STDOUT and (holder := ask(lambda: next(_list_holders(config, file), ""))):
        raise WrongArgument(f"{file} is inside {holder}. Name a file elsewhere.")


def _list_holders(config: Config, file: Path) -> Iterator[str]:
    """The daemon's folders that a file or a folder of this name would be in, in words."""
    here, parent = Position.of(file), Position.of(file.absolute().parent)
    for inbox in config.inbox:
        if not inbox.url:
            there = Position.of(inbox.path)
            if here.is_within(there) and (inbox.recursive or there.is_within(parent)):
                yield f"the inbox {inbox.path}, where the daemon takes every file for a new one"
    output = config.output
    own = {
        "for results of the daemon": output.results,
        "for failed of the daemon": output.failed,
        "for done of the daemon": output.done,
        "for bins of the daemon": output.bins_folder,
        "for the state of the daemon": config.state.path,
        **{f"of the sink {sink}": folder for sink, folder in output.sink_folders.items()},
    }
    for whose, folder in own.items():
        if here.is_within(Position.of(folder)):
            yield f"{folder}, the folder {whose}"


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
        partials = [stack.enter_context(written_whole(each, ledger, force=force)) for each in (file, *others)]
        with partials[0].open("wb") as out:
            write(out)
        for partial in partials[1:]:
            with partial.open("wb") as out:
                _write_rows(out, describe_models([UNKNOWN])[0], describe_models(chosen.models))


def format_of(file: Path) -> str:
    """The format of the file's suffix; CSV for standard output. Raises WrongArgument."""
    suffix = file.suffix.removeprefix(".").lower()
    if file != STDOUT and suffix not in FILES:
        raise WrongArgument(
            f"{file} does not end in any of {', '.join(f'.{name}' for name in FILES)}. Choose the format, for example with "
            "--format csv."
        )
    return suffix or "csv"


def _check_options(
    file: Path, format: str, columns: ExportColumns, choice: ExportChoice, *, mark: bool, half: bool
) -> None:
    """Raises WrongArgument."""
    if file == STDOUT and format not in ("csv", "jsonl"):
        raise WrongArgument(
            f"{format} cannot be written to standard output; name a file, or use --format csv or jsonl."
        )
    if mark and format != "csv":
        raise WrongArgument(f"--bom is for CSV; {format} has no byte order mark.")
    if half and format != "parquet":
        raise WrongArgument(f"--float16 is for the embeddings of Parquet; {format} has none in a column.")
    if choice.near and not choice.unique and format not in ("csv", "parquet"):
        raise WrongArgument(
            f"--near adds columns to CSV and Parquet; {format} has none. Add --unique to leave out near-duplicates."
        )
    if columns.has_models and format not in ("csv", "parquet"):
        raise WrongArgument(f"{format} says which models gave the answers already; leave --models out.")
    if columns.has_models and file == STDOUT:
        raise WrongArgument(
            "--models writes a second file beside that of the rows; name a file instead of -."
        )


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
    _write_rows(out, columns.kinds, map(columns.row_of, records), encoding)


def _write_rows(
    out: BinaryIO, header: Collection[str], rows: Iterable[dict[str, Any]], encoding: str = "utf-8"
) -> None:
    text = io.TextIOWrapper(out, encoding=encoding, newline="")
    writer = csv.DictWriter(text, header)
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    text.detach()  # flushes, and keeps `out` open


def models_file(file: Path) -> Path:
    """Beside a file of rows, that of their models: results.models.csv for results.csv."""
    return file.with_name(f"{file.name.removesuffix('.csv')}.models.csv")


def note_models(models: Iterable[Model]) -> dict[bytes, bytes]:
    """For the metadata of a Parquet file: what its models are, and the version of visiond that wrote it."""
    known = msgspec.json.encode(describe_models(models))
    return {b"visiond.models": known, b"visiond.version": __version__.encode()}


def _cell(value: Any) -> Any:
    """A list or table as JSON, since labels may contain any character. A text that starts like a formula gets a quote,
    as a spreadsheet would run it, and anyone can put text on an image."""
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def write_jsonl(out: BinaryIO, records: Iterable[Record]) -> None:
    """The sidecar of each of these images, which is a line."""
    out.writelines(record.sidecar for record in records)


def write_parquet(out: BinaryIO, records: Iterator[Record], columns: ExportColumns, **options: Any) -> None:
    """options: of `write_table`."""
    documents = ((record, msgspec.json.decode(record.sidecar)) for record in records)
    rows = ((columns.row_of(record, document), document) for record, document in documents)
    write_table(out, rows, columns.kinds, **options)
