"""Joins rows of `image` with the results that belong to them, and compares both with their checksums; and new rows with
those that their files had before.

A file that is found under a new name may be that of a row under another name, which has left: the same inode, time and
size. If that row still waits, it gets the new name at once. Otherwise the file gets a row that notes the other name
(the table `renamed`), and is read. If its bytes and how it ends are those of the other row, that one gets the new name and
the new row goes. Until sidecar and bin are under the new name, `renamed` has the old one, from which they are to be removed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from daemon.core.jobs import Admitted, Ending, File, Job, JobStatus, Version
from daemon.ledger import checksums, looks
from daemon.ledger.record import Look, Model, Record
from daemon.ledger.rows import Key, Stored, read_stored
from daemon.ledger.schema import damaged, ledger_of
from daemon.ledger.statements import SQL, run_rows
from daemon.ledger.waiting import LEAST_OF_CONTAINERS
from stages.contract.base import Reason


def assemble(
    connection: sqlite3.Connection,
    rows: list[sqlite3.Row],
    models: dict[int, Model],
    *,
    with_results: bool = True,
    tolerant: bool = False,
) -> Iterator[Record]:
    """Join rows of `image` in memory with their contents and results.

    tolerant: a row that cannot be read, or has no sidecar, becomes a record with nothing but its name and
    `damage`. Otherwise raises LedgerDamaged when a row cannot be read.
    """
    digests = {row["digest"] for row in rows} - {None, b""}
    done = [row["id"] for row in rows if row["status"] == JobStatus.DONE]
    stored = read_stored(connection, digests if with_results else set(), models)
    ended = looks.read_ended(connection, done if with_results else [])
    for row in rows:
        found = ended.get(row["id"], {})
        try:
            record = _join(row, stored, models)
            record.looks = {name: _look_of(record, one, stored, models) for name, one in found.items()}
            if tolerant:
                _ = record.sidecar
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
            # For example after a flipped bit.
            fault = f"cannot be read ({type(error).__name__}: {error})"
            if not tolerant:
                raise damaged(ledger_of(connection), f"image {row['id']} {fault}") from error
            record = _name_only(row, damage=f"its row {fault}")
        else:
            if with_results:
                record = _note_damage(record, row["checksum"], stored, found)
        yield record


def _note_damage(
    record: Record, checksum: int | None, stored: Stored, ended: Mapping[str, looks.EndedLook]
) -> Record:
    """The same record; if it is damaged, it says so. ended: its second looks."""
    damage = _find_damage(record, checksum, stored) or _find_damaged_look(record, ended)
    return replace(record, damage=damage) if damage else record


def _find_damage(record: Record, checksum: int | None, stored: Stored) -> str:
    """Which parts of an image that has ended are damaged or missing; empty if none are."""
    if record.status not in (JobStatus.DONE, JobStatus.FAILED):
        return ""
    is_done = record.status is JobStatus.DONE
    found = [f"the result of {model.stage}" for model in record.models if model.stage not in record.outputs]
    if (is_done and record.digest not in stored.contents) or Key(record.digest, None) in stored.damaged:
        found.append("its format and size")
    # An attempt that could not read the file left the digest of an earlier attempt.
    versions = [record] if is_done else [record, replace(record, digest=b"")]
    if not any(checksums.holds(checksum, attrgetter("checksum"), version) for version in versions):
        found.append("its row")
    return ", ".join(found)


def _look_of(record: Record, ended: looks.EndedLook, stored: Stored, models: Mapping[int, Model]) -> Look:
    output = None if ended.reason else stored.results.get(record.digest, {}).get(ended.model)
    return Look(models[ended.model], output, ended.reason, ended.detail)


def _find_damaged_look(record: Record, ended: Mapping[str, looks.EndedLook]) -> str:
    """Which second look is damaged or has lost its result; empty if none."""
    for name, look in record.looks.items():
        fields = (record.id, name, look.model, look.reason, look.detail)
        is_whole = checksums.holds(ended[name].checksum, checksums.of_look, *fields)
        if not is_whole or (look.output is None and not look.reason):
            return f"the second look {name}"
    return ""


def _name_only(row: sqlite3.Row, damage: str) -> Record:
    """A record of a row that cannot be read: number and path of the image, as far as they are known."""
    bare = dict.fromkeys(row.keys()) | {key: row[key] for key in ("id", "inbox", "status")}
    bare |= {key: row[key] if isinstance(row[key], bytes) else b"" for key in ("inbox_path", "path")}
    return replace(_join(bare | {"models": "[]"}, Stored({}, {}, set()), {}), damage=damage)


def _join(row: sqlite3.Row | Mapping[str, Any], stored: Stored, models: dict[int, Model]) -> Record:
    used = msgspec.json.decode(row["models"], type=list[int]) if row["status"] == JobStatus.DONE else []
    outputs = stored.results.get(row["digest"], {})
    format, width, height, pages = stored.contents.get(row["digest"], ("", 0, 0, 1))
    return Record(
        id=row["id"],
        inbox=row["inbox"],
        inbox_path=row["inbox_path"],
        path=row["path"],
        location=row["location"] or os.path.join(row["inbox_path"], row["path"]),
        version=Version(row["inode"], row["size"], row["mtime_ns"], row["ctime_ns"]),
        status=JobStatus(row["status"]),
        attempts=row["attempts"],
        seen_at=row["seen_at"],
        finished_at=row["finished_at"],
        digest=row["digest"] or b"",
        format=format,
        width=width,
        height=height,
        outputs={models[model].stage: outputs[model] for model in used if model in outputs},
        models=[models[model] for model in used],
        bin=row["bin"] or "",
        criteria=row["criteria"] or b"{}",
        reason=row["reason"] or "",
        detail=row["detail"] or "",
        pages=pages,
    )


def join_repeats(
    connection: sqlite3.Connection, endings: Sequence[Ending], ended: Collection[int], staying: str
) -> set[int]:
    """Let the row of the version before have the job's version, if its file is the same but for times or inode, and so
    is its result. An image that had a result was published, and keeps its row. staying: the inboxes whose files stay there,
    as JSON: elsewhere the new version still has to leave. Returns the jobs whose rows are gone."""
    new = [e.job for e in endings if e.status is JobStatus.DONE and not e.job.has_result]
    jobs = {job.id: job for job in new if job.id in ended}
    before = dict(map(tuple, run_rows(connection, "repeats", [(number,) for number in jobs], staying)))
    connection.executemany(SQL["drop_image"], [(number,) for number in before])
    connection.executemany(SQL["has_now"], [(*jobs[now].version, old) for now, old in before.items()])
    return set(before)


class Name(NamedTuple):
    """A path at which a file was seen, and its change time then."""

    path: bytes
    ctime_ns: int


def find_other_names(connection: sqlite3.Connection, files: Sequence[File]) -> dict[File, list[Name]]:
    """By file, the paths in its inbox at which a file of the same inode, size and time was seen, the last one first. files:
    of one inbox."""
    wanted = list({(file.version.inode, file.version.mtime_ns, file.version.size) for file in files})
    names: dict[tuple[int, ...], list[Name]] = {}
    if wanted:
        for row in run_rows(connection, "other_names", wanted, files[0].inbox):
            names.setdefault(tuple(row)[2:], []).append(Name(*tuple(row)[:2]))
    return {f: found for f in files if (found := names.get(f.version[:3]))} if names else {}


def admit(
    connection: sqlite3.Connection,
    files: Sequence[File],
    priorities: Sequence[int],
    left: Sequence[tuple[File, bytes]],
) -> Admitted:
    """Add a row for each version that is new, and has no other name in the ledger. left: files, and names that they have
    left. Runs in the writing thread."""
    now = time.time()
    last = connection.execute(SQL["last_id"]).fetchone()[0]
    renamed = rename_waiting(connection, left) if left else {}
    rows = [
        file_row(file, priority, now)
        for file, priority in zip(files, priorities, strict=True)
        if file not in renamed
    ]
    taken = run_rows(connection, "admit", rows)
    if len(taken) < len(rows):
        taken += run_rows(connection, "admit_again", rows)
    connection.executemany(SQL["note_renamed"], map(_renamed_row, left))
    statuses = [row[0] for row in taken]
    new = (statuses.count(JobStatus.PENDING), statuses.count(JobStatus.SKIPPED))
    moved = (len(renamed), sum(renamed.values()))
    if not taken:
        return Admitted(*new, 0, renamed=moved[0], left=moved[1])
    replaced = connection.execute(SQL["supersede"], {"last": last, "now": now}).fetchall()
    gone = [(number,) for status, number in replaced if status == JobStatus.GONE]
    connection.executemany(SQL["forget_renamed"], gone)
    failures = connection.execute(SQL["failures_replaced"], (last,)).fetchone()[0]
    kept, back = len(replaced) - len(gone), sum(row[1] <= last for row in taken)
    return Admitted(*new, len(gone), failures, kept, back, *moved)


def file_row(file: File, priority: int, now: float) -> tuple[Any, ...]:
    """A row for `admit`."""
    status, reason = (JobStatus.PENDING, None) if file.regular else (JobStatus.SKIPPED, Reason.NOT_REGULAR)
    return (file.inbox, file.path, *file.version, priority, int(status), now, reason, 0, 0)


def _renamed_row(left: tuple[File, bytes]) -> tuple[Any, ...]:
    """A row that notes that a file that was admitted as a new one may be that of another row."""
    file, before = left
    return (before, file.inbox, file.path, *file.version)


def rename_waiting(connection: sqlite3.Connection, left: Iterable[tuple[File, bytes]]) -> dict[File, int]:
    """Give images that wait the new names of their files. An attempt that has begun under the old name comes to nothing.
    left: as of `admit`. Returns these files, each with how many rows, which say that a name is GONE,
    are there since."""
    renamed = {}
    for file, before in left:
        if file in renamed:
            continue
        version = file.version
        wanted = (file.inbox, before, version.inode, version.size, version.mtime_ns, LEAST_OF_CONTAINERS)
        if row := connection.execute(SQL["waits_as"], wanted).fetchone():
            fields = {"not_before": max(row["not_before"], 1.0), "emitted": row["emitted"]}
            rows = _rename(connection, row, file.path, version.ctime_ns, **fields)
            if rows is not None:
                renamed[file] = rows
    return renamed


def find_renamed(connection: sqlite3.Connection, jobs: Iterable[Job]) -> set[int]:
    """Those of these jobs whose files may be those of other rows."""
    numbers = [(job.id,) for job in jobs if not job.has_result]
    return {number for (number,) in run_rows(connection, "renamed_images", numbers)}


def find_unsettled(connection: sqlite3.Connection, jobs: Collection[int], kept: str) -> set[int]:
    """Those of these jobs that cannot end yet: the row of their file is being published, or the file of the row that has
    their name now was renamed too. kept: the inboxes whose files are not deleted, as JSON."""
    rows = run_rows(connection, "renamed_before", [(job,) for job in jobs], kept)
    unsettled = {row["now"] for row in rows if row["is_published"] == 0}
    for row in rows:
        wanted = (row["inbox"], row["now_path"], row["id"], row["now"])
        later = [each for each in connection.execute(SQL["later_versions"], wanted) if not each["is_empty"]]
        if later and all(each["is_renamed"] for each in later):
            unsettled.add(row["now"])
    return unsettled


def join_renamed(
    connection: sqlite3.Connection,
    endings: Iterable[Ending],
    claimed: Collection[int],
    models: dict[int, Model],
    kept: str,
) -> dict[int, int | None]:
    """Let the row that the file of a job had under another name have its name, if it ended in the same way, and has the same
    bytes. claimed: the jobs that have ended, by `find_renamed`. kept: as of `find_unsettled`. Returns the jobs whose rows
    are gone, as `rename_waiting`."""
    jobs = {e.job.id: e.looks for e in endings if e.job.id in claimed}  # with the second looks that they want
    joined: dict[int, int | None] = {}
    for row in run_rows(connection, "renamed_before", [(job,) for job in jobs], kept):
        if row["now"] in joined or not row["is_published"] or not row["is_same"]:
            continue
        [record] = assemble(connection, [row], models)
        if record.damage:
            continue
        path, before = row["now_path"], row["path"]
        fields = {"not_before": row["finished_at"], "emitted": 0}
        if row["checksum"] is not None:
            fields["checksum"] = replace(record, path=path).checksum
        left = _rename(connection, row, path, row["now_ctime_ns"], instead=row["now"], **fields)
        if left is not None:
            joined[row["now"]] = left
            connection.execute(SQL["add_renamed"], (row["id"], before))
            connection.executemany(SQL["want_lost_look"], [(row["id"], look) for look in jobs[row["now"]]])
    connection.executemany(SQL["forget_renamed"], [(job,) for job in jobs])
    return joined


def _rename(
    connection: sqlite3.Connection,
    row: sqlite3.Row,
    path: bytes,
    ctime_ns: int,
    instead: int = 0,
    **fields: Any,
) -> int | None:
    """Give a row another path, unless another row has had that since. instead: a row that goes. fields: other columns. Returns
    how many rows more say that a name is GONE; None if nothing was done."""
    asked = (row["inbox"], path, row["id"], instead)
    later = connection.execute(SQL["later_versions"], asked).fetchall()
    if not all(each["is_empty"] for each in later):
        return None
    for number in [*(each["id"] for each in later), *[instead] * bool(instead)]:
        connection.execute(SQL["drop_image"], (number,))
        connection.execute(SQL["forget_renamed"], (number,))
    values = {"checksum": row["checksum"]} | fields | {"id": row["id"], "path": path, "ctime_ns": ctime_ns}
    if not connection.execute(SQL["rename"], values).rowcount:
        return None
    detail = f"renamed to {path.decode(errors='backslashreplace')}"
    old = {"before": row["path"], "old_ctime_ns": row["ctime_ns"], "detail": detail, "now": time.time()}
    return connection.execute(SQL["leave"], {"id": row["id"]} | old).rowcount - len(later)


def read_former(connection: sqlite3.Connection, records: list[Record]) -> list[Record]:
    """The same records, with the paths that their files had before, where something is to be removed."""
    of = {record.id: record for record in records}
    for number, path, is_replaced in run_rows(connection, "former", [(number,) for number in of]):
        of[number].former += (path,)
        of[number].is_replaced = bool(is_replaced)
    return records
