"""Make the daemon's objects, with defaults for everything that a test does not care about."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from daemon.config.loading import parse
from daemon.core.jobs import Attempt, Content, Ending, Failure, File, Job, JobStatus, Version
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from daemon.ledger.statements import run_rows
from daemon.results.destinations import Destination
from stages.contract.base import Provenance, Reason
from stages.contract.binning import Thresholds, judge
from stages.registry import fake
from stages.registry.registry import ORDER

MODELS = [Model(s, f"{s}-1", "", Provenance(name=f"{s}-small", commit="0123456789ab")) for s in ORDER]
VERSION = Version(inode=2, size=3, mtime_ns=4, ctime_ns=5)
# bins and on_success, where the source is not deleted
MODES = [
    ("none", "keep"),
    ("none", "move"),
    ("link", "keep"),
    ("link", "move"),
    ("copy", "keep"),
    ("copy", "move"),
    ("move", "keep"),
]


@dataclass
class Commits:
    """observe: called with the seconds of each commit of the fixture `ledger`."""

    observe: Callable[[float], None] = lambda seconds: None


def make_file(path: bytes = b"a.jpg", *, inbox: int = 1, regular: bool = True, **version: int) -> File:
    return File(inbox, path, VERSION._replace(**version), regular)


def make_job(path: bytes = b"a.jpg", *, version: Version = VERSION, **fields: Any) -> Job:
    usual: dict[str, Any] = {"id": 1, "inbox": 1, "location": b"", "attempts": 0, "seen_at": 1e9}
    return Job(path=path, version=version, **usual | fields)


def make_outputs(variant: int = 3, stages: Iterable[str] = ORDER) -> dict[str, Output]:
    """The fake stages' results for an image of 640 × 480. Variant 0 has neither text nor objects,
    3 has three lines."""
    answers = {stage: fake.answer(stage, variant, 640, 480, frozenset(ORDER)) for stage in stages}
    return {stage: Output(msgspec.json.encode(answer), 0.25) for stage, answer in answers.items()}


def content_of(data: bytes = b"an image", outputs: dict[str, Output] | None = None) -> Content:
    """What is known about these bytes, once they are in the slab and their header has been read."""
    return Content(hashlib.sha256(data).digest(), "JPEG", 640, 480, outputs=outputs or {})


def make_attempt(job: Job | None = None, outputs: dict[str, Output] | None = None, **fields: Any) -> Attempt:
    job = job or make_job()
    return Attempt(job, content_of(job.path, outputs), **fields)


def done(
    job: Job, variant: int = 3, data: bytes | None = None, outputs: dict[str, Output] | None = None
) -> Ending:
    """The job's end with every stage's result; each path has its own bytes unless `data` says otherwise."""
    content = content_of(job.path if data is None else data, outputs or make_outputs(variant))
    verdict = judge({stage: output.payload for stage, output in content.outputs.items()}, Thresholds())
    criteria = msgspec.json.encode(verdict.criteria)
    return Ending(job, JobStatus.DONE, 2e9, job.attempts + 1, verdict.name, criteria, content=content)


def failed(
    job: Job,
    reason: Reason = Reason.TRUNCATED,
    detail: str = "its end is missing",
    outputs: dict[str, Output] | None = None,
) -> Ending:
    why, content = Failure(reason, detail), content_of(outputs=outputs)
    return Ending(job, JobStatus.FAILED, 2e9, job.attempts + 1, failure=why, content=content)


def postponed(job: Job, not_before: float) -> Ending:
    failure = Failure(Reason.STAGE, "the stage stumbled", transient=True)
    return Ending(job, JobStatus.PENDING, 2e9, job.attempts + 1, failure=failure, not_before=not_before)


def make_record(folder: Path, path: bytes = b"a.jpg", data: bytes | None = None, **fields: Any) -> Record:
    """An image's record; with `data`, its source is in `folder`, the inbox, with these bytes."""
    location = os.path.join(os.fsencode(folder), path)
    if data is not None:
        os.makedirs(os.path.dirname(location), exist_ok=True)
        with open(location, "wb") as file:
            file.write(data)
        fields = {"version": Version.of(os.stat(location)), "digest": hashlib.sha256(data).digest()} | fields
    outputs = fields.get("outputs", make_outputs())
    verdict = msgspec.json.encode(
        judge({name: o.payload for name, o in outputs.items()}, Thresholds()).criteria
    )
    whole: dict[str, Any] = {
        "id": 7,
        "inbox": 1,
        "inbox_path": os.fsencode(folder),
        "path": path,
        "location": location,
        "version": VERSION,
    }
    whole |= {
        "status": JobStatus.DONE,
        "attempts": 1,
        "seen_at": 1e9,
        "finished_at": 2e9,
        "digest": bytes(32),
    }
    whole |= {"format": "JPEG", "width": 640, "height": 480, "outputs": outputs, "models": MODELS}
    whole |= {"bin": "A", "criteria": verdict, "reason": "", "detail": ""}
    return Record(**whole | fields)


async def admit(ledger: Ledger, *paths: bytes) -> list[Job]:
    """A job in flight for each path."""
    await ledger.admit([make_file(path) for path in paths])
    return await ledger.next_jobs(len(paths), ())


async def complete(ledger: Ledger, *endings: Ending) -> Sequence[Record]:
    """End these jobs; returns the records to publish now."""
    return (await ledger.end(endings)).published()


def open_destination(root: Path, bins: str = "none", on_success: str = "keep", **output: Any) -> Destination:
    """The destination of an inbox at root/inbox; all other folders are next to it."""
    tables = {"inbox": [{"path": "inbox", "on_success": on_success}], "output": {"bins": bins} | output}
    config = parse(tables, root)
    return Destination.of(config.inbox[0], config)


def drop(root: Path, path: bytes = b"a.jpg", data: bytes = b"image", **fields: Any) -> Record:
    """An image in root/inbox that is DONE and not published."""
    return make_record(root / "inbox", path, data, **fields)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under root: its bytes, or where it links to."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            link = os.path.islink(path)
            content = (
                os.fsencode("-> " + os.path.relpath(os.readlink(path), root))
                if link
                else Path(path).read_bytes()
            )
            found[os.path.relpath(path, root)] = content
    return found


def put_in_the_way(file: Path, kind: str) -> None:
    """Put something that is no file at its path: a FIFO, socket, device or folder."""
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(file.parent):
            listening.bind(file.name)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()


def known_versions(reader: Reader, paths: list[bytes], inbox: int = 1) -> set[tuple[object, ...]]:
    """The path and the fields of the version of every version of these files that the ledger knows."""
    with reader.lend() as connection:
        return set(map(tuple, run_rows(connection, "versions", [(path,) for path in paths], inbox)))
