"""The stages of a configuration without the daemon: names and bytes in, rows out.

    with Annotator("daemon.toml") as annotator:
        rows = annotator.annotate([("a.jpg", data), ("b.jpg", more)])

It is what an actor of Ray holds (visiond/cluster/), and what a notebook or a job of Spark may call. It has no inbox
and no ledger, and writes no results. Everything between is the daemon's own: an executor with its shared memory,
queue, judge and worker processes. So an image that kills its worker is a row with the reason `poison`, and the
process that holds the Annotator lives on.

A thread of its own runs the executor. When the process that holds it ends, in whatever way, the kernel ends the
workers with that thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio import from_thread

from daemon.config.loading import Config, load
from daemon.config.state import KERNELS
from daemon.core.errors import VisiondError, leaves
from daemon.layout.layout import Layout
from daemon.layout.slabs import open_slab
from daemon.ledger.record import Model, Record
from daemon.monitoring.metrics import Metrics
from daemon.pipeline.executor import Executor
from daemon.results.judge import Judge
from daemon.system.children import END_SECONDS, Parent
from daemon.system.log import set_up
from daemon.workers.kernels import compile_for_workers, wants_of
from daemon.workers.opening import open_batchers
from visiond.engine.calls import Calls, Image, Known
from visiond.engine.rows import ResultRows

CLOSE_SECONDS = END_SECONDS + 5.0  # for the workers to end


class NotLoaded(VisiondError):
    """An Annotator was used before `load`, after `close`, or in a process that was forked."""


class Annotator:
    """Runs the stages on images. Threads may share one.

    config: a file like daemon.toml, or a configuration that was read; None: daemon.toml's defaults. Of its sections
    only [pipeline], [models], [stages], [binning] and the kernels in [state] path are used; second looks are not run.
    sharers: how many processes on this machine hold an Annotator, each for GPUs of its own. Each takes an equal share of
    the cores and of the memory, or the memory that is free, if that is less. only: a stage of the configuration, without
    the others; "": all. layout: models and devices of all, once they are loaded.
    """

    def __init__(
        self, config: Config | str | os.PathLike[str] | None = None, *, sharers: int = 1, only: str = ""
    ) -> None:
        """Raises ConfigError."""
        self.config = config if isinstance(config, Config) else load(Path(config) if config else None)
        self.rows = ResultRows(self.config.stage_names)
        self.layout: Layout | None = None
        self._sharers, self._only = sharers, only
        self._thread: Parent | None = None
        self._process = 0
        self._calls: Calls | None = None
        self._portal: from_thread.BlockingPortal | None = None
        self._closing = anyio.Event()
        self._opened = threading.Event()
        self._error: BaseException | None = None

    def load(self) -> None:
        """Start the workers, and wait until they have loaded their models. Nothing if that was done.
        Raises ModelsUnusable, NoWorkersLeft, ConfigError."""
        if self._thread:
            self._check()
            return
        if not structlog.is_configured():
            set_up("warning")
        self._process, self._closing = os.getpid(), anyio.Event()
        self._opened.clear()
        self._thread = Parent(target=self._work, name="visiond-annotator", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._error:
            error = self._error
            self.close()
            raise error

    def annotate(self, images: Iterable[Image], root: str | bytes = "") -> list[dict[str, Any]]:
        """A row for each image, in their order, as by `ResultRows.row_of` of visiond.engine.rows. Blocks until all are done.

        images: names and bytes. In place of its bytes an image may have the OSError that reading it raised: it
        becomes a row with the reason `unreadable`. An iterator is read as there is room for its bytes. root: the
        folder or prefix that the names are relative to. Raises NotLoaded, NoWorkersLeft.
        """
        return [self.rows.row_of(record) for record in self.records(images, root)]

    def records(self, images: Iterable[Image], root: str | bytes = "") -> list[Record]:
        """As `annotate`, with the daemon's record of each image."""
        return [record for _, record in sorted(self._check().answer(images, os.fsencode(root)))]

    def collect(
        self, images: Iterable[Image], known: Known, stopped: Callable[[], object]
    ) -> Iterator[tuple[int, Record]]:
        """As `records`, each with the place of its image, as they end, in any order; before an error those that there are.
        known: what stages have answered before; they do not run again for these bytes. stopped: once it is true, images that
        are not finished are given up, and have no record."""
        return self._check().answer(images, known=known, stopped=stopped)

    def close(self) -> None:
        """End the workers, and wait for that. Images that other threads still wait for are given up."""
        thread, self._thread = self._thread, None
        if thread and self._process == os.getpid():
            with contextlib.suppress(RuntimeError):  # the executor has ended by itself
                if self._portal:
                    self._portal.start_task_soon(self._closing.set)
            thread.join(CLOSE_SECONDS)
        self._calls = self._portal = self._error = None

    def __enter__(self) -> Annotator:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Annotator], tuple[Config]]:
        """A copy in another process has to load its own workers."""
        return partial(Annotator, sharers=self._sharers, only=self._only), (self.config,)

    def _check(self) -> Calls:
        if self._calls is None or not self._thread:
            raise NotLoaded("This Annotator has no workers. Call load(), or use it as a context.")
        if self._process != os.getpid():
            raise NotLoaded("This Annotator belongs to another process. Make a new one after the fork.")
        return self._calls

    def _work(self) -> None:
        """The thread: an executor from its start to its end."""
        try:
            anyio.run(self._run, backend_options={"use_uvloop": True})
        except BaseExceptionGroup as group:
            self._error = next(leaves(group))
        except BaseException as error:  # noqa: BLE001 - the thread that calls raises it
            self._error = error
        if self._calls:
            self._calls.fail(self._error or NotLoaded("The Annotator was closed."))
        self._opened.set()

    async def _run(self) -> None:
        config = self.config
        layout = Layout.of(config, sharers=self._sharers)
        slab = open_slab(config, layout.gpus)
        calls = Calls([*map(Model.of, layout.specs.values())], slab.size)
        self.layout = layout
        if self._only:
            layout = layout.only(self._only)
        metrics = Metrics()
        judge = Judge.of(config, calls.roots)
        batchers = open_batchers(layout, slab, metrics)
        executor = Executor(slab, batchers, judge, {}, metrics, publish=calls.publish, read=calls.read)
        try:
            async with from_thread.BlockingPortal() as self._portal, anyio.create_task_group() as tasks:
                await tasks.start(compile_for_workers, config.state.path / KERNELS, wants_of([layout]))
                await tasks.start(executor.staff)
                tasks.start_soon(executor.run, calls)
                if all(
                    any(worker.state != "closed" for worker in batcher.workers)
                    for batcher in executor.state().batchers
                ):
                    self._calls = calls
                    self._opened.set()  # otherwise `staff` is about to raise why
                await self._closing.wait()
                executor.stop()
                tasks.cancel_scope.cancel()
        finally:
            slab.close()
