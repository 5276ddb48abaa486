"""Exports all results to one file: CSV and Parquet with a column for each value (columns.py, parquet.py), or
JSON lines with complete records."""

from __future__ import annotations

import csv
import functools
import io
import math
import random
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import structs

from daemon import __version__
from daemon.config.state import closed_to_others
from daemon.core.errors import LedgerDamaged, WrongArgument
from daemon.core.hints import command, quantity
from daemon.ledger.files import STDOUT, written_whole
from daemon.ledger.record import UNKNOWN, Model, Record
from daemon.ledger.records import Reader
from daemon.results.columns import Columns
from daemon.results.parquet import write_table
from stages.contract.binning import BINS

# At the start of a cell. Some programs ignore spaces before it, or what nobody sees (control characters, the byte order mark,
# and the rest of Unicode's Default_Ignorable_Code_Point), or accept wide and small characters.
_UNSEEN = (
    r"\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
FORMULA = re.compile(rf"[{_UNSEEN}]*[=+\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b]|[\t\r\n]")
FORMATS = ("csv", "jsonl", "parquet")
SEED = 0  # so that a mix leaves out the same images each time

Step = Callable[[int, int | None], None]


def export_records(
    reader: Reader,
    file: Path,
    format: str,
    bin_name: str,
    ratio: dict[str, float],
    step: Step,
    columns: Columns,
    *,
    force: bool = False,
    mark: bool = False,
    half: bool = False,
    warn: Callable[[str], None] = lambda sentence: None,
) -> int:
    """Write every DONE image (of a bin, or in a mix of bins) to `file`, whole or not at all;
    returns how many.

    file: STDOUT for standard output. format: "csv", "jsonl" or "parquet". step: called with the number of
    rows written, and of all. columns: of CSV and Parquet; if they have models, a second file beside CSV says what these are.
    force: replace existing files. mark: begin CSV with a byte order mark. half: embeddings in half precision. warn: called
    with what a reader of the file should know. Raises WrongArgument, NotWritable, MissingLibrary; LedgerDamaged,
    after writing all others, when some images are damaged.
    """
    counts = reader.bin_counts()
    _check_choice(file, format, bin_name, ratio, {*BINS, *counts})
    _check_options(file, format, columns, mark=mark, half=half)
    wanted = _mix(counts, ratio) if ratio else {bin_name: counts.get(bin_name, 0)} if bin_name else counts
    damaged: list[int] = []
    found, total, written = _whole(reader.finished(bin_name), damaged), sum(wanted.values()), 0
    models: set[Model] = set()

    def count() -> Iterator[Record]:
        nonlocal written
        for written, record in enumerate(_pick(found, counts, wanted) if ratio else found, 1):
            models.update(record.all_models())
            yield record
            step(written, total)

    sizes = _embedding_sizes(reader, bin_name, warn) if format == "parquet" else []
    writers: dict[str, Callable[[BinaryIO, Iterator[Record]], None]] = {
        "csv": functools.partial(write_csv, columns=columns, encoding="utf-8-sig" if mark else "utf-8"),
        "jsonl": write_jsonl,
        "parquet": functools.partial(
            write_parquet, columns=columns, sizes=sizes, half=half, notes=lambda: note_models(models)
        ),
    }
    write = writers[format]
    if file == STDOUT:
        write(sys.stdout.buffer, count())
    else:
        with (
            closed_to_others(),
            written_whole(file, reader.path, force=force) as partial,
            partial.open("wb") as out,
        ):
            write(out, count())
            if columns.has_models and format == "csv":
                _write_models(models_file(file), reader, models, force=force)
    if damaged:
        raise LedgerDamaged(
            f"{quantity(len(damaged), 'image')} left out because the ledger is damaged there; the first has number "
            f"{damaged[0]}. Stop the daemon and run `{command('repair')}`, which restores them from the sidecars. All others "
            "are exported."
        )
    return written


def _whole(records: Iterable[Record], damaged: list[int]) -> Iterator[Record]:
    """The records that are not damaged in the ledger; adds the numbers of the others to `damaged`."""
    for record in records:
        if record.damage:
            damaged.append(record.id)
        else:
            yield record


def format_of(file: Path) -> str:
    """The format of the file's suffix; CSV for standard output. Raises WrongArgument."""
    suffix = file.suffix.removeprefix(".").lower()
    if file != STDOUT and suffix not in FORMATS:
        raise WrongArgument(
            f"{file} does not end in any of {', '.join(f'.{name}' for name in FORMATS)}. Choose the format, for example with "
            "--format csv."
        )
    return suffix or "csv"


def _check_choice(file: Path, format: str, bin_name: str, ratio: dict[str, float], bins: set[str]) -> None:
    """Raises WrongArgument."""
    if unknown := {bin_name, *ratio} - {"", *bins}:
        raise WrongArgument(
            f"There is no bin {', '.join(sorted(unknown))}; bins are {', '.join(sorted(bins))}."
        )
    if bin_name and ratio:
        raise WrongArgument("--bin exports one bin, and --ratio mixes several; use only one of them.")
    if file == STDOUT and format == "parquet":
        raise WrongArgument(
            "Parquet cannot be written to standard output; name a file, or use --format csv or jsonl."
        )


def _check_options(file: Path, format: str, columns: Columns, *, mark: bool, half: bool) -> None:
    """Raises WrongArgument."""
    if mark and format != "csv":
        raise WrongArgument(f"--bom is for CSV; {format} has no byte order mark.")
    if half and format != "parquet":
        raise WrongArgument(f"--float16 is for the embeddings of Parquet; {format} has none in a column.")
    if columns.has_models and format == "jsonl":
        raise WrongArgument("JSON lines have the models of each image already; leave --models out.")
    if columns.has_models and file == STDOUT:
        raise WrongArgument(
            "--models writes a second file beside that of the rows; name a file instead of -."
        )


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
    if not all(0 < share < math.inf for share in shares.values()):
        raise WrongArgument(
            f'--ratio "{text}": a share must be more than 0; leave out the bins that you do not want.'
        )
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def _embedding_sizes(reader: Reader, bin_name: str, warn: Callable[[str], None]) -> list[int]:
    """The different lengths of the embeddings of a bin, or of all images, in order.
    Those of one model have one length."""
    answers = [msgspec.json.decode(payload) for payload in reader.answers_of_each_model("clip", bin_name)]
    sizes = sorted({answer["embedding"]["dim"] for answer in answers})
    if len(sizes) > 1:
        warn(
            f"Embeddings have several lengths ({', '.join(map(str, sizes))}): the column embedding has plain lists, not lists "
            f"of one size. `{command('redo', '--stale')}` processes all images with the current model."
        )
    return sizes


def _mix(counts: dict[str, int], ratio: dict[str, float]) -> dict[str, int]:
    """The number of images from each bin: as many as the smallest bin allows at these shares."""
    total = min(counts.get(name, 0) / share for name, share in ratio.items())
    return {name: round(total * share) for name, share in ratio.items()}


def _pick(records: Iterable[Record], counts: dict[str, int], wanted: dict[str, int]) -> Iterator[Record]:
    """This number of records of each bin, evenly at random (Knuth's algorithm S), in one pass."""
    chance = random.Random(SEED)
    left, missing = dict(counts), dict(wanted)
    for record in records:
        if not left.get(record.bin):  # added after the count
            continue
        if chance.random() * left[record.bin] < missing.get(record.bin, 0):
            missing[record.bin] -= 1
            yield record
        left[record.bin] -= 1


def write_csv(out: BinaryIO, records: Iterable[Record], columns: Columns, encoding: str) -> None:
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
    return file.with_suffix(f".models{file.suffix}")


def _write_models(file: Path, reader: Reader, models: Iterable[Model], *, force: bool) -> None:
    with written_whole(file, reader.path, force=force) as partial, partial.open("wb") as out:
        _write_rows(out, describe_model(UNKNOWN), map(describe_model, sorted(models, key=_name)))


def describe_model(model: Model) -> dict[str, Any]:
    """What is known of a model, as a flat row: what its fingerprint stands for."""
    provenance = structs.asdict(model.provenance)
    return {"fingerprint": model.fingerprint, "stage": model.stage, **provenance, "notice": model.notice}


def _name(model: Model) -> tuple[str, str]:
    return model.stage, model.fingerprint


def note_models(models: Iterable[Model]) -> dict[bytes, bytes]:
    """For the metadata of a Parquet file: what its models are, and the version of visiond that wrote it."""
    known = [describe_model(model) for model in sorted(models, key=_name)]
    return {b"visiond.models": msgspec.json.encode(known), b"visiond.version": __version__.encode()}


def _cell(value: Any) -> Any:
    """A list or table as JSON, since labels may contain any character. A text that starts like a formula gets a quote,
    as a spreadsheet would run it, and anyone can put text on an image."""
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def write_jsonl(out: BinaryIO, records: Iterable[Record]) -> None:
    """The sidecar of each of these images, which is a line."""
    out.writelines(record.sidecar for record in records)


def write_parquet(out: BinaryIO, records: Iterator[Record], columns: Columns, **options: Any) -> None:
    """options: of `write_table`."""
    documents = ((record, msgspec.json.decode(record.sidecar)) for record in records)
    rows = ((columns.row_of(record, document), document) for record, document in documents)
    write_table(out, rows, columns.kinds, **options)
