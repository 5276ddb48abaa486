"""The coordinator as an executor in a process of its own sees it. wire.py has the messages; remote.py answers them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from daemon.core.jobs import RECORDED, Content, Ending, Job, Read
from daemon.ledger.record import Committed, Model, Record
from daemon.ledger.rows import checksums_of
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.samples import read_samples
from daemon.pipeline import wire
from daemon.pipeline.executor import Executor, Published
from daemon.results.destinations import Destination
from daemon.system.log import set_up


class RemoteCoordinator:
    """The coordinator, as the executor sees it: each call is a message and its answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, models: Mapping[str, Model]
    ) -> None:
        """models: by stage."""
        self._reader, self._writer = reader, writer
        self._models = models
        self._destinations: Mapping[int, Destination] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {}

    async def listen(self, executor: Executor) -> None:
        """Take messages until the daemon says stop or is gone."""
        while True:
            match message := wire.decode_to_executor(await wire.receive(self._reader)):
                case wire.LogLevel(level):
                    set_up(level, "json")
                case wire.Drain():
                    executor.drain()
                case wire.ExecutorStop():
                    return
                case wire.Jobs() | wire.Known() | wire.Done() | wire.Ended():
                    self._calls.pop(message.number).set_result(message)

    def serve(self, destinations: Mapping[int, Destination]) -> None:
        """destinations: by the number of their inbox."""
        self._destinations = destinations

    async def _call(self, message: wire.Call) -> wire.Answer:
        future = self._calls[message.number] = asyncio.get_running_loop().create_future()
        wire.send(self._writer, message)
        answer: wire.Answer = await future
        return answer

    async def next_jobs(self, executor: object) -> list[Job]:
        answer = await self._call(wire.NextJobs(next(self._numbers)))
        assert isinstance(answer, wire.Jobs)
        for destination in self._destinations.values():
            destination.known_bins.update(map(os.fsencode, answer.bins))
        return answer.jobs

    async def note_read(self, read: Mapping[int, Read]) -> dict[int, Content | None]:
        answer = await self._call(wire.NoteRead(next(self._numbers), dict(read)))
        assert isinstance(answer, wire.Known)
        return answer.contents

    async def keep(self, contents: Sequence[Content]) -> None:
        await self._call(wire.Keep(next(self._numbers), list(contents)))

    async def blame(self, image: int, deaths: int) -> None:
        await self._call(wire.Blame(next(self._numbers), image, deaths))

    async def end(self, endings: Sequence[Ending]) -> Committed:
        records = self._records_of(endings)
        summed = [
            replace(e, checksums=checksums_of(e.content, records.get(e.job.id), self._models_of(e.content)))
            for e in endings
        ]
        answer = await self._call(wire.End(next(self._numbers), summed))
        assert isinstance(answer, wire.Ended)
        changed = {ending.job.id: ending for ending in answer.changed}
        records |= self._records_of(answer.changed)
        return Committed([changed.get(e.job.id, e) for e in summed], answer.newest, records)

    def _records_of(self, endings: Iterable[Ending]) -> dict[int, Record]:
        """By image."""
        return {
            e.job.id: Record.of(e, self._destinations[e.job.inbox].inbox, self._models_of(e.content))
            for e in endings
            if e.status in RECORDED
        }

    def _models_of(self, content: Content) -> list[Model]:
        """Of its outputs."""
        return [self._models[stage] for stage in content.outputs]

    async def note_published(self, group: Published) -> None:
        publication = group.publication
        await self._call(
            wire.NotePublished(
                next(self._numbers),
                [ending.job.id for ending in group.endings],
                group.newest,
                publication.placed,
                publication.held,
                sorted(publication.folders),
                publication.begun_at,
            )
        )

    def let_go(self, images: Sequence[int]) -> None:
        wire.send(self._writer, wire.LetGo(list(images)))

    def report(self, executor: Executor, metrics: Metrics) -> None:
        executor.measure()
        wire.send(self._writer, wire.ExecutorReport(executor.state(), read_samples(metrics.of_executors())))

    def say(self, message: wire.Staffed | wire.ExecutorFarewell) -> None:
        wire.send(self._writer, message)
