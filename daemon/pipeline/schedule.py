"""Who has an image: the only place that knows the jobs in memory.

A job that is not here waits in the ledger, which knows when it is due. Here it has one state:

    WAITING    in memory, and nobody has it: a version of its file is held, or an executor was lost with it
    TAKEN      an executor works on it
    ENDED      its result is durable; its files are being written
    PUBLISHED  its files are written, and may not be on the disk yet

After that it is forgotten. An ENDED job without an executor is owed: the daemon itself publishes it, before anything else
of its inbox. Nothing here does input or output, or waits; whoever asks passes the time, in monotonic seconds.

Work is an image's first look, a file that is to be unpacked, or a second look. First looks and files to unpack hold their
file from the moment they are taken until they are forgotten, so that two versions of a file are never published in the
wrong order. A second look takes long and holds up no new version: it holds the file only while its result is published.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from daemon.core.jobs import Ending, Job, JobStatus, Read

REST_SECONDS = 5.0  # between tries with a few images of an inbox that is away
TRIES = 3  # after these, a run that is to end no longer waits for an inbox
TRY_SECONDS = 120.0  # after which a try is taken for lost, with the executor that made it

FileKey = tuple[int, bytes]  # inbox and path


class State(Enum):
    WAITING = "waiting"
    TAKEN = "taken"
    ENDED = "ended"
    PUBLISHED = "published"


@dataclass(slots=True)
class Entry:
    """executor: who has it; None: nobody, or the daemon itself. ending: as committed. is_newest: whether no newer version
    has replaced it by then."""

    job: Job
    file: FileKey
    is_container: bool = False
    state: State = State.WAITING
    executor: object = None
    ending: Ending | None = None
    is_newest: bool = False

    @property
    def is_owed(self) -> bool:
        return self.state is State.ENDED and self.executor is None


class Question(NamedTuple):
    """What to ask the ledger for. known: images that it must leave out, as they are in memory now; what ends while it
    answers is then not offered again. only: the only images that count; None: all."""

    most: int
    known: frozenset[int]
    inboxes: frozenset[int]
    only: frozenset[int] | None


@dataclass(slots=True)
class Unavailable:
    """An inbox whose files cannot be read. until: it is not tried before."""

    why: str
    until: float
    tries: int
    is_tried: bool = False  # images of it were taken, to see whether it is back


class Noted(NamedTuple):
    """What reading files has shown, for the log. away: why, by inbox."""

    away: dict[int, str]
    back: set[int]


@dataclass
class Schedule:
    """limit: images that this run may begin; None: all. found_all: whether every file that was there at the start has its
    row: with a limit nothing begins before, because the highest priority comes first."""

    limit: int | None = None
    found_all: bool = False
    entries: dict[int, Entry] = field(default_factory=dict)  # by image: first looks and files to unpack
    # Those that wait, by is_container, and sorted.
    _waiting: dict[bool, list[Entry]] = field(default_factory=lambda: {False: [], True: []})
    _looks: dict[str, set[int]] = field(default_factory=dict)  # images of each second look that were taken
    _holders: dict[FileKey, object] = field(default_factory=dict)
    _unavailable: dict[int, Unavailable] = field(default_factory=dict)  # by inbox
    _begun: set[int] = field(default_factory=set)  # images, with a limit
    _unfinished: set[int] = field(default_factory=set)  # of these, without a final state
    _settled: set[int] = field(default_factory=set)  # inboxes of which nothing is owed
    doubts: int = 0  # how often `unsettle` was called

    # From the ledger.

    def ask(self, most: int, inboxes: Collection[int], now: float) -> Question | None:
        """The question whose answer `offer` wants; None if nothing may begin now. inboxes: those that answer."""
        only: frozenset[int] | None = None
        if self.limit is not None:
            room = self.limit - len(self._begun)
            if not self.found_all or not (room or self._unfinished):
                return None
            most = min(most, room or most)
            only = None if room else frozenset(self._unfinished)
        return Question(most, frozenset(self.entries), frozenset(inboxes) - self.resting(now), only)

    def offer(self, jobs: Iterable[Job], *, containers: bool = False) -> None:
        """These wait in the ledger. Those that are here already are passed over."""
        for job in jobs:
            if job.id not in self.entries:
                self.entries[job.id] = entry = Entry(job, (job.inbox, job.path), containers)
                self._wait(entry)

    # To the executors.

    def take(
        self,
        executor: object,
        most: int,
        inboxes: Collection[int],
        now: float,
        *,
        containers: bool = False,
    ) -> list[Job]:
        """At most so many jobs, which are in this executor's hands from now on. inboxes: those that answer."""
        waiting = self._waiting[containers]
        inboxes = frozenset(inboxes) - self.resting(now)
        taken: list[Entry] = []
        free = (each for each in waiting if self._is_free(each, inboxes))
        for entry in itertools.islice(free, most):  # one version of a file holds up the others
            self._begin(entry, executor)
            taken.append(entry)
        if taken:
            waiting[:] = [entry for entry in waiting if entry.state is State.WAITING]
        for inbox in {entry.job.inbox for entry in taken} & self._unavailable.keys():
            known = self._unavailable[inbox]
            known.until, known.is_tried = now + TRY_SECONDS, True
        return [entry.job for entry in taken]

    def end(self, endings: Iterable[Ending], newest: Collection[int]) -> None:
        """They are committed. newest: those that no newer version has replaced."""
        for ending in endings:
            entry = self.entries[ending.job.id]
            entry.state, entry.ending, entry.is_newest = State.ENDED, ending, ending.job.id in newest

    def publish(self, images: Iterable[int]) -> None:
        """Their files are written."""
        for image in images:
            entry = self.entries[image]
            entry.state, entry.executor = State.PUBLISHED, None

    def confirm(self, images: Iterable[int]) -> list[Entry]:
        """All that was written for them is on the disk. An attempt that is to be repeated waits in the ledger."""
        return [self._leave(self.entries[image]) for image in images]

    def owe(self, images: Iterable[int]) -> list[Entry]:
        """What was written for them may be lost, and the daemon publishes it again. Those without files are forgotten."""
        entries = [self.entries[image] for image in images]
        for entry in entries:
            entry.state, entry.executor = State.ENDED, None
            if entry.is_newest:
                self._settled.discard(entry.job.inbox)
            else:
                self._leave(entry)
        return entries

    def give_back(self, images: Iterable[int]) -> None:
        """They wait again, as if nobody had begun them."""
        for image in images:
            self._return(self.entries[image])

    def blame(self, image: int, deaths: int) -> None:
        """So many workers have died while they ran only this image."""
        entry = self.entries[image]
        entry.job = replace(entry.job, deaths=deaths)

    def forget(self, image: int) -> None:
        """It was taken, and waits in the ledger, as if nobody had begun it."""
        self._let_go(self.entries.pop(image))
        self._begun.discard(image)
        self._unfinished.discard(image)

    def forget_waiting(self) -> None:
        """What nobody has waits in the ledger."""
        for waiting in self._waiting.values():
            for entry in waiting:
                del self.entries[entry.job.id]
            waiting.clear()

    def lose(self, executor: object) -> list[Entry]:
        """An executor is gone. What it had taken waits again. What it had ended is returned: those that are to be published
        are owed, and the others forgotten."""
        mine = [entry for entry in self.entries.values() if entry.executor is executor]
        for entry in mine:
            if entry.state is State.TAKEN:
                self._return(entry)
        return self.owe(entry.job.id for entry in mine if entry.state is State.ENDED)

    def has(self, executor: object) -> int:
        """How many jobs an executor has."""
        return sum(entry.executor is executor for entry in self.entries.values())

    # Second looks, which have the order of the ledger, and executors of their own.

    def ask_look(self, look: str, most: int, inboxes: Collection[int], now: float) -> Question:
        """As `ask`. With a limit, only its images get second looks."""
        only = None if self.limit is None else frozenset(self._begun - self._unfinished)
        return Question(most, frozenset(self.looked_at(look)), frozenset(inboxes) - self.resting(now), only)

    def take_look(self, look: str, jobs: Iterable[Job]) -> None:
        self._looks.setdefault(look, set()).update(job.id for job in jobs)

    def leave_look(self, look: str, images: Iterable[int]) -> None:
        """Their look is over, or waits in the ledger."""
        self.looked_at(look).difference_update(images)

    def looked_at(self, look: str) -> set[int]:
        """The images whose look was taken."""
        return self._looks.get(look, set())

    def forget_look(self, look: str) -> None:
        """All of it waits in the ledger."""
        self._looks.pop(look, None)

    # Conditions of `take`.

    def _is_free(self, entry: Entry, inboxes: Collection[int]) -> bool:
        """Whether nothing holds it back. inboxes: those that answer, and do not rest."""
        can_be_read = entry.job.inbox in inboxes and entry.file not in self._holders
        return can_be_read and self._is_within_limit(entry)

    def _is_within_limit(self, entry: Entry) -> bool:
        if self.limit is None or entry.job.id in self._begun:
            return True
        return self.found_all and len(self._begun) < self.limit

    # Files that are held by something else than a job: a second look, or what is published again.

    def hold(self, files: Collection[FileKey], holder: object) -> bool:
        """Whether nobody had one of these files, so that `holder` has all of them."""
        if any(file in self._holders for file in files):
            return False
        self._holders |= dict.fromkeys(files, holder)
        return True

    def hold_each(self, files: Iterable[FileKey], holder: object) -> set[FileKey]:
        """Those of these files that are free, and held from now on, or whose job is owed, and holds them itself."""
        held = set()
        for file in files:
            owner = self._holders.setdefault(file, holder)
            if owner is holder or (isinstance(owner, Entry) and owner.is_owed):
                held.add(file)
        return held

    def release(self, files: Iterable[FileKey], holder: object) -> None:
        for file in files:
            if self._holders.get(file) is holder:
                del self._holders[file]

    # What is owed: at the start, of each inbox whatever the ledger says.

    def owed(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.is_owed]

    def settle(self, inboxes: Collection[int], entries: Iterable[Entry]) -> None:
        """What was owed of these inboxes is published, in memory these entries. More may be owed of them by now."""
        for entry in entries:
            if self.entries.get(entry.job.id) is entry:  # else somebody else has published it too
                self._leave(entry)
        self._settled |= set(inboxes) - {entry.job.inbox for entry in self.owed()}

    def unsettle(self) -> None:
        """Something may be owed of any inbox, and only the ledger knows."""
        self._settled, self.doubts = set(), self.doubts + 1

    def unsettled(self, inboxes: Collection[int]) -> set[int]:
        """Those of which something may be owed."""
        return set(inboxes) - self._settled

    # Inboxes that are away, as shown by reading their files. While one is away, few of its images are tried.

    def note_read(self, reads: Sequence[tuple[int, Read]], now: float) -> Noted:
        """Note which inboxes could be read. reads: what came of each image's, and its inbox."""
        failed = {inbox: each.failure.detail for inbox, each in reads if each.failure and each.failure.away}
        read = {inbox for inbox, each in reads if each.digest}
        # If others of the group could not be read, as while a store throttles, it is not back yet.
        back = (read - failed.keys()) & self._unavailable.keys()
        for inbox in back:
            del self._unavailable[inbox]
        away = {inbox: why for inbox, why in failed.items() if inbox not in self._unavailable}
        for inbox, why in failed.items():
            self._note_unavailable(inbox, why, now, was_read=inbox in read)
        for known in [
            self._unavailable[inbox] for inbox in {inbox for inbox, _ in reads} & self._unavailable.keys()
        ]:
            if known.is_tried:  # its images are gone, or to blame themselves: others are tried
                known.until, known.is_tried = now, False
        return Noted(away, back)

    def _note_unavailable(self, inbox: int, why: str, now: float, *, was_read: bool) -> None:
        known = self._unavailable.get(inbox)
        if known is None or known.is_tried or now >= known.until:  # else it belongs to the last try
            tries = known.tries + 1 if known and not was_read else 1
            self._unavailable[inbox] = Unavailable(why, now + REST_SECONDS, tries)

    def resting(self, now: float) -> frozenset[int]:
        """The inboxes that are not tried now."""
        return frozenset(inbox for inbox, known in self._unavailable.items() if now < known.until)

    def lasting(self) -> frozenset[int]:
        """The inboxes that have been tried often enough for a run to end without them."""
        return frozenset(inbox for inbox, known in self._unavailable.items() if known.tries >= TRIES)

    def away(self) -> dict[int, str]:
        """Why, by inbox."""
        return {inbox: known.why for inbox, known in self._unavailable.items()}

    # How much is left.

    @property
    def in_hand(self) -> int:
        """As `taken`, without those that are owed."""
        return self.taken - len(self.owed())

    @property
    def taken(self) -> int:
        """First looks and files to unpack that were taken and are not forgotten, with those that are owed."""
        return len(self.entries) - sum(map(len, self._waiting.values()))

    @property
    def unwritten(self) -> int:
        """Images that have ended in the ledger, and whose files are not surely there yet."""
        return sum(e.ending is not None and e.ending.status is not JobStatus.PENDING for e in self._taken())

    @property
    def left(self) -> int | None:
        """Images that must still finish to reach the limit; None: there is none."""
        return None if self.limit is None else self.limit - len(self._begun) + len(self._unfinished)

    def is_over(self, now: float, *, later: bool) -> bool:
        """Whether nothing that this run may do is in hand or waits. later: whether images that are waited for are due
        for another attempt, now or later, by what the ledger says."""
        lasting = self.lasting()
        if not self.found_all or any(not e.is_owed or e.job.inbox not in lasting for e in self._taken()):
            return False
        if self.limit is not None and not (self.limit - len(self._begun) or self._unfinished):
            return True
        waits = any(
            entry.job.inbox not in lasting and self._is_within_limit(entry)
            for entry in itertools.chain(*self._waiting.values())
        )
        return not (waits or later or self.resting(now) - lasting)

    def _taken(self) -> Iterator[Entry]:
        return (entry for entry in self.entries.values() if entry.state is not State.WAITING)

    # Changes of an entry.

    def _begin(self, entry: Entry, executor: object) -> None:
        entry.state, entry.executor = State.TAKEN, executor
        self._holders[entry.file] = entry
        if self.limit is not None and entry.job.id not in self._begun:
            self._begun.add(entry.job.id)
            self._unfinished.add(entry.job.id)

    def _return(self, entry: Entry) -> None:
        self._let_go(entry)
        entry.state, entry.executor = State.WAITING, None
        self._wait(entry)

    def _wait(self, entry: Entry) -> None:
        """The highest priority first, and the oldest first within it."""
        waiting = self._waiting[entry.is_container]
        insort(waiting, entry, key=lambda each: (-each.job.priority, each.job.id))

    def _leave(self, entry: Entry) -> Entry:
        del self.entries[entry.job.id]
        self._let_go(entry)
        if entry.ending and entry.ending.status is not JobStatus.PENDING:
            self._unfinished.discard(entry.job.id)
        return entry

    def _let_go(self, entry: Entry) -> None:
        if self._holders.get(entry.file) is entry:
            del self._holders[entry.file]
