"""Simulates power failures. At each flush of a real run, the disk is recorded as a power failure
would leave it. Later something starts from each of these disks, in some cases a real daemon.

What was flushed before is certainly on the disk. Any part of the rest may be there too: so each moment gives
two disks, one with none of the rest and one with random files, names, pages and halves of it. A rename is
complete or missing; one that was not flushed may be missing although a later one is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import anyio

from daemon.config.loading import parse
from daemon.core.files import sync_folders
from daemon.ledger.ledger import Ledger
from daemon.ledger.schema import connect
from daemon.results.destinations import Destination, publish_records
from tests.daemon_process import Place
from tests.faults.kill import INBOXES
from tests.faults.syscalls import Call, Supervisor

PAGE = 4096
MODES = ("none", "copy", "move")  # of the bins


class Identity(NamedTuple):
    """A file, independent of its name. The inode of a removed file may be used again,
    so the time is part of the identity."""

    inode: int
    mtime_ns: int
    path: str = ""  # of the ledger's files, which keep their names and change their bytes


class File(NamedTuple):
    identity: Identity
    data: bytes


Tree = dict[Path, File]


@dataclass
class State:
    """Names and bytes, separately: a file's bytes may be on the disk without its name,
    or the other way round."""

    names: dict[Path, Identity] = field(default_factory=dict)
    data: dict[Identity, bytes] = field(default_factory=dict)

    def names_of(self, identity: Identity) -> set[Path]:
        return {path for path, other in self.names.items() if other == identity}

    def rename(self, identity: Identity, now: State) -> None:
        """Give the file its current names; other files lose them."""
        for path in self.names_of(identity):
            del self.names[path]
        self.names |= dict.fromkeys(now.names_of(identity), identity)


class Disk:
    """Which of a place's files are certainly on the disk, and which may be."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self.disks: list[Tree] = []
        self._place = place
        self._chance = chance
        self._bytes: dict[bytes, bytes] = {}  # each once, although many disks have them
        self._held = self._read()  # what was dropped before the run is there

    def see(self, call: Call) -> int:
        """Record a power failure before each flush."""
        if call.name not in ("fsync", "syncfs"):
            return 0
        now = self._read()
        self.disks += [self._calm(), self._torn(now)]
        path = Path(os.fsdecode(call.path))
        if call.name == "syncfs":
            self._held = now
        elif path.is_dir():
            for identity in _changed(self._held, now):
                if any(
                    name.parent == path for name in self._held.names_of(identity) | now.names_of(identity)
                ):
                    self._held.rename(identity, now)
        elif path in now.names:
            identity = now.names[path]
            self._held.data[identity] = now.data[identity]
            if not self._held.names_of(identity):  # a new file's name is flushed with it, a renaming is not
                self._held.names[path] = identity
        return 0

    def _read(self) -> State:
        state = State()
        for path in _files(self._place):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                fixed = path.name.startswith("ledger.sqlite")
                identity = Identity(0, 0, path.name) if fixed else Identity(status.st_ino, status.st_mtime_ns)
                data = path.read_bytes()
                state.names[path], state.data[identity] = identity, self._bytes.setdefault(data, data)
        return state

    def _calm(self) -> Tree:
        """The disk with only what is certain."""
        return {
            path: File(identity, self._held.data.get(identity, b""))
            for path, identity in self._held.names.items()
        }

    def _torn(self, now: State) -> Tree:
        """The disk with a random part of the rest."""
        names = State(dict(self._held.names))
        for identity in _changed(self._held, now):
            if self._chance.random() < 0.5:
                names.rename(identity, now)
        return {path: File(identity, self._tear(identity, now)) for path, identity in names.names.items()}

    def _tear(self, identity: Identity, now: State) -> bytes:
        """For the ledger, any of the pages that were written since the last flush; for another file all,
        none, or half of the bytes."""
        old, new = self._held.data.get(identity), now.data.get(identity, b"")
        if not identity.path:
            return old if old is not None else self._chance.choice((b"", new[: len(new) // 2], new))
        old = (old or b"").ljust(len(new), b"\0")
        return b"".join(
            self._chance.choice((old, new))[start : start + PAGE] for start in range(0, len(new), PAGE)
        )


def _changed(held: State, now: State) -> list[Identity]:
    """Files whose names have changed. A file whose name
    another file has now disappears when that one appears."""
    before, after = _by_file(held), _by_file(now)
    return [
        file
        for file in dict.fromkeys((*before, *after))
        if before.get(file) != after.get(file) and (file in after or not before[file] & now.names.keys())
    ]


def _by_file(state: State) -> dict[Identity, set[Path]]:
    names: dict[Identity, set[Path]] = {}
    for path, identity in state.names.items():
        names.setdefault(identity, set()).add(path)
    return names


def _folders(place: Place) -> list[Path]:
    site = place.site
    return [
        site.ledger.parent,
        site.results,
        site.failed,
        site.done,
        site.bins,
        *map(place.inbox, place.dropped),
    ]


def _files(place: Place) -> Iterator[Path]:
    for folder in _folders(place):
        for where, _, names in os.walk(folder):
            paths = (Path(where) / name for name in names if not name.endswith("-shm") and name != "lock")
            yield from (path for path in paths if path.is_file())


class Failures:
    """The disks of one run, each rebuilt at the place of that run."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self.failures = 0
        self.started = 0
        self.problems: list[str] = []
        self._place = place
        self._chance = chance

    def start_from(self, disks: Iterable[Tree], starts: int) -> None:
        """Start from each: a daemon from this many of them, and what a daemon does first from the others."""
        kept = [disk for disk in disks if self._place.site.ledger in disk]
        real = set(self._chance.sample(range(len(kept)), min(starts, len(kept))))
        for number, disk in enumerate(kept):
            self.failures += 1
            replaced = self._lay_out(disk)
            self._adopt(replaced)
            if number in real:
                self.started += 1
                run = self._place.run_once()
                found = self._place.judge().problems
                found += (
                    [f"the next daemon ended with {run.returncode}: {run.stderr[-500:]}"]
                    if run.returncode
                    else []
                )
            else:
                anyio.run(self._recover)
                found = self._place.judge(finished=False).problems
            self.problems += [f"disk {number}: {problem}" for problem in found]

    def _lay_out(self, disk: Tree) -> dict[Identity, os.stat_result]:
        """Put a disk's files where they were; returns the identity of each file before and now."""
        for folder in _folders(self._place):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        replaced = {}
        for path, file in disk.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            if not file.identity.path:
                os.utime(path, ns=(file.identity.mtime_ns,) * 2)
                replaced[file.identity] = path.stat()
        return replaced

    def _adopt(self, replaced: Mapping[Identity, os.stat_result]) -> None:
        """Write the new inodes and times of the files into the
        ledger: on a real disk they would not have changed."""
        with contextlib.closing(connect(self._place.site.ledger)) as connection:
            known = connection.execute("SELECT id, inode, mtime_ns FROM image").fetchall()
            for number, inode, mtime_ns in known:
                if status := replaced.get(Identity(inode, mtime_ns)):
                    figures = (status.st_ino, status.st_ctime_ns, number)
                    connection.execute("UPDATE image SET inode = ?, ctime_ns = ? WHERE id = ?", figures)

    async def _recover(self) -> None:
        """What a daemon does before anything else."""
        config = parse(self._place.settings, self._place.folder)
        ledger = Ledger(self._place.site.ledger)
        try:
            numbers = await ledger.register([(inbox.path, inbox.priority) for inbox in config.inbox], [])
            destinations = {
                number: Destination.of(inbox, config)
                for number, inbox in zip(numbers, config.inbox, strict=True)
            }
            publication = publish_records(await ledger.owed(0, 1_000_000), destinations)
            sync_folders(publication.folders)
            await ledger.mark_emitted(publication.placed)
        finally:
            ledger.close()


def fail_power(
    folder: Path, chance: random.Random, files: int, starts: int, modes: Iterable[str] = MODES
) -> Failures:
    """Process this many files of inboxes that keep, move and delete, with a power failure at each flush,
    for each kind of bins."""
    total = Failures(Place(folder), chance)
    for mode in modes:
        (folder / mode).mkdir()
        # A bin that takes the source decides where it goes.
        fates = {name: name if mode != "move" else "keep" for name in INBOXES}
        inboxes = [{"name": name, "on_success": fate, "settle_seconds": 0.1} for name, fate in fates.items()]
        place = Place(folder / mode, {"inbox": inboxes, "output": {"bins": mode}})
        for number in range(files):
            place.drop_many(range(number, number + 1), INBOXES[number % len(INBOXES)])
        disk = Disk(place, chance)
        with Supervisor(place.folder, disk.see) as supervisor:
            run = place.run_once(supervisor=supervisor.path)
        assert run.returncode == 0, run.stderr
        assert place.judge().problems == []
        failures = Failures(place, chance)
        failures.start_from(disk.disks, starts)
        total.failures += failures.failures
        total.started += failures.started
        total.problems += [f"bins {mode}, {problem}" for problem in failures.problems]
    return total
