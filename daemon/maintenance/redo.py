"""Chooses images that are DONE and can be processed again, and those whose results would differ now."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from daemon.config.loading import Config
from daemon.core.jobs import Attempt, Content, Job
from daemon.inbox.origin import origin_of
from daemon.layout.devices import select_devices
from daemon.layout.layout import digest_settings
from daemon.layout.models import resolve_models
from daemon.layout.second_looks import resolve_looks
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.results.destinations import Destination, open_destinations
from daemon.results.judge import Judge
from daemon.system.gpus import list_gpus


@dataclass(frozen=True, slots=True)
class Choice:
    """The numbers of the images to process again, and, by reason, how many must stay as they are."""

    ids: list[int]
    left: Counter[str]
    # those of them whose file cannot be read, though the inbox is there
    lost: list[int] = field(default_factory=list)
    settings_digest: str = ""  # of the settings by which results are stale


def choose(records: Iterable[Record], config: Config) -> Choice:
    """Choose the images whose files can still be read and whose inboxes are configured."""
    destinations = open_destinations(config)
    choice = Choice([], Counter())
    is_there: dict[bytes, bool | None] = {}
    for record in records:
        if why := _why_left(record, destinations.get(record.inbox_path)):
            choice.left[why] += 1
            root = record.inbox_path
            if root in destinations and root not in is_there:
                is_there[root] = origin_of(root).is_there()
            if is_there.get(root):
                choice.lost.append(record.id)
        else:
            choice.ids.append(record.id)
    return choice


def choose_newer(records: Iterable[Record], since: datetime | None) -> Iterable[Record]:
    """Those with results of this time or later, or all; without a time zone it is local time."""
    least = since.timestamp() if since else 0.0
    return (record for record in records if (record.finished_at or 0.0) >= least)


def choose_stale(
    reader: Reader,
    config: Config,
    track: Callable[[Iterable[Record]], Iterable[Record]] = lambda records: records,
) -> Choice:
    """Choose the images whose models, bin or criteria would differ now; those for which a rule of the user raises an error
    stay. track: gets all images, and returns the same ones. Raises ModelsUnusable, ConfigError."""
    gpus = list_gpus()
    # The daemon's own workers may use the memory of its GPUs by now.
    selected = select_devices(config, gpus, by_memory=False)
    specs = resolve_models(selected, gpus)
    wanted = CurrentModels(
        {stage: spec.fingerprint for stage, spec in specs.items()},
        {name: spec.fingerprint for name, spec in resolve_looks(selected, gpus, specs).items()},
    )
    judge = Judge.of(config, reader.inboxes())
    records = track(reader.newest_done(with_results=True))
    refused: Counter[str] = Counter()
    stale = (r for r in records if r.damage or _is_stale(r, wanted, judge, reader, refused))
    choice = choose(stale, config)
    return replace(choice, left=choice.left + refused, settings_digest=digest_settings(config, specs))


@dataclass(frozen=True, slots=True)
class CurrentModels:
    """The fingerprints of the current models, by stage and by second look."""

    stages: dict[str, str]
    looks: dict[str, str]


def _is_stale(
    record: Record, wanted: CurrentModels, judge: Judge, reader: Reader, refused: Counter[str]
) -> bool:
    """refused: gets why an image cannot be judged."""
    fingerprints = wanted.stages
    used = {model.stage: model.fingerprint for model in record.models}
    if not used.items() <= fingerprints.items():
        return True
    attempt = attempt_of(record)
    # a stage would run that did not run then
    if used != fingerprints and not judge.is_decided(attempt.content):
        return True
    (ending,) = judge.endings([attempt])
    if failure := ending.failure:
        refused[f"it would fail: {failure.reason}: {failure.detail}"] += 1
        return False
    if (ending.bin, ending.criteria) != (record.bin, record.criteria):
        return True
    had = {name: look.model.fingerprint for name, look in record.looks.items()}
    return any(
        had.get(name) != wanted.looks[name] and not reader.waits_for_look(record.id, name)
        for name in ending.looks
    )


def attempt_of(record: Record) -> Attempt:
    """An attempt at an image that has all its results."""
    version = (record.path, record.location, record.version)
    job = Job(record.id, record.inbox, *version, attempts=0, seen_at=record.seen_at)
    fields = (record.digest, record.format, record.width, record.height, record.pages, record.outputs)
    return Attempt(job, Content(*fields))


def _why_left(record: Record, destination: Destination | None) -> str:
    """Why the image cannot be processed again; empty if it can."""
    if destination is None:
        return "the inbox is not in the configuration"
    if destination.bins_mode in ("link", "copy") and record.location.startswith(
        os.path.join(destination.bins, b"")
    ):
        return f'the file is in a bin, and bins = "{destination.bins_mode}" moves no image'
    return origin_of(record.inbox_path).why_lost(record)
