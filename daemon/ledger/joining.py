"""Joins rows of `image` with the results that belong to them, and compares both with their checksums."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from daemon.core.jobs import JobStatus, Version
from daemon.ledger import checksums, looks
from daemon.ledger.record import Look, Model, Record
from daemon.ledger.rows import Key, Stored, read_stored
from daemon.ledger.schema import damaged, ledger_of


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
    stored = read_stored(
        connection, {row["digest"] for row in rows if row["digest"] and with_results}, models
    )
    done = [row["id"] for row in rows if row["status"] == JobStatus.DONE]
    ended = looks.read_ended(connection, done) if with_results else {}
    for row in rows:
        try:
            record = _join(row, stored, models)
            if found := ended.get(record.id):
                record.looks = {name: _look_of(record, one, stored, models) for name, one in found.items()}
            if tolerant:
                _ = record.sidecar
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
            # For example after a flipped bit.
            fault = f"cannot be read ({type(error).__name__}: {error})"
            if tolerant:
                yield _name_only(row, damage=f"its row {fault}")
                continue
            raise damaged(ledger_of(connection), f"image {row['id']} {fault}") from error
        damage = _find_damage(record, row["checksum"], stored) if with_results else ""
        damage = damage or _find_damaged_look(record, ended.get(record.id, {}))
        yield replace(record, damage=damage) if damage else record


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


def _look_of(record: Record, ended: looks.Ended, stored: Stored, models: Mapping[int, Model]) -> Look:
    output = None if ended.reason else stored.results.get(record.digest, {}).get(ended.model)
    return Look(models[ended.model], output, ended.reason, ended.detail)


def _find_damaged_look(record: Record, ended: Mapping[str, looks.Ended]) -> str:
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
