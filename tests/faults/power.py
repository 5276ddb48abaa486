"""Power failures, replayed: a real run is held at each of its flushes, and what the disk would hold then is started from.

Certain to be on the disk is what was flushed before. Of the rest any part may be there: so each moment gives two disks, one
with none of it and one with pages, files and halves of files by chance.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import anyio

from daemon.config import parse
from daemon.ledger import Ledger
from daemon.sinks import Sink, publish_records
from tests import checker
from tests.daemon_process import Place
from tests.faults.syscalls import Call, Supervisor

PAGE = 4096


class Disk:
    """What is certain to be there of a place's ledger and sidecars."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self._place = place
        self._chance = chance
        self._held: dict[Path, bytes] = {}
        self._identity = place.site.ledger.with_name("identity")
        self._renamed = b""  # what of it was flushed before it got its name
        self.failures = 0
        self.problems: list[str] = []

    def see(self, call: Call) -> int:
        """Before each flush the power fails; the flush itself lets it go on."""
        path = Path(os.fsdecode(call.path))
        if call.name in ("fsync", "syncfs"):
            for torn in (False, True):
                self._fail(self._place.folder / "after", torn)
        if call.name == "syncfs":
            self._held = {file: file.read_bytes() for file in self._files()}  # the identity was flushed before
        elif call.name == "rename" and path == self._identity:
            self._renamed = self._held.get(path.with_name(".identity.partial"), b"")
        elif call.name == "fsync" and path.is_dir():  # now what was removed from it is gone
            self._held = {file: data for file, data in self._held.items() if file.parent != path or file.exists()}
            if self._identity.exists() and path == self._identity.parent:
                self._held[self._identity] = self._renamed
        elif call.name == "fsync":
            self._held[path] = path.read_bytes()
        return 0

    def _files(self) -> Iterator[Path]:
        yield from (file for file in self._place.site.ledger.parent.glob("ledger.sqlite*") if not file.name.endswith("-shm"))
        yield from self._place.site.results.rglob("*.json")
        yield from [self._identity] if self._identity.exists() else []

    def _fail(self, after: Path, torn: bool) -> None:
        """Make the disk as it is after the failure, start from it, and have the checker judge."""
        present = {file: self._tear(file) for file in self._files()} if torn else {}
        shutil.rmtree(after, ignore_errors=True)
        for file, data in (self._held | {file: data for file, data in present.items() if data is not None}).items():
            target = after / file.relative_to(self._place.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        if any((after / "state" / name).exists() for name in ("ledger.sqlite", "identity")):
            self.failures += 1
            anyio.run(self._recover, after)
            self.problems += self._judge(after).problems

    def _tear(self, file: Path) -> bytes | None:
        """By chance any of the pages that were written since the last flush; of a sidecar all, none, or a half."""
        old, new = self._held.get(file), file.read_bytes()
        if file == self._identity:
            return self._chance.choice((old, self._renamed))
        if file.suffix == ".json":
            return old or self._chance.choice((None, b"", new[: len(new) // 2], new))
        old = (old or b"").ljust(len(new), b"\0")
        return b"".join(self._chance.choice((old, new))[start : start + PAGE] for start in range(0, len(new), PAGE))

    async def _recover(self, after: Path) -> None:
        """As the daemon does when it starts."""
        config = parse(self._place.settings, after)
        ledger = Ledger(after / "state" / "ledger.sqlite")
        try:
            await ledger.register([(self._place.inbox(), 0)], [])
            owed = await ledger.owed(0, 1_000_000)
            await ledger.mark_emitted(publish_records(owed, {1: Sink.of(config.inbox[0], config)}).placed)
        finally:
            ledger.close()

    def _judge(self, after: Path) -> checker.Verdict:
        site = checker.Site(
            after / "state" / "ledger.sqlite", *(after / name for name in ("results", "failed", "done", "bins"))
        )
        return checker.judge(site, [checker.Inbox(self._place.inbox(), self._place.dropped[""])], finished=False)


def fail_power(folder: Path, chance: random.Random, files: int) -> Disk:
    """Work off so many files, with a power failure at each flush."""
    place = Place(folder)
    place.drop_many(range(files))
    disk = Disk(place, chance)
    with Supervisor(folder, disk.see) as supervisor:
        assert place.run_once(prefix=supervisor.prefix).returncode == 0
    place.assert_kept(DONE=files)
    return disk
