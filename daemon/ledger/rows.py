"""Converts jobs, records and endings to rows of the ledger's tables, and rows to jobs. Writes what models say about an
image's bytes, reads it again, and compares each row with its checksum: damaged rows are left out. Stored results belong
to the model that gave them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import structlog
from msgspec.structs import replace

from daemon.core.jobs import Attempt, Checksums, Content, Ending, Job, JobStatus, Version, reason_of
from daemon.core.messages import Output
from daemon.ledger import checksums
from daemon.ledger.checksums import Named
from daemon.ledger.record import Model, Record
from daemon.ledger.statements import SQL, run_rows
from daemon.system.clock import steady_seconds
from stages.contract.base import Provenance, Reason

log = structlog.get_logger()

CHUNK = 1024  # rows in memory at a time
PUT_OFF_SECONDS = 1.0  # see put_off
Root = Path | bytes  # of an inbox: the absolute path of its folder, or its URL
GoOn = Callable[[], bool]
Numbers = Mapping[str, int]  # stage → the number of its model in the ledger
JudgeAgain = Callable[[list[Attempt]], list[Ending]]


def content_row(known: Content | Record, checksum: int | None = None) -> tuple[Any, ...]:
    """A row for `keep_contents`. checksum: None: it is computed."""
    fields = (known.digest, known.format, known.width, known.height, known.pages)
    return (*fields, checksums.of_content(*fields) if checksum is None else checksum)


def keep_contents(connection: sqlite3.Connection, rows: Sequence[Sequence[Any]]) -> None:
    """Store what new bytes are, and what known ones are if more pages were counted now."""
    changes = connection.total_changes
    run_rows(connection, "keep_content", rows)
    if connection.total_changes - changes < len(rows):
        run_rows(connection, "count_pages", rows)


def result_row(
    digest: bytes, number: int, model: Model, output: Output, checksum: int | None = None
) -> tuple[Any, ...]:
    """A row for `keep_result`. number: the model's number in the ledger. checksum: None: it is computed."""
    if checksum is None:
        checksum = checksums.of_result(digest, model, output)
    return (digest, number, output.payload, output.seconds, checksum)


def checksums_of(content: Content, record: Record | None, models: Iterable[Model]) -> Checksums:
    """The checksums of the rows that an ending makes. Executors compute them to save the coordinator time. models: of the
    content's outputs. record: None: the image has neither a result nor a reason."""
    results = {m.stage: checksums.of_result(content.digest, m, content.outputs[m.stage]) for m in models}
    return Checksums(content_row(content)[-1], results, record.checksum if record else None)


def repeat_of(ending: Ending, left: int | None = None) -> Ending:
    """The ending of a job whose file had this result before. left: as in an Ending."""
    return replace(_without_result(ending), status=JobStatus.GONE, is_repeat=True, left=left)


def put_off(endings: Iterable[Ending], unsettled: Collection[int]) -> list[Ending]:
    """The endings; the attempts of the unsettled images do not count, as the rows that their files may belong to are being
    published."""
    later = {"status": JobStatus.PENDING, "not_before": steady_seconds() + PUT_OFF_SECONDS}
    return [
        replace(_without_result(e), attempts=e.job.attempts, **later) if e.job.id in unsettled else e
        for e in endings
    ]


def _without_result(ending: Ending) -> Ending:
    return replace(ending, bin="", criteria=b"", looks=(), checksums=None, failure=None)


def look_rows(record: Record, numbers: Mapping[Model, int]) -> list[tuple[Any, ...]]:
    """Rows for `restore_look`. numbers: of the models in the ledger."""
    return [
        (
            *(record.id, name, None, 1, numbers[look.model], look.reason or None, look.detail or None),
            checksums.of_look(record.id, name, look.model, look.reason, look.detail),
        )
        for name, look in record.looks.items()
    ]


def end_row(ending: Ending, record: Record | None, numbers: Mapping[str, int]) -> tuple[Any, ...]:
    """A row for `end`. record: that the ending makes; None: none, or its checksum is known. numbers: of each stage's current
    model."""
    job, content, used = ending.job, ending.content, None
    if ending.status is JobStatus.DONE:
        used = msgspec.json.encode([numbers[stage] for stage in content.outputs]).decode()
    result = (content.digest or None, used, ending.bin or None, ending.criteria or None)
    checksum = record.checksum if record else ending.checksums and ending.checksums.image
    reason = reason_of(ending.failure)
    return (job.id, int(ending.status), *result, *reason, ending.at, ending.attempts, checksum, job.path)


def postponed_row(ending: Ending) -> tuple[Any, ...]:
    """A row for `postpone` and, with the look's name behind it, for `postpone_look`."""
    return (ending.attempts, ending.not_before, reason_of(ending.failure)[1], ending.job.id)


