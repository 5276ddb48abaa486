"""Judges a run from outside, by folders, sidecars and the ledger's file, with its own SQL.
It imports nothing of visiond.

`judge` compares what was dropped with what became of it, and returns a Verdict. Its lists are empty if the
promise is kept: each version of a file ends in exactly one of DONE, FAILED, SKIPPED, GONE; each DONE has
exactly one complete and correct sidecar; no file of the user is lost; no half-written file is left.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PENDING, DONE, FAILED, SKIPPED, GONE = range(5)
STATUS_NAMES = ("PENDING", "DONE", "FAILED", "SKIPPED", "GONE")
SIDECAR_KEYS = {"ocr": "ocr", "yolo": "objects", "clip": "clip", "blip": "caption"}  # by stage
LONGEST_NAME = 255  # bytes
UNPACKED_MARK = b".visiond-unpacked"  # stays in the folder of an archive


@dataclass(frozen=True)
class Inbox:
    """A folder that files were dropped into.

    dropped: path in it → SHA-256 (hex) of every version dropped there, in order; "" for anything that is not
        a regular file.
    name: its sub-folder of results, failed, done and bins.
    """

    path: Path
    dropped: Mapping[bytes, Sequence[str]]
    name: str = ""
    on_success: str = "keep"


@dataclass(frozen=True)
class Site:
    """The folders of a daemon."""

    ledger: Path
    results: Path
    failed: Path
    done: Path
    bins: Path
    bins_mode: str = "none"


@dataclass
class Verdict:
    """What is wrong, one line each, and the number of images by state."""

    lost: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    rows: dict[tuple[str, bytes], list[Row]] = field(default_factory=dict)  # by inbox's name and path
    # sidecars of DONE images, likewise
    results: dict[tuple[str, bytes], dict[str, Any]] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        kinds = {"lost": self.lost, "double": self.double, "torn": self.torn, "wrong": self.wrong}
        return [f"{kind}: {line}" for kind, lines in kinds.items() for line in lines]

    def reasons(self, status: str, inbox: str = "") -> dict[bytes, str]:
        """The reason of each file whose last version has this status, by path."""
        last = {path: rows[-1] for (name, path), rows in self.rows.items() if name == inbox}
        return {path: row.reason for path, row in last.items() if STATUS_NAMES[row.status] == status}


@dataclass(frozen=True)
class Row:
    id: int
    status: int
    digest: str  # hexadecimal
    models: list[int]
    bin: str
    reason: str
    emitted: bool


def judge(
    site: Site, inboxes: Sequence[Inbox], *, finished: bool = True, deleted: frozenset[bytes] = frozenset()
) -> Verdict:
    """Compare what was dropped with what became of it.

    finished: whether all work must be finished; otherwise rows may be PENDING and files may be unknown.
    deleted: paths whose last version was deleted, so that it may have any state.
    """
    verdict = Verdict()
    with contextlib.closing(sqlite3.connect(f"file:{site.ledger}?mode=ro", uri=True)) as connection:
        if (health := connection.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            verdict.wrong.append(f"the ledger's integrity check says {health}")
        for inbox in inboxes:
            rows = _rows(connection, inbox)
            verdict.rows |= {(inbox.name, path): versions for path, versions in rows.items()}
            verdict.counts.update(STATUS_NAMES[row.status] for versions in rows.values() for row in versions)
            _judge_rows(inbox, rows, verdict, finished, deleted)
            _judge_sidecars(connection, site, inbox, rows, verdict)
            _judge_sources(site, inbox, rows, verdict, deleted)
    return verdict


def _rows(connection: sqlite3.Connection, inbox: Inbox) -> dict[bytes, list[Row]]:
    """Every version of every file, oldest first."""
    query = """SELECT image.path, image.id, status, hex(digest), models, bin, reason, emitted
               FROM image JOIN inbox ON inbox.id = image.inbox WHERE inbox.path = ? ORDER BY image.id"""
    found: dict[bytes, list[Row]] = {}
    for path, number, status, digest, models, name, reason, emitted in connection.execute(
        query, (os.fsencode(inbox.path),)
    ):
        row = Row(
            number,
            status,
            digest.lower(),
            json.loads(models or "[]"),
            name or "",
            reason or "",
            bool(emitted),
        )
        found.setdefault(path, []).append(row)
    return found


def _judge_rows(
    inbox: Inbox, rows: Mapping[bytes, list[Row]], verdict: Verdict, finished: bool, deleted: frozenset[bytes]
) -> None:
    for path in rows.keys() - inbox.dropped.keys():
        verdict.wrong.append(f"{path!r} has a row but was never dropped")
    for path, digests in inbox.dropped.items():
        versions = rows.get(path, [])
        living = [row for row in versions if row.status != GONE]
        if len(versions) > len(digests):
            verdict.double.append(f"{path!r} was dropped {len(digests)} times and has rows {versions}")
        if path in deleted or not finished:
            continue
        if not living or living[-1].status == PENDING:
            verdict.lost.append(f"{path!r} has no end: {versions}")
        elif living[-1].digest and living[-1].digest != digests[-1]:
            verdict.wrong.append(f"{path!r} was read as {living[-1].digest}, its bytes are {digests[-1]}")
        elif living[-1].status == DONE and not living[-1].digest:
            verdict.wrong.append(f"{path!r} is DONE and has no digest")


def _judge_sidecars(
    connection: sqlite3.Connection,
    site: Site,
    inbox: Inbox,
    rows: Mapping[bytes, list[Row]],
    verdict: Verdict,
) -> None:
    """The newest DONE row of each path has its sidecar, and a path that is FAILED now has its reason;
    there are no other files."""
    for status, folder in ((DONE, site.results / inbox.name), (FAILED, site.failed / inbox.name)):
        of_status = {
            row.id: (path, row) for path, versions in rows.items() for row in versions if row.status == status
        }
        unpublished = [path for path, row in of_status.values() if not row.emitted]
        verdict.lost += [f"{path!r} is {STATUS_NAMES[status]} but not published" for path in unpublished]
        owners = {
            row.id: (path, row)
            for path, row in of_status.values()
            if row.emitted and _is_owner(row, rows[path])
        }
        seen: collections.Counter[int] = collections.Counter()
        for file, document in _documents(folder, rows, verdict):
            number = document.get("id")
            if number in owners:
                seen[number] += 1
                if status == DONE:
                    verdict.results[inbox.name, owners[number][0]] = document
                verdict.wrong += [
                    f"{file!r}: {lie}" for lie in _lies(connection, folder, file, document, *owners[number])
                ]
            elif number not in of_status or _is_owner(of_status[number][1], rows[of_status[number][0]]):
                verdict.wrong.append(f"{file!r} is of no published {STATUS_NAMES[status]} row: id {number}")
            elif status == DONE or any(
                row.status == DONE and row.id > number for row in rows[of_status[number][0]]
            ):
                verdict.wrong.append(f"{file!r} is of id {number}, whose file has a newer result")
        verdict.double += [
            f"{owners[number][0]!r} has {count} sidecars" for number, count in seen.items() if count > 1
        ]
        verdict.lost += [
            f"{owners[n][0]!r} is {STATUS_NAMES[status]} without a sidecar"
            for n in owners.keys() - seen.keys()
        ]


def _is_owner(row: Row, versions: Sequence[Row]) -> bool:
    """Whether this version, of all versions of the file, must have the sidecar or the reason."""
    later = [other for other in versions if other.id > row.id]
    if row.status == DONE:
        return all(other.status != DONE for other in later)
    return all(other.status == GONE for other in later)


def _documents(
    folder: Path, rows: Mapping[bytes, list[Row]], verdict: Verdict
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every sidecar in a folder, by path; any other file must be a source that was moved there."""
    for file in _files(os.fsencode(folder)):
        relative = os.path.relpath(file, os.fsencode(folder))
        if os.path.basename(file).startswith(b".") or file.endswith(b".tmp"):
            verdict.torn.append(f"{file!r} was left behind")
        elif file.endswith(b".json"):
            document = _parse(file)
            if document is None:
                verdict.torn.append(f"{file!r} is no whole JSON object")
            else:
                yield file, document
        elif relative not in rows:
            verdict.wrong.append(f"{file!r} belongs to nothing")


