"""An image as the ledger knows it, with its results: what its sidecar is written from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from msgspec import structs

from daemon import __version__
from daemon.core.jobs import Ending, JobStatus, Version, list_published, reason_of
from daemon.core.messages import Output
from daemon.core.sidecar import KEYS, SCHEMA, describe_source, timestamp
from daemon.ledger import checksums
from stages.contract.base import Provenance, StageSpec


@dataclass(frozen=True, slots=True)
class Model:
    """The model that gave a stage's result."""

    stage: str
    fingerprint: str
    notice: str
    provenance: Provenance = field(default=Provenance(), compare=False)
    former: tuple[Provenance, ...] = field(default=(), compare=False)  # what older sidecars say that it is

    @classmethod
    def of(cls, spec: StageSpec) -> Model:
        provenance = structs.replace(spec.provenance, visiond=__version__)
        return cls(spec.name, spec.fingerprint, spec.notice, provenance)

    def as_told(self, provenance: Provenance) -> Model:
        """As a sidecar says that it is, if it may: what the ledger was ever told, nothing, or anything if the ledger does not
        know. Otherwise as the ledger knows it."""
        may_be = not self.provenance.name or provenance in (Provenance(), *self.former)
        return replace(self, provenance=provenance) if may_be else self


@dataclass(frozen=True, slots=True)
class Look:
    """How a second look ended: with a result, or why without."""

    model: Model
    output: Output | None
    reason: str = ""
    detail: str = ""

    def document(self) -> dict[str, Any]:
        """As in the sidecar."""
        document: dict[str, Any] = {"stage": self.model.stage, "model": self.model.fingerprint}
        if self.model.notice:
            document["notice"] = self.model.notice
        if self.model.provenance.name:
            document["provenance"] = self.model.provenance
        if self.output is None:
            return document | {"result": None, "reason": self.reason, "detail": self.detail}
        return document | {
            "result": msgspec.Raw(self.output.payload),
            "seconds": round(self.output.seconds, 6),
        }


class _LookTold(msgspec.Struct):
    provenance: Provenance = Provenance()


class _Told(msgspec.Struct):
    """What a sidecar says that its models are."""

    provenance: dict[str, Provenance] = {}
    second_looks: dict[str, _LookTold] = {}


UNKNOWN = Model("an unknown stage", "", "")