def job_of(row: sqlite3.Row) -> Job:
    """A job from a row of `fresh` or `again`."""
    # Without the columns' names, which sqlite3 looks up one after another.
    (
        id,
        inbox,
        path,
        location,
        inode,
        size,
        mtime_ns,
        ctime_ns,
        attempts,
        seen_at,
        deaths,
        has_result,
        priority,
    ) = row
    version = Version(inode, size, mtime_ns, ctime_ns)
    origin = (id, inbox, path, location or b"", version)
    return Job(*origin, attempts, seen_at, deaths, bool(has_result), priority=priority)


class Key(NamedTuple):
    """A row of `result` or, with no model, of `content`."""

    digest: bytes
    model: int | None


class Stored(NamedTuple):
    """What is known about some digests. damaged: rows whose checksum does not match."""

    contents: Mapping[bytes, tuple[str, int, int, int]]  # format, width, height, pages
    results: Mapping[bytes, Mapping[int, Output]]
    damaged: set[Key]


def read_stored(
    connection: sqlite3.Connection, digests: Iterable[bytes], models: Mapping[int, Named]
) -> Stored:
    """Contents and results of these digests, without damaged ones. Bytes without content have no results."""
    wanted = [(digest,) for digest in digests]
    contents, damaged = read_contents(connection, wanted)
    results: dict[bytes, dict[int, Output]] = {}
    for row in run_rows(connection, "results", wanted) if contents or damaged else ():
        if _is_whole_result(row, models):
            results.setdefault(row["digest"], {})[row["model"]] = Output(row["payload"], row["seconds"])
        else:
            damaged.add(Key(row["digest"], row["model"]))
    return Stored(contents, results, damaged)


def read_contents(
    connection: sqlite3.Connection, wanted: Sequence[tuple[bytes]]
) -> tuple[dict[bytes, tuple[str, int, int, int]], set[Key]]:
    """As in Stored. wanted: the digests."""
    contents: dict[bytes, tuple[str, int, int, int]] = {}
    damaged: set[Key] = set()
    for row in run_rows(connection, "contents", wanted):
        if _is_whole_content(row):
            contents[row["digest"]] = (row["format"], row["width"], row["height"], row["pages"])
        else:
            damaged.add(Key(row["digest"], None))
    return contents, damaged


def _is_whole_content(row: sqlite3.Row) -> bool:
    fields = (row["digest"], row["format"], row["width"], row["height"], row["pages"])
    return checksums.holds(row["checksum"], checksums.of_content, *fields)


def _is_whole_result(row: sqlite3.Row, models: Mapping[int, Named]) -> bool:
    if (model := models.get(row["model"])) is None:
        return False
    output = Output(row["payload"], row["seconds"])
    return checksums.holds(row["checksum"], checksums.of_result, row["digest"], model, output)


def find_damaged(
    connection: sqlite3.Connection, models: Mapping[int, Named], go_on: GoOn
) -> Iterator[tuple[int, Key]]:
    """Yield the id and the key of every row of `content` and `result` whose checksum does not match. The key is as stored,
    so it may be damaged itself. go_on: called now and then; false stops early."""
    last = 0
    while go_on() and (rows := connection.execute(SQL["all_contents"], (last, CHUNK)).fetchall()):
        yield from ((row["id"], Key(row["digest"], None)) for row in rows if not _is_whole_content(row))
        last = rows[-1]["id"]
    last = 0
    while go_on() and (rows := connection.execute(SQL["all_results"], (last, CHUNK)).fetchall()):
        yield from (
            (row["id"], Key(row["digest"], row["model"])) for row in rows if not _is_whole_result(row, models)
        )
        last = rows[-1]["id"]


