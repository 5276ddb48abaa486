"""Stores what models say about an image's bytes, once for the same bytes and model: who comes second gets what is there."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

import structlog

from daemon.jobs import Job
from daemon.ledger.rows import Generations, Key, Stored, content_row, read_stored, result_row
from daemon.ledger.statements import SQL, run_rows

log = structlog.get_logger()


class Results:
    """The tables `content` and `result`. All of this runs in the writing thread."""

    def __init__(self, generations: Generations) -> None:
        self.touched: set[bytes] | None = None  # digests written since pruning began; None without pruning
        self._generations = generations
        self._damaged: set[Key] = set()

    def write(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> bool:
        """Write results, except those that the same bytes already have; returns whether all were written."""
        if (touched := self.touched) is not None:  # the event loop may end pruning during this
            touched.update(job.digest for job in jobs)
        contents = [content_row(job) for job in jobs if job.width]
        results = [
            result_row(job.digest, (number := numbers[stage]), self._generations.models[number], output)
            for job in jobs
            for numbers in [self._generations.of(job)]
            for stage, output in job.outputs.items()
        ]
        if self._damaged:
            self._drop_damaged(connection, self._damaged & {Key(row[0], None) for row in contents})
        run_rows(connection, "keep_content", contents)
        changes = connection.total_changes
        run_rows(connection, "keep_result", results)
        return connection.total_changes - changes == len(results)

    def read(self, connection: sqlite3.Connection, digests: Collection[bytes]) -> Stored:
        """What is known about these bytes. Damaged results are not used: the model runs again, and its new result
        replaces the damaged one."""
        models = self._generations.models
        stored = read_stored(connection, digests, models)
        for digest, model in stored.damaged - self._damaged:
            what = models[model].stage if model in models else "format and size"
            log.error("result damaged in the ledger; its model runs again", what=what, digest=digest.hex())
        self._damaged |= stored.damaged
        return stored

    def take(self, connection: sqlite3.Connection, jobs: Sequence[Job]) -> list[Job]:
        """Give the jobs the results that the ledger has; returns the jobs whose own results differed."""
        digests = {job.digest for job in jobs}
        stored = self.read(connection, digests)
        of = self._generations.of
        known = {Key(job.digest, of(job)[stage]) for job in jobs for stage in job.outputs}
        if stored.damaged & known:
            self._drop_damaged(connection, stored.damaged & known)
            self.write(connection, jobs)
            stored = self.read(connection, digests)
        changed = []
        for job in jobs:
            kept, models = stored.results.get(job.digest, {}), of(job)
            outputs = {stage: kept.get(models[stage], said) for stage, said in job.outputs.items()}
            if any(outputs[stage].payload != said.payload for stage, said in job.outputs.items()):
                changed.append(job)
            job.outputs = outputs
        return changed

    def _drop_damaged(self, connection: sqlite3.Connection, damaged: Collection[Key]) -> None:
        """Delete damaged rows; the caller then writes the rows that replace them."""
        connection.executemany(SQL["drop_content"], [(digest,) for digest, model in damaged if model is None])
        connection.executemany(SQL["drop_result"], [key for key in damaged if key[1] is not None])
        self._damaged -= set(damaged)
