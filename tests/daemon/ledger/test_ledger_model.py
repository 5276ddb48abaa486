"""Compares the ledger with a simple model of it, a dictionary."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daemon.core.jobs import Admitted, Ending, Job, JobStatus, Placed
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from tests.makers import MODELS, done, failed, make_file, make_outputs, postponed

T = TypeVar("T")
Key = tuple[int, bytes, int]  # inbox, path, size: a version

PRIORITIES = {1: 0, 2: 5, 3: 0}  # by inbox
NEVER = 1e12  # Unix seconds
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # no disk, as nothing here is about durability


@dataclass
class Row:
    """An image as the model knows it."""

    number: int  # of its admission
    status: JobStatus = JobStatus.PENDING
    attempts: int = 0
    not_before: float = 0.0
    handed: bool = False  # out for the first time since the ledger was opened
    emitted: bool = False
    has_result: bool = False  # and is still PENDING


class LedgerModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.rows: dict[Key, Row] = {}
        self.ids: dict[int, Key] = {}
        self.hand: dict[int, Job] = {}
        self.pauses = 0

    @initialize()
    def open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        inboxes = [(self.folder / str(inbox), priority) for inbox, priority in PRIORITIES.items()]
        assert self.run(self.ledger.register(inboxes, MODELS)) == list(PRIORITIES)
        self.reader = Reader(self.ledger.path)

    def close(self) -> None:
        self.reader.close()
        self.ledger.close()

    def teardown(self) -> None:
        self.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, request: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(request)

    # What may happen

    @rule(
        keys=st.sets(
            st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([b"a", b"b", b"\xff"]), st.integers(0, 6)),
            max_size=5,
        )
    )
    def admit(self, keys: set[Key]) -> None:
        new = [key for key in keys if key not in self.rows]
        known = [key for key in keys if key in self.rows and self.rows[key].status is not JobStatus.GONE]
        old = [
            row
            for key, row in self.rows.items()
            if row.status is JobStatus.PENDING and key[:2] in {key[:2] for key in new}
        ]
        kept = [row for row in old if row.has_result]
        for row in old:
            self.drop(row)
        files = [make_file(path, inbox=inbox, size=size) for inbox, path, size in known + new]
        latest = {key[:2]: versions[-1] for key in new if (versions := self.versions(key))}
        failures = sum(row.status is JobStatus.FAILED for row in latest.values())
        self.rows |= {key: Row(len(self.rows) + index) for index, key in enumerate(new)}
        assert self.run(self.ledger.admit(files)) == Admitted(
            len(new), 0, len(old) - len(kept), failures, len(kept)
        )

    def drop(self, row: Row) -> None:
        """The file is gone."""
        row.status = JobStatus.DONE if row.has_result else JobStatus.GONE
        row.has_result = False

    def versions(self, key: Key) -> list[Row]:
        """The versions of a key's file, oldest first."""
        return sorted(
            (row for other, row in self.rows.items() if other[:2] == key[:2]), key=lambda row: row.number
        )

    @rule(limit=st.integers(1, 8))
    def next_jobs(self, limit: int) -> None:
        held = {self.ids[number] for number in self.hand}
        pending = [
            (key, row)
            for key, row in self.rows.items()
            if row.status is JobStatus.PENDING and key not in held
        ]
        due = sorted((row.not_before, row.number, key) for key, row in pending if 0 < row.not_before < NEVER)
        fresh = sorted(
            (-PRIORITIES[key[0]], row.number, key)
            for key, row in pending
            if not row.not_before and not row.handed
        )
        expected = [entry[-1] for entry in [*due, *fresh]][:limit]
        jobs = self.run(self.ledger.next_jobs(limit, self.hand.keys()))
        assert [(job.inbox, job.path, job.version.size) for job in jobs] == expected
        for job, key in zip(jobs, expected, strict=True):
            row = self.rows[key]
            assert (job.attempts, job.has_result, self.ids.setdefault(job.id, key)) == (
                row.attempts,
                row.has_result,
                key,
            )
            row.handed = row.handed or not row.not_before
            self.hand[job.id] = job

    @precondition(lambda self: self.hand)
    @rule(data=st.data(), status=st.sampled_from(list(JobStatus)), far=st.booleans())
    def end(self, data: st.DataObject, status: JobStatus, far: bool) -> None:
        job = self.hand.pop(data.draw(st.sampled_from(sorted(self.hand))))
        row = self.rows[self.ids[job.id]]
        ending = self.ending(job, status, far)
        ended = self.run(self.ledger.end([ending])).newest
        assert ended == (
            {job.id} if row.status is JobStatus.PENDING and status is not JobStatus.PENDING else set()
        )
        if row.status is JobStatus.PENDING and ending.keeps_result:
            self.drop(row)
        elif row.status is JobStatus.PENDING:
            row.status, row.attempts, row.emitted = status, ending.attempts, False
            row.not_before = ending.not_before or row.not_before
            row.has_result &= status is JobStatus.PENDING

    def ending(self, job: Job, status: JobStatus, far: bool) -> Ending:
        match status:
            case JobStatus.DONE:
                return done(job)
            case JobStatus.FAILED:
                return failed(job)
            case JobStatus.PENDING:
                self.pauses += 1
                return postponed(job, NEVER if far else 1.0 + self.pauses)
        return Ending(job, status, 2e9, job.attempts)

    @rule(data=st.data(), status=st.sampled_from([JobStatus.FAILED, JobStatus.DONE]))
    def put_back(self, data: st.DataObject, status: JobStatus) -> None:
        number = data.draw(st.sampled_from(sorted(self.ids) or [1]))
        key = self.ids.get(number, (0, b"", 0))
        row = self.rows.get(key)
        back = self.run(self.ledger.put_back(status, [number]))
        assert back == (
            1 if row and row.status is status and row.emitted and row is self.versions(key)[-1] else 0
        )
        if row and back:
            row.status, row.attempts, row.not_before = JobStatus.PENDING, 0, 1.0
            row.has_result = status is JobStatus.DONE

    @rule(count=st.integers(1, 3))
    def emit(self, count: int) -> None:
        records = self.run(self.ledger.owed(0, count))
        self.run(self.ledger.mark_emitted([Placed(record.id) for record in records]))
        for record in records:
            self.rows[self.ids[record.id]].emitted = True

    @rule()
    def reopen(self) -> None:
        self.close()
        self.hand.clear()
        for row in self.rows.values():
            row.handed = False
        self.open()

    # What is true at any time

    @invariant()
    def every_image_is_in_the_state_it_should_be_in(self) -> None:
        expected = dict.fromkeys(JobStatus, 0)
        for key, row in self.rows.items():
            expected[row.status] += row.status is not JobStatus.FAILED or row is self.versions(key)[-1]
        assert self.reader.counts() == expected

    @invariant()
    def what_ended_is_owed_until_it_is_emitted(self) -> None:
        owed = self.run(self.ledger.owed(0, 1000))
        ended = (JobStatus.DONE, JobStatus.FAILED)
        expected = {key for key, row in self.rows.items() if row.status in ended and not row.emitted}
        assert {self.ids[record.id] for record in owed} == expected
        assert all(
            record.outputs == (make_outputs() if record.status is JobStatus.DONE else {}) for record in owed
        )


LedgerModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestLedgerModel = LedgerModel.TestCase