@dataclass  # not frozen: that would take twice the time to make one for each image
class Record:
    """An image's row with its results: everything that is known about it,
    and everything that a sidecar needs."""

    id: int
    inbox: int
    inbox_path: bytes
    path: bytes  # relative to the inbox
    location: bytes  # absolute: where the file is now
    version: Version
    status: JobStatus
    attempts: int
    seen_at: float
    finished_at: float | None
    digest: bytes
    format: str
    width: int
    height: int
    outputs: dict[str, Output]
    models: list[Model]
    bin: str
    criteria: bytes
    reason: str
    detail: str
    pages: int = 1  # pictures in the file; only one is read: see stages/images/pages.py
    looks: dict[str, Look] = field(default_factory=dict)  # second looks that have ended, by name
    former: tuple[bytes, ...] = ()  # paths that its file had before, where sidecar and bin are to be removed
    is_replaced: bool = False  # with `former`: a newer version has the sidecar of its present path
    damage: str = ""  # which parts of it are damaged in the ledger; such a record is not published

    @classmethod
    def of(cls, ending: Ending, inbox_path: bytes, models: list[Model]) -> Record:
        """The record of an ending, without reading it from the ledger. models: those that gave its results."""
        job, content = ending.job, ending.content
        reason, detail = reason_of(ending.failure)
        return cls(
            id=job.id,
            inbox=job.inbox,
            inbox_path=inbox_path,
            path=job.path,
            location=job.location or os.path.join(inbox_path, job.path),
            version=job.version,
            status=ending.status,
            attempts=ending.attempts,
            seen_at=job.seen_at,
            finished_at=ending.at,
            digest=content.digest,
            format=content.format,
            width=content.width,
            height=content.height,
            pages=content.pages,
            outputs=content.outputs,
            models=models if ending.status is JobStatus.DONE else [],
            bin=ending.bin,
            criteria=ending.criteria,
            reason=reason or "",
            detail=detail or "",
        )

    def all_models(self) -> list[Model]:
        """Also those of second looks."""
        return self.models + [look.model for look in self.looks.values()]

    def notices(self) -> list[tuple[str, str]]:
        """The stage and the notice, "" for none, of each model that made its results."""
        return [(model.stage, model.notice) for model in self.models]

    def provenance(self) -> dict[str, Provenance]:
        """What each of its models is, by fingerprint."""
        return {model.fingerprint: model.provenance for model in self.all_models()}

    def answers(self) -> list[tuple[Model, Output]]:
        """All its results, also those of second looks, and their models."""
        first = [(model, self.outputs[model.stage]) for model in self.models]
        return first + [(look.model, look.output) for look in self.looks.values() if look.output]

    @property
    def result_bytes(self) -> int:
        """The size of its results."""
        looks = sum([len(look.output.payload) for look in self.looks.values() if look.output])
        return len(self.criteria) + looks + sum([len(output.payload) for output in self.outputs.values()])

    @property
    def has_moved(self) -> bool:
        """Whether the daemon has moved the file out of its inbox."""
        return self.location != os.path.join(self.inbox_path, self.path)

    def has_file(self) -> bool:
        """Whether the file is there and, by its size and time, the one that was processed. Where the daemon has moved it, the
        disk may keep less exact times."""
        try:
            status = os.stat(self.location)
        except OSError:
            return False
        known = self.version
        return status.st_size == known.size and (self.has_moved or status.st_mtime_ns == known.mtime_ns)

    @property
    def summary(self) -> str:
        """Its bin, or in one line why it has none."""
        damage = f"damaged in the ledger: {self.damage}" if self.damage else ""
        return damage or self.bin or ": ".join(filter(None, (self.reason, self.detail)))

    def document(self) -> dict[str, Any]:
        """The record as in its sidecar; for an image without a result, with the reason instead."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "id": self.id,
            "source": describe_source(self.inbox_path, self, self),
        }
        if notices := sorted({model.notice for model in self.models} - {""}):
            document["notice"] = " ".join(notices)
        if self.status is JobStatus.DONE:
            document |= self._result()
        else:
            document |= {"status": self.status.name, "reason": self.reason, "detail": self.detail}
        if self.status is JobStatus.FAILED:
            document["attempts"] = self.attempts
        document["finished_at"] = timestamp(self.finished_at) if self.finished_at else None
        return document

    def _result(self) -> dict[str, Any]:
        """What its sidecar has if it is DONE."""
        # Plug-ins are in the order of the stored models: the sidecar must not change when one is uninstalled.
        stages = [stage for stage in dict.fromkeys((*KEYS, *self.outputs)) if stage in self.outputs]
        result: dict[str, Any] = {
            KEYS.get(stage, stage): msgspec.Raw(self.outputs[stage].payload) for stage in stages
        }
        result["bin"] = {"name": self.bin, "criteria": msgspec.Raw(self.criteria)}
        result["timings"] = {stage: round(output.seconds, 6) for stage, output in self.outputs.items()}
        result["models"] = {model.stage: model.fingerprint for model in self.models}
        if known := {m.stage: m.provenance for m in self.models if m.provenance.name}:
            result["provenance"] = known
        if self.looks:
            result["second_looks"] = {name: look.document() for name, look in self.looks.items()}
        return result

    def outline(self) -> dict[str, object]:
        """What happened to the image, in a few values: for webhooks and `visiond follow`."""
        outline: dict[str, object] = {
            "id": self.id,
            "status": self.status.name,
            "inbox": os.fsencode(self.inbox_path).decode(errors="replace"),
            "path": self.path.decode(errors="replace"),
            "location": self.location.decode(errors="replace"),
            "digest": f"sha256:{self.digest.hex()}" if self.digest else "",
            "finished_at": timestamp(self.finished_at) if self.finished_at else None,
        }
        if self.status is JobStatus.DONE:
            return outline | {"bin": self.bin}
        return outline | {"reason": self.reason, "detail": self.detail}

    @cached_property
    def sidecar(self) -> bytes:
        """One JSON object and a newline, encoded once for the sidecar and the sinks."""
        return msgspec.json.encode(self.document()) + b"\n"

    def sidecar_as_told(self, found: bytes) -> bytes:
        """Its sidecar if its models are what the sidecar `found` says, as far as they may be: older versions of visiond do not
        say it, and a model may have got another name. Empty if `found` is no sidecar."""
        try:
            told = msgspec.json.decode(found, type=_Told)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return b""
        models = [model.as_told(told.provenance.get(model.stage, Provenance())) for model in self.models]
        looks = {
            name: replace(look, model=look.model.as_told(told.second_looks.get(name, _LookTold()).provenance))
            for name, look in self.looks.items()
        }
        return replace(self, models=models, looks=looks).sidecar

    @property
    def checksum(self) -> int:
        """The checksum of what a sidecar has from the image's own row, by daemon/ledger/checksums.py.
        Results and sizes have their own checksums."""
        numbers = (
            f"{self.id} {self.version.size} {timestamp(self.seen_at)} {timestamp(self.finished_at or 0.0)}"
        )
        image = (numbers.encode(), self.inbox_path, self.path, self.digest)
        if self.status is JobStatus.DONE:
            made_by = [b"%d" % checksums.of_model(model.stage, model.fingerprint) for model in self.models]
            return crc32(b"".join((*made_by, *image, self.bin.encode(), self.criteria or b"{}")))
        failed = f"FAILED {self.attempts} {self.reason} {self.detail}"
        return crc32(b"".join((failed.encode(), *image)))


class Committed(NamedTuple):
    """What the ledger has written. newest: the ids of those that no newer version of their file has replaced. records: by
    image; what an executor in another process has committed is without them, as it makes its own."""

    endings: list[Ending]
    newest: set[int]
    records: Mapping[int, Record]

    def published(self) -> list[Record]:
        """Of those that get files."""
        return [self.records[each.job.id] for each in list_published(self.endings, self.newest)]


def notices_of(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    return (notice for record in records for notice in record.notices())


def describe_models(models: Iterable[Model]) -> list[dict[str, Any]]:
    """What is known of each model, as a flat row: what its fingerprint stands for. By stage and fingerprint."""
    return [
        {"fingerprint": m.fingerprint, "stage": m.stage, **structs.asdict(m.provenance), "notice": m.notice}
        for m in sorted(models, key=lambda model: (model.stage, model.fingerprint))
    ]
