"""Random histories of the schedule, beside a small model of the ledger and of executors that work, stumble and are lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from daemon.core.jobs import Failure, Job, Read
from daemon.pipeline.schedule import REST_SECONDS, Question, Schedule
from stages.contract.base import Reason
from tests.makers import done, make_job, postponed

HISTORIES, STEPS = 60, 3000
INBOXES = {0, 1, 2}


@dataclass
class Row:
    inbox: int
    path: bytes
    priority: int
    is_pending: bool = True
    due: float = 0.0
    attempts: int = 0
    published: int = 0


@dataclass
class History:
    """One run. work, ended: by executor, the images that it works on, and those that it has ended. owed: those that the
    daemon has to publish itself."""

    seed: int
    now: float = 0.0
    rows: dict[int, Row] = field(default_factory=dict)
    work: dict[str, list[Job]] = field(default_factory=dict)
    ended: dict[str, list[int]] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)
    owed: list[int] = field(default_factory=list)
    away: dict[int, float] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    losses: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        for number in range(1, self.dice.randrange(2, 90)):
            inbox = self.dice.randrange(3)
            self.rows[number] = Row(inbox, b"%d" % self.dice.randrange(20), inbox)
        limit = self.dice.choice([None, None, self.dice.randrange(1, 40)])
        self.schedule = Schedule(limit, found_all=True)
        self.work = {f"executor {n}": [] for n in range(self.dice.randrange(1, 4))}
        self.ended = {name: [] for name in self.work}

    def run(self) -> None:
        for _ in range(STEPS):
            self.now += self.dice.random()
            if unsettled := self.schedule.unsettled({each for each in INBOXES if self.dice.random() < 0.7}):
                self.settle(unsettled)
            self.feed()
            for name in self.work:
                self.step(name)
            if self.dice.random() < 0.05:
                self.lose(self.dice.choice(list(self.work)))
            if self.dice.random() < 0.03:
                self.go_away(self.dice.randrange(3))
            if self.dice.random() < 0.05:
                self.come_back()
            self.confirm()
            later = any(row.is_pending and row.attempts for row in self.rows.values())
            if self.schedule.is_over(self.now, later=later):
                break
        else:
            raise AssertionError("it is never over")
        while self.schedule.owed():
            self.settle(INBOXES)
        self.check()

    def feed(self) -> None:
        name = self.dice.choice(list(self.work))
        most = self.dice.choice([3, 100])
        if question := self.schedule.ask(most, INBOXES, self.now):
            found = self.find(question)
            if self.dice.random() < 0.3:  # something ends while the ledger answers
                self.step(self.dice.choice(list(self.work)))
                self.confirm()
            self.schedule.offer(found)
        ready = self.ready()
        jobs = self.schedule.take(name, self.dice.choice([1, 8]), INBOXES, self.now)
        assert jobs or most == 3 or not ready, "something is held up by what waits in front of it"
        for job in jobs:
            self.check_taken(job)
            self.begun.add(job.id)
            self.work[name].append(job)

    def find(self, question: Question) -> list[Job]:
        fits = [
            number
            for number, row in self.rows.items()
            if row.is_pending and row.due <= self.now and row.inbox in question.inboxes
            if number not in question.known and (question.only is None or number in question.only)
        ]
        fits.sort(key=lambda number: (-self.rows[number].priority, number))
        return [self.job(number) for number in fits[: question.most]]

    def job(self, number: int) -> Job:
        row = self.rows[number]
        return make_job(row.path, id=number, inbox=row.inbox, priority=row.priority, attempts=row.attempts)

    def held(self) -> set[tuple[int, bytes]]:
        numbers = [job.id for jobs in self.work.values() for job in jobs] + self.written + self.owed
        numbers += [number for group in self.ended.values() for number in group]
        return {(self.rows[number].inbox, self.rows[number].path) for number in numbers}

    def ready(self) -> list[int]:
        """What nothing holds back."""
        held, limit, resting = self.held(), self.schedule.limit, self.schedule.resting(self.now)
        return [
            number
            for number, row in self.rows.items()
            if row.is_pending and row.due <= self.now
            if (row.inbox, row.path) not in held and row.inbox not in resting
            if limit is None or number in self.begun or len(self.begun) < limit
        ]

    def check_taken(self, job: Job) -> None:
        row, limit = self.rows[job.id], self.schedule.limit
        assert row.is_pending, "what is done is done again"
        assert (row.inbox, row.path) not in self.held(), "two versions of a file are in hand"
        assert self.now >= self.away.get(row.inbox, 0.0), "an inbox that is away is read"
        assert limit is None or len(self.begun | {job.id}) <= limit, "the limit"

    def step(self, name: str) -> None:
        """An executor ends some, and publishes some."""
        for job in self.dice.sample(self.work[name], self.dice.randrange(len(self.work[name]) + 1)):
            self.work[name].remove(job)
            row = self.rows[job.id]
            if row.attempts < 2 and self.dice.random() < 0.15:
                row.attempts, row.due = row.attempts + 1, self.now + 5 * self.dice.random()
                self.schedule.end([postponed(job, row.due)], ())
                self.schedule.publish([job.id])
                self.schedule.confirm([job.id])
            elif self.dice.random() < 0.1:
                self.schedule.give_back([job.id])
            else:
                row.is_pending = False
                self.schedule.end([done(job)], {job.id})
                self.ended[name].append(job.id)
        if self.dice.random() < 0.6:
            self.schedule.publish(self.ended[name])
            self.written += self.ended[name]
            self.ended[name] = []

    def lose(self, name: str) -> None:
        """What it had ended is owed."""
        owed = self.schedule.lose(name)
        assert sorted(entry.job.id for entry in owed) == sorted(self.ended[name])
        self.owed += self.ended[name]
        self.work[name], self.ended[name] = [], []
        self.losses += 1
        self.check_owed()

    def settle(self, inboxes: set[int]) -> None:
        """The daemon itself publishes what is owed. Meanwhile more may be."""
        owed = [entry for entry in self.schedule.owed() if entry.job.inbox in inboxes]
        if self.dice.random() < 0.3:
            self.lose(self.dice.choice(list(self.work)))
        for entry in owed:
            self.owed.remove(entry.job.id)
            self.rows[entry.job.id].published += 1
        self.schedule.settle(inboxes, owed)
        self.check_owed()

    def check_owed(self) -> None:
        assert sorted(entry.job.id for entry in self.schedule.owed()) == sorted(self.owed)
        assert self.schedule.unsettled(INBOXES) >= {self.rows[number].inbox for number in self.owed}

    def go_away(self, inbox: int) -> None:
        failure = Failure(Reason.UNREADABLE, "no answer", transient=True, away=True)
        if self.now >= self.away.get(inbox, 0.0):
            self.away[inbox] = self.now + REST_SECONDS
        self.schedule.note_read([(inbox, Read(failure=failure))], self.now)

    def come_back(self) -> None:
        for inbox in self.schedule.away():
            self.schedule.note_read([(inbox, Read(b"read"))], self.now)
            del self.away[inbox]

    def confirm(self) -> None:
        """Some are on the disk; or their folder was away, and they are owed."""
        chosen = [number for number in self.written if self.dice.random() < 0.5]
        for number in chosen:
            self.written.remove(number)
        if self.dice.random() < 0.1:
            self.schedule.owe(chosen)
            self.schedule.unsettle()
            self.owed += chosen
            self.check_owed()
            return
        self.schedule.confirm(chosen)
        for number in chosen:
            self.rows[number].published += 1

    def check(self) -> None:
        limit = self.schedule.limit
        expected = len(self.rows) if limit is None else min(limit, len(self.rows))
        lasting = self.schedule.lasting()
        published = [row.published for row in self.rows.values()]
        assert max(published) <= 1, "published twice"
        left_out = sum(row.inbox in lasting for row in self.rows.values())
        assert expected - left_out <= sum(published) <= expected
        assert self.schedule.in_hand == 0
        assert not self.schedule.owed()


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_each_image_is_published_once_whatever_happens_to_executors(seed: int) -> None:
    History(seed).run()