def _parse(file: bytes) -> dict[str, Any] | None:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    with open(file, "rb") as opened:
        data = opened.read()
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except ValueError:
        return None
    return document if isinstance(document, dict) and data.endswith(b"}\n") else None


def _path_of(document: Mapping[str, Any]) -> bytes:
    source = document.get("source", {})
    encoded = source.get("path_base64")
    return base64.b64decode(encoded) if encoded else str(source.get("path", "")).encode()


def _lies(
    connection: sqlite3.Connection,
    folder: Path,
    file: bytes,
    document: Mapping[str, Any],
    path: bytes,
    row: Row,
) -> Iterator[str]:
    """What is wrong in a sidecar."""
    if document.get("schema") != "visiond/1":
        yield f"schema {document.get('schema')!r}"
    if _path_of(document) != path:
        yield f"it says it is of {_path_of(document)!r}, its row is of {path!r}"
    expected = os.path.join(os.fsencode(folder), path + b".json")
    if (
        len(os.path.basename(expected)) <= LONGEST_NAME
        and file != expected
        and not os.path.basename(file).startswith(b"~")
    ):
        yield f"its name should be {expected!r}"
    digest = document.get("source", {}).get("digest", "")
    if digest != (f"sha256:{row.digest}" if row.digest else ""):
        yield f"digest {digest}, its row has {row.digest}"
    if row.status == FAILED:
        if (document.get("status"), document.get("reason")) != ("FAILED", row.reason):
            yield f"it says {document.get('status')} ({document.get('reason')}), its row FAILED ({row.reason})"
        return
    if document.get("bin", {}).get("name") != row.bin:
        yield f"bin {document.get('bin')}, its row has {row.bin}"
    results = _results(connection, row)
    if len(results) != len(row.models) or not results:
        yield f"models {row.models} gave only {sorted(results)} in the ledger"
    said = {stage: document[key] for stage, key in SIDECAR_KEYS.items() if key in document}
    if said != results:
        yield "its results are not the ledger's"
    if set(document.get("timings", {})) != set(results) or set(document.get("models", {})) != set(results):
        yield "timings and models are not of the stages that answered"


