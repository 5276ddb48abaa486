"""Room on the disks that the daemon writes to."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from daemon.config.loading import Config
from daemon.system.mounts import describe_in_the_way, find_existing

FRESH_SECONDS = 1.0  # between two looks
WAIT_SECONDS = 0.5  # for an answer; a later one counts for the next look


@dataclass(frozen=True, slots=True)
class DiskSpace:
    free_bytes: int  # for programs that do not run as root
    size_bytes: int
    device: int = 0  # number of the file system, until the next boot

    @classmethod
    def of(cls, folder: Path) -> DiskSpace:
        """The room in the file system of a folder that may not exist yet. Raises OSError."""
        existing = find_existing(folder)
        found = os.statvfs(existing)
        size = found.f_blocks * found.f_frsize
        return cls(found.f_bavail * found.f_frsize, size, existing.stat().st_dev)


def list_written_folders(config: Config) -> dict[str, Path]:
    """The folders that the daemon writes to, by their keys in the configuration."""
    output = config.output
    folders = {
        "output.results": output.results,
        "output.failed": output.failed,
        "state.path": config.state.path,
    }
    if output.bins != "none":
        folders["output.bins_folder"] = output.bins_folder
    if any(inbox.on_success == "move" for inbox in config.inbox):
        folders["output.done"] = output.done
    return folders


def find_blocked(config: Config) -> dict[str, str]:
    """Why a folder that the daemon writes to is none, and cannot become one, by its key. Looks at the disk, and may wait for
    a dead mount."""
    folders = list_written_folders(config)
    if config.upkeep.backup_folder:
        folders["upkeep.backup_folder"] = Path(config.upkeep.backup_folder)
    found = {key: describe_in_the_way(folder) for key, folder in folders.items()}
    return {key: f"{key}: {why}." for key, why in found.items() if why}


class Disks:
    """The room in each folder, as of the last time that it answered. Each is asked in its own thread, and not
    again before it has answered: a dead mount delays nothing and uses one thread."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """folders: by the names that `rooms` gives them."""
        self.rooms: dict[str, DiskSpace] = {}
        self._folders = folders
        self._asked: set[str] = set()  # that have not answered yet
        self._threads = anyio.CapacityLimiter(max(1, len(folders)))
        self._looked_at = -FRESH_SECONDS

    async def look(self) -> None:
        """Update the rooms, at most once a second."""
        if (now := time.monotonic()) - self._looked_at < FRESH_SECONDS:
            return
        self._looked_at = now
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + WAIT_SECONDS
            for name in self._folders.keys() - self._asked:
                ask = partial(self._ask, name)
                tasks.start_soon(
                    partial(to_thread.run_sync, ask, abandon_on_cancel=True, limiter=self._threads)
                )

    def _ask(self, name: str) -> None:
        """Runs in a thread."""
        self._asked.add(name)
        try:
            self.rooms[name] = DiskSpace.of(self._folders[name])
        except OSError:
            self.rooms.pop(name, None)  # no figure is better than an old one
        finally:
            self._asked.discard(name)