class Results:
    """What models say about an image's bytes, once for the same bytes and model: who comes second gets what is there. All
    of this runs in the writing thread."""

    def __init__(self) -> None:
        self.models: dict[int, Model] = {}  # all that the ledger knows, by number
        self.numbers: Numbers = {}  # of the models of this daemon
        self.touched: set[bytes] | None = None  # digests written since pruning began; None without pruning
        self._damaged: set[Key] = set()

    def start(self, connection: sqlite3.Connection, models: Iterable[Model]) -> None:
        """The daemon starts with these models: results of others are those of earlier ones."""
        self.numbers = self.add(connection, models)
        connection.execute(SQL["forget_current"])
        connection.executemany(SQL["make_current"], [(number,) for number in self.numbers.values()])

    def add(self, connection: sqlite3.Connection, models: Iterable[Model]) -> dict[str, int]:
        """The ledger knows these models from now on; returns the number of each stage's."""
        numbers = add_models(connection, models)
        rows = connection.execute(SQL["models"])
        self.models.update({row[0]: read_model(row) for row in rows})  # in place: others read it too
        return numbers

    def write(
        self,
        connection: sqlite3.Connection,
        known: Sequence[tuple[Content, Checksums | None]],
    ) -> bool:
        """Write results, except those that the same bytes already have; returns whether all were written. known: with
        checksums that are computed already."""
        if (touched := self.touched) is not None:  # the event loop may end pruning during this
            touched.update(content.digest for content, _ in known)
        contents, results = [], []
        for content, sums in known:
            if content.width:
                contents.append(content_row(content, sums.content if sums else None))
            for stage, output in content.outputs.items():
                number, checksum = self.numbers[stage], sums.results.get(stage) if sums else None
                results.append(result_row(content.digest, number, self.models[number], output, checksum))
        if self._damaged:
            self._drop_damaged(connection, self._damaged & {Key(row[0], None) for row in contents})
        keep_contents(connection, contents)
        changes = connection.total_changes
        run_rows(connection, "keep_result", results)
        return connection.total_changes - changes == len(results)

    def read(self, connection: sqlite3.Connection, digests: Collection[bytes]) -> Stored:
        """What is known about these bytes. Damaged results are not used: the model runs again, and its new result
        replaces the damaged one."""
        stored = read_stored(connection, digests, self.models)
        for digest, model in stored.damaged - self._damaged:
            what = self.models[model].stage if model in self.models else "format and size"
            log.error(
                "result damaged in the ledger; its model runs again",
                what=what,
                digest=f"sha256:{digest.hex()}",
            )
        self._damaged |= stored.damaged
        return stored

    def take(self, connection: sqlite3.Connection, contents: Sequence[Content]) -> list[Content]:
        """The same contents with the results that the ledger has for these bytes."""
        digests = {content.digest for content in contents}
        stored = self.read(connection, digests)
        keys = {Key(content.digest, self.numbers[stage]) for content in contents for stage in content.outputs}
        if stored.damaged & keys:
            self._drop_damaged(connection, stored.damaged & keys)
            self.write(connection, [(content, None) for content in contents])
            stored = self.read(connection, digests)
        taken = []
        for content in contents:
            kept = stored.results.get(content.digest, {})
            outputs = {stage: kept.get(self.numbers[stage], said) for stage, said in content.outputs.items()}
            taken.append(content if outputs == content.outputs else content.with_outputs(outputs))
        return taken

    def settle(
        self, connection: sqlite3.Connection, endings: list[Ending], judge: JudgeAgain
    ) -> list[Ending]:
        """The endings with the results that the ledger has for the same bytes. Those whose results differed are judged
        again, unless they failed for another reason than these."""
        taken = self.take(connection, [e.content for e in endings])
        differing = [
            Attempt(e.job, now, began_at=e.began_at)
            for e, now in zip(endings, taken, strict=True)
            if not now.says_the_same(e.content) and (e.failure is None or e.failure.reason is Reason.RULE)
        ]
        again = {ending.job.id: ending for ending in judge(differing)} if differing else {}
        given = [
            e if now is e.content else replace(e, content=now) for e, now in zip(endings, taken, strict=True)
        ]
        return [again.get(e.job.id, e) for e in given]

    def _drop_damaged(self, connection: sqlite3.Connection, damaged: Collection[Key]) -> None:
        """Clear damaged rows of `content` and delete damaged results; the caller then writes them again."""
        connection.executemany(
            SQL["forget_content"], [(digest,) for digest, model in damaged if model is None]
        )
        connection.executemany(SQL["drop_result"], [key for key in damaged if key[1] is not None])
        self._damaged -= set(damaged)


def add_models(connection: sqlite3.Connection, models: Iterable[Model]) -> dict[str, int]:
    """Add those that the ledger does not know yet; returns the number of each stage's."""
    return {model.stage: add_model(connection, model) for model in models}


def add_model(connection: sqlite3.Connection, model: Model) -> int:
    """Add it if the ledger does not know it yet, and what is new about it; returns its number."""
    connection.execute(SQL["add_model"], (model.stage, model.fingerprint, model.notice))
    [[number, text]] = connection.execute(SQL["model_id"], (model.stage, model.fingerprint))
    known = _read_provenance(text)
    if model.provenance.name and known[-1:] != [model.provenance]:
        known = [each for each in known if each != model.provenance] + [model.provenance]
        text = msgspec.json.encode(known).decode()
        connection.execute(SQL["keep_provenance"], (f"{crc32(text.encode()):08x} {text}", number))
    return int(number)


def read_model(row: sqlite3.Row) -> Model:
    """From a row of `models`, whose first column is its number."""
    _, stage, fingerprint, notice, text = row
    *former, provenance = _read_provenance(text) or [Provenance()]
    return Model(stage, fingerprint, notice, provenance, tuple(former))


def _read_provenance(text: str) -> list[Provenance]:
    """Everything that the ledger was told about a model, the newest last; nothing if it is damaged: then the next start tells
    it again, and sidecars are believed."""
    checksum, _, known = str(text).partition(" ")
    if checksum != f"{crc32(known.encode(errors='replace')):08x}":
        return []
    return msgspec.json.decode(known, type=list[Provenance])
