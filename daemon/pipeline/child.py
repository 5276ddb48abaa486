"""The process of an executor: `python -m daemon.pipeline.child SOCKET_FD PARENT_PID`. remote.py starts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import anyio
import msgspec
import structlog

from daemon.config.loading import Config
from daemon.core.errors import VisiondError, leaves
from daemon.core.slab import Slab
from daemon.layout.layout import Layout
from daemon.layout.placement import Placement, Segment
from daemon.ledger.record import Model
from daemon.monitoring.metrics import Metrics
from daemon.pipeline import wire
from daemon.pipeline.asking import RemoteCoordinator
from daemon.pipeline.executor import Executor
from daemon.pipeline.tracing import opened_tracer
from daemon.results.destinations import Destination
from daemon.results.judge import Judge
from daemon.system.cores import bind
from daemon.system.lines import written_aside
from daemon.system.log import set_up
from daemon.system.printed import catch
from daemon.system.retry import Hurried
from daemon.workers.opening import open_batchers
from stages.contract.processes import die_with

log = structlog.get_logger()

REPORT_SECONDS = 1.0


async def work(connection: socket.socket) -> None:
    """Do the work that the first message, `Setup`, describes, until the daemon sends `Stop` or exits."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    setup = wire.decode_to_executor(await wire.receive(reader))
    assert isinstance(setup, wire.ExecutorSetup)
    config = Config.model_validate(msgspec.json.decode(setup.config))
    set_up(config.log.level, "json")  # the daemon passes it on
    models = {spec.name: Model.of(spec) for spec in setup.specs}
    coordinator = RemoteCoordinator(reader, writer, models)
    try:
        await _serve(setup, config, coordinator)
    except* EOFError:
        os._exit(os.EX_UNAVAILABLE)  # the daemon is gone; the kernel ends the workers
    except* (VisiondError, Hurried) as group:
        error = next(leaves(group))
        with contextlib.suppress(EOFError):
            coordinator.say(wire.ExecutorFarewell(type(error).__name__, str(error)))
    with contextlib.suppress(OSError, RuntimeError):  # the daemon is gone
        await writer.drain()
    writer.close()


async def _serve(setup: wire.ExecutorSetup, config: Config, coordinator: RemoteCoordinator) -> None:
    segments = tuple(Segment(tuple(stages), tuple(devices)) for stages, devices in setup.segments)
    specs = {spec.name: spec for spec in setup.specs}
    layout = Layout(config, setup.gpus, specs, Placement(segments, ""), setup.cores)
    parts = zip(segments, setup.workers, strict=True)
    held = [segment.first_devices[number] for segment, numbers in parts for number in numbers]
    bind(setup.cores.common(held))  # before the slab is touched, and before it starts workers
    metrics = Metrics()
    slab = Slab(setup.slab_bytes)
    inboxes = dict(zip(setup.inboxes, config.inbox, strict=True))
    destinations = {
        number: Destination.of(inbox, config, setup.bins, known)
        for (number, inbox), known in zip(inboxes.items(), setup.known, strict=True)
    }
    roots = {number: destination.inbox for number, destination in destinations.items()}
    coordinator.serve(destinations)
    batchers = open_batchers(layout, slab, metrics, setup.workers)
    judge = Judge.of(config, roots)
    with opened_tracer(config.traces, setup.name) as tracer:
        executor = Executor(slab, batchers, judge, destinations, metrics, tracer=tracer)
        await _work(executor, coordinator, metrics)


async def _work(executor: Executor, coordinator: RemoteCoordinator, metrics: Metrics) -> None:
    """Until the daemon says stop, or is gone."""

    async def staff() -> None:
        async with anyio.create_task_group() as workers:
            await workers.start(executor.staff)
            coordinator.report(executor, metrics)  # the daemon wants to know which workers are ready
            coordinator.say(wire.Staffed())

    async def report() -> None:
        while True:
            coordinator.report(executor, metrics)
            await anyio.sleep(REPORT_SECONDS)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report)
        async with anyio.create_task_group() as working:
            working.start_soon(staff)
            working.start_soon(executor.run, coordinator)
            await coordinator.listen(executor)
            executor.stop()
            working.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


def main() -> None:
    connection, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        # a terminal sends them to the whole group, but only the daemon obeys
        signal.signal(number, signal.SIG_IGN)
    with written_aside():
        set_up(format="json")
        catch()
        ours = socket.socket(fileno=connection)
        ours.setblocking(False)
        anyio.run(work, ours, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