def _results(connection: sqlite3.Connection, row: Row) -> dict[str, Any]:
    """The results that the ledger has for a DONE row, by stage."""
    query = """SELECT stage, payload FROM content JOIN result ON content.id = content JOIN model ON model.id = model
               WHERE digest = ? AND model = ?"""
    found = [connection.execute(query, (bytes.fromhex(row.digest), model)).fetchone() for model in row.models]
    return {stage: json.loads(payload) for stage, payload in filter(None, found)}


def _judge_sources(
    site: Site, inbox: Inbox, rows: Mapping[bytes, list[Row]], verdict: Verdict, deleted: frozenset[bytes]
) -> None:
    """The bytes of each file are in exactly one place; those of a DONE file, or of an archive that was unpacked, with
    on_success = "delete" are in none."""
    places = {"inbox": inbox.path, "done": site.done / inbox.name, "failed": site.failed / inbox.name}
    bins = sorted((site.bins / inbox.name).iterdir()) if (site.bins / inbox.name).is_dir() else []
    moved_to = dict.fromkeys(bins) if site.bins_mode == "move" else {}
    folders = [os.fsencode(folder) for folder in (*places.values(), *moved_to)]
    for folder in (inbox.path, *places.values(), *bins):
        for file in _files(os.fsencode(folder)):
            name = os.path.basename(file)
            if name.startswith(b".visiond-") and name != UNPACKED_MARK:
                verdict.torn.append(f"{file!r} was left behind")
    for path, digests in inbox.dropped.items():
        if path in deleted or not digests[-1]:
            continue
        row = rows[path][-1] if path in rows else None
        copies = [file for folder in folders if os.path.isfile(file := os.path.join(folder, path))]
        is_over = row and (row.status == DONE or row.reason == "unpacked")
        wanted = 0 if is_over and inbox.on_success == "delete" else 1
        if len(copies) != wanted and not (row and row.status == PENDING):
            (verdict.lost if len(copies) < wanted else verdict.double).append(
                f"{path!r} itself lies at {copies}"
            )
        verdict.wrong += [f"{copy!r} has other bytes" for copy in copies if digest_of(copy) != digests[-1]]
        if row and row.status == DONE and row.emitted and site.bins_mode != "none":
            held = [folder.name for folder in bins if os.path.isfile(os.path.join(os.fsencode(folder), path))]
            if held != [row.bin]:
                verdict.wrong.append(f"{path!r} is in bins {held}, its row says {row.bin}")


def digest_of(file: bytes) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(folder: bytes) -> Iterator[bytes]:
    for where, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(where, name)
