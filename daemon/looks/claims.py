"""Who has a file in hand: a job, or a second look that is being published.

Whoever marks an image as not published keeps its file from the others until that is done, so that two versions of
a file, or two results of one image, are never written at the same time.
"""

from __future__ import annotations

import anyio

File = tuple[int, bytes]  # inbox and path


class Claims:
    def __init__(self) -> None:
        self.jobs: set[File] = set()  # of the jobs in flight
        self._held: set[File] = set()
        self._released: anyio.Event | None = None  # that somebody waits for

    def __contains__(self, file: File) -> bool:
        return file in self.jobs or file in self._held

    def release_job(self, file: File) -> None:
        self.jobs.discard(file)
        self._wake()

    async def hold(self, files: set[File]) -> None:
        """Wait until nobody has these files in hand, and then have them."""
        while any(file in self for file in files):
            await self._wait()
        self._held |= files

    def release(self, files: set[File]) -> None:
        self._held -= files
        self._wake()

    async def wait_for(self, files: set[File]) -> None:
        """Wait until no second look has these files."""
        while files & self._held:
            await self._wait()

    async def _wait(self) -> None:
        """Until something is released."""
        self._released = self._released or anyio.Event()
        await self._released.wait()

    def _wake(self) -> None:
        if self._released:
            self._released.set()
            self._released = None
