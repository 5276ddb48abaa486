"""A state folder with a ledger whose images have texts of the test's choice, and its search."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from daemon.core.jobs import Ending, Job, JobStatus, Placed
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.search.query import parse
from daemon.search.searcher import Searcher
from stages.contract.base import StageSpec
from tests.makers import MODELS, done, failed, make_file, make_outputs

Answers = Mapping[str, Any]


class Place:
    """A state folder with a ledger and its search."""

    def __init__(self, state: Path, spec: StageSpec | None = None, least: float = 0.0) -> None:
        """spec: of the stage whose text encoder compares sentences. least: probability."""
        self.state = state
        self.ledger = Ledger(state / "ledger.sqlite")
        self._run(self.ledger.register([(Path("/srv/inbox"), 0)], MODELS))
        self.reader = Reader(self.ledger.path)
        self.search = Searcher(state, self.reader, spec, least)

    def close(self) -> None:
        self.search.close()
        self.reader.close()
        self.ledger.close()

    def add(self, name: str, text: str = "", *, size: int = 3, **answers: Any) -> None:
        """An image with this text, or without a result if text is empty; published."""
        self._run(self.ledger.admit([make_file(name.encode(), size=size)]))
        self.annotate(text, **answers)

    def annotate(self, text: str, **answers: Any) -> None:
        self._run(self._annotate(text, answers))

    async def _annotate(self, text: str, answers: Answers) -> None:
        jobs = await self.ledger.next_jobs(9, ())
        outputs = make_outputs() | {
            stage: Output(msgspec.json.encode(answer), 0.1)
            for stage, answer in {"ocr": page(text), **answers}.items()
        }
        endings = [self._end(job, outputs) if text else failed(job) for job in jobs]
        await self.ledger.end(endings)
        await self.ledger.mark_emitted([Placed(ending.job.id) for ending in endings])

    def _end(self, job: Job, outputs: dict[str, Output]) -> Ending:
        ending = done(job, data=job.path + bytes([job.version.size]))  # in bin A, whatever it says
        return replace(ending, content=ending.content.with_outputs(outputs))

    def begin_with(self, fingerprint: str, stage: str = "ocr", notice: str = "") -> None:
        """The daemon starts again with another model for a stage."""
        models = [*(model for model in MODELS if model.stage != stage), Model(stage, fingerprint, notice)]
        self._run(self.ledger.register([(Path("/srv/inbox"), 0)], models))

    def put_back(self, image: int) -> None:
        self._run(self.ledger.put_back(JobStatus.DONE, [image]))

    def damage(self, image: int, change: str = "criteria = x'ff'") -> None:
        """Flip bits in its row."""
        change = f"UPDATE image SET {change} WHERE id = ?"
        self._run(self.ledger.run(lambda connection: connection.execute(change, (image,))))

    def find(self, text: str, **options: Any) -> list[int]:
        self.search.catch_up()
        return [hit.image for hit in self.search.newest(parse(text), **options).hits]

    def _run(self, work: Any) -> Any:
        """In a thread of its own: a test with a browser has an event loop already."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()


def page(text: str) -> Answers:
    box = [[0, 0], [1, 0], [1, 1], [0, 1]]
    lines = [{"text": line, "score": 0.9, "box": box} for line in text.splitlines()]
    return {"lines": lines, "count": len(lines), "area_ratio": 0.1}
