"""The daemon's life: start up, work, shut down. Each is a list that one can recite."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from daemon.config import Config
from daemon.endings import Judge
from daemon.errors import ConfigError, Hurried, InboxUnreadable, ModelsUnusable, VisiondError
from daemon.gpus import Gpu, list_gpus
from daemon.jobs import JobStatus
from daemon.ledger import Ledger
from daemon.messages import Setup
from daemon.metrics import Metrics
from daemon.pipeline import Lane, Pipeline
from daemon.placement import Placement, Segment, choose_batch, plan
from daemon.pool import Pool, Seat
from daemon.records import Model, Reader
from daemon.sinks import Journal, Sink
from daemon.slab import Slab
from daemon.snapshot import Snapshot
from daemon.state import CONTROL, LEDGER
from daemon.status import Status
from daemon.systemd import Notifier
from daemon.watcher import Watcher, is_there
from daemon.web import serve
from stages import packs
from stages.base import StageSpec
from stages.binning import load_rule
from stages.manifest import Manifest, PackError, list_files
from stages.registry import UnknownName, check_options

log = structlog.get_logger()

CPU_BATCH = 8
GPU_SLAB, CPU_SLAB = 1 << 30, 256 << 20  # bytes: for each GPU; without one
KERNELS = "kernels"  # folder in the state's for compiled GPU kernels, so that only the first start compiles them
# Threads of a CPU worker that wait do not spin, and its tensors' memory is kept for the next ones instead of going back to
# the kernel each time: on a contended machine that is worth a factor.
CPU_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
LEAST_CPU_THREADS = 2  # with a single one torch takes slow convolutions: OCR costs 1.3 times the CPU time, even on one core
SHOW_SECONDS = 0.25  # between two pictures of the progress bar
STATUS_SECONDS = 5.0  # between lines for `systemctl status`
LEAVE_SECONDS = 5.0  # for the end itself, with no work left; a worker that must be killed takes up to four of them
STALL_FACTOR = 2.0  # of the batch time-out, without progress though there is work: then the watchdog is not fed


Show = Callable[[Snapshot], None]


class Service:
    """One run of the daemon, in a state folder that is locked for it."""

    def __init__(self, config: Config, *, once: bool = False, show: Show | None = None) -> None:
        self.config = config
        self.once = once
        self.show = show
        self.loaded = False  # the models are
        self.url = ""  # of the pages, once they are served
        self.metrics = Metrics()
        self.notifier = Notifier()

    async def run(self) -> Counter[JobStatus]:
        """Start up, work until SIGTERM, SIGINT or (with once) the end of the work, shut down. Returns how many images
        ended how. Raises VisiondError."""
        async with self._open() as (pipeline, pools, status):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._obey_signals, pipeline)
                tasks.start_soon(self._load_models, tasks, pools)
                tasks.start_soon(self._report, pipeline, status)
                await pipeline.run(once=self.once)  # files are admitted and read while the models load
                self.notifier.stopping()
                if not self.once:
                    leave_within(LEAVE_SECONDS)
                for pool in pools:
                    pool.stop()
                tasks.cancel_scope.cancel()
            if self.show:
                self.show(status.snapshot())
            if not self.once:
                log.info("stopped", ended=sum(self.metrics.outcomes.values()), pending=status.snapshot().pending)
            if self.once and (obstacles := pipeline.watcher.obstacles()):
                raise InboxUnreadable(f"Not every file was found: {'; '.join(obstacles)}.")
        return self.metrics.outcomes

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[Pipeline, list[Pool], Status]]:
        """Everything the pipeline needs, in the order it depends on each other; closed in the opposite order."""
        config, metrics = self.config, self.metrics
        await to_thread.run_sync(check_inboxes, config)
        with contextlib.ExitStack() as stack:
            gpus = list_gpus()
            specs, notice = await to_thread.run_sync(resolve_models, config, gpus)
            placement = plan_placement(config, gpus, specs)
            log.info("placement", segments=[list(segment.stages) for segment in placement.segments], why=placement.why)
            ledger = Ledger(config.state.path / LEDGER)
            stack.callback(ledger.close)
            ledger.commit_seconds = metrics.commit_seconds.observe
            models = [Model(spec.name, spec.fingerprint, notice if spec.backend != "fake" else "") for spec in specs.values()]
            numbers = await ledger.register([(inbox.path, inbox.priority) for inbox in config.inbox], models)
            reader = Reader(ledger.path)
            stack.callback(reader.close)
            slab = Slab(size_slab(config, gpus))
            stack.callback(slab.close)
            inboxes = dict(zip(numbers, config.inbox, strict=True))
            watcher = Watcher(inboxes, reader, config.pipeline.rescan_seconds, metrics)
            lanes = [open_lane(segment, config, specs, gpus, placement, slab, metrics) for segment in placement.segments]
            sinks = {number: Sink.of(inbox, config) for number, inbox in inboxes.items()}
            journal = Journal(config.output.results.with_suffix(".jsonl")) if "jsonl" in config.output.sinks else None
            pipeline = Pipeline(
                ledger,
                watcher,
                slab,
                lanes,
                judge_of(config),
                sinks,
                metrics,
                journal=journal,
                reuse_results=config.pipeline.reuse_results,
            )
            status = Status(pipeline, ledger, metrics, await to_thread.run_sync(reader.counts))
            async with serve(config, status, metrics, ledger, config.state.path / CONTROL) as self.url:
                yield pipeline, [lane.pool for lane in lanes], status

    async def _load_models(self, tasks: anyio.abc.TaskGroup, pools: list[Pool]) -> None:
        """All pools at once; each tells when its workers have loaded their models."""
        async with anyio.create_task_group() as starting:
            for pool in pools:
                starting.start_soon(tasks.start, pool.run)
        self.loaded = True
        self.notifier.ready()
        log.info("ready", workers=sum(len(pool.seats) for pool in pools), once=self.once, pages=self.url)

    async def _obey_signals(self, pipeline: Pipeline) -> None:
        """The first SIGTERM or SIGINT drains, the second or the end of the time for it stops at once."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for signum in signals:
                log.info("draining", signal=signum.name, in_flight=len(pipeline.in_flight))
                self.notifier.stopping()
                if not self.loaded:  # what is in hand waits for the models
                    raise Hurried
                pipeline.drain()
                with anyio.move_on_after(self.config.pipeline.drain_seconds):
                    async for _ in signals:
                        break
                leave_within(LEAVE_SECONDS)
                raise Hurried

    async def _report(self, pipeline: Pipeline, status: Status) -> None:
        """Feed the watchdog while there is progress, and tell systemd how things stand."""
        longest = SHOW_SECONDS if self.show else STATUS_SECONDS
        interval = min(longest, (self.notifier.watchdog_seconds or longest) / 3)
        while True:
            snapshot = status.snapshot()
            if not self._is_stalled(pipeline, status):
                self.notifier.alive()
            self.notifier.status(snapshot.sentence())
            if self.show:
                self.show(snapshot)
            await anyio.sleep(interval)

    def _is_stalled(self, pipeline: Pipeline, status: Status) -> bool:
        """Whether images are in flight, nothing holds them up, and yet nothing has happened for too long."""
        patience = STALL_FACTOR * self.config.pipeline.batch_timeout_seconds
        idle = not pipeline.in_flight or status.obstacles()
        return not idle and time.monotonic() - pipeline.progressed_at > patience


def leave_within(seconds: float) -> None:
    """A thread that hangs in a system call, as on a dead mount, cannot hold up the end of the process for ever."""

    def leave() -> None:
        log.warning("a thread hangs in a system call, perhaps on a dead mount: left without it; nothing is lost")
        os._exit(os.EX_OK)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


async def run_service(config: Config, *, once: bool = False, show: Show | None = None) -> Counter[JobStatus]:
    """Run the daemon; errors that task groups have wrapped come out as themselves."""
    service = Service(config, once=once, show=show)
    try:
        return await service.run()
    except BaseExceptionGroup as group:
        _, rest = group.split(Hurried)
        if rest is None:
            log.warning("stopped before the drain was over; what was in hand stays pending")
            return service.metrics.outcomes
        error = next(leaves(rest))
        raise error from (None if isinstance(error, VisiondError) else group)


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Single errors of a group, the daemon's own first."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.extend(leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return iter(sorted(flat, key=lambda error: not isinstance(error, VisiondError)))


def check_inboxes(config: Config) -> None:
    """Raises ConfigError when an inbox is not there: creating it might hide a mount that is missing."""
    there = {inbox.path: is_there(inbox.path) for inbox in config.inbox}
    for path in [path for path, answer in there.items() if answer is None]:
        log.warning("inbox does not answer, perhaps on a dead mount; the others are worked on meanwhile", path=str(path))
    if missing := [path for path, answer in there.items() if answer is False]:
        raise ConfigError([f"inbox {path} does not exist; create it (mkdir -p {path}) or mount it." for path in missing])


@contextlib.contextmanager
def pack_errors() -> Iterator[None]:
    """What is wrong with a pack, as ModelsUnusable."""
    try:
        yield
    except (PackError, UnknownName) as error:
        raise ModelsUnusable(str(error)) from error


def resolve_models(config: Config, gpus: list[Gpu]) -> tuple[dict[str, StageSpec], str]:
    """Each stage with its verified weights, and what to say beside results. Raises ModelsUnusable, ConfigError."""
    on_gpu = bool(gpus) and not any(device.startswith("cpu") for device in config.pipeline.devices)
    batch = choose_batch(gpus) if on_gpu else CPU_BATCH
    overrides = {}
    for name in config.stage_names:
        section = getattr(config.stages, name).model_dump()
        section["batch_size"] = section["batch_size"] or batch
        section["dtype"] = section["dtype"] if section["dtype"] != "auto" else _natural_dtype(name, gpus if on_gpu else [])
        overrides[name] = section
    with pack_errors():
        if all(section["backend"] == "fake" for section in overrides.values()):
            pack = packs.Pack(config.models.folder, Manifest(name="none"), config.models.folder, config.models.folder)
        else:
            pack = packs.open_pack(config.models.pack, config.models.folder)
        specs = packs.resolve_all(pack, config.stage_names, overrides)
    if problems := check_options(specs):
        raise ConfigError(problems)
    return {spec.name: spec for spec in specs}, pack.notice


def size_slab(config: Config, gpus: Sequence[Gpu]) -> int:
    """Bytes, as configured or for what there is: a GPU's workers have many images in hand."""
    return config.pipeline.slab_bytes or len(gpus) * GPU_SLAB or CPU_SLAB


def _natural_dtype(stage: str, gpus: list[Gpu]) -> str:
    """bfloat16 where every GPU has it (compute capability 8.0, Ampere), float16 on older ones, float32 on a CPU.

    OCR takes float16 on any GPU: with bfloat16's eight bits its boxes move by up to three pixels, and some texts change.
    """
    if not gpus:
        return "float32"
    if stage == "ocr":
        return "float16"
    return "bfloat16" if all(float(gpu.compute_capability) >= 8.0 for gpu in gpus) else "float16"


def weights_of(specs: Iterable[StageSpec]) -> dict[str, int]:
    """Bytes of weights by stage, as their files say."""
    files = {spec.name: [file for path in spec.files.values() for file in list_files(Path(path))] for spec in specs}
    return {name: sum(file.stat().st_size for file in found) for name, found in files.items()}


def plan_placement(config: Config, gpus: list[Gpu], specs: dict[str, StageSpec]) -> Placement:
    """The placement on these GPUs and this machine's cores. Raises ConfigError when it names a device that there is not."""
    batch = max(spec.batch_size for spec in specs.values())
    placement = plan(config, gpus, weights_of(specs.values()), len(os.sched_getaffinity(0)), batch)
    for device in {device: None for segment in placement.segments for device in segment.devices}:
        address_device(device, gpus, LEAST_CPU_THREADS)
    return placement


def judge_of(config: Config) -> Judge:
    try:
        rule = load_rule(config.binning.rules) if config.binning.rules else None
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return Judge(
        config.binning.thresholds(),
        rule=rule,
        cascade=config.stage_names if config.pipeline.mode == "cascade" else (),
        max_attempts=config.pipeline.max_attempts,
        retry_seconds=config.pipeline.retry_seconds,
    )


def open_lane(
    segment: Segment,
    config: Config,
    specs: dict[str, StageSpec],
    gpus: list[Gpu],
    placement: Placement,
    slab: Slab,
    metrics: Metrics,
) -> Lane:
    """A segment with its queue and its pool of workers, which are not started yet."""
    name = "+".join(segment.stages)
    cores = len(os.sched_getaffinity(0))
    workers = sum(len(other.devices) for other in placement.segments)
    seats = []
    for number, device in enumerate(segment.devices):
        seen_as, environment = address_device(device, gpus, max(LEAST_CPU_THREADS, cores // workers))
        setup = Setup(
            name=f"{name}/{number}",
            device=seen_as,
            stages=[specs[stage] for stage in segment.stages],
            slab_bytes=slab.size,
            threads=config.pipeline.threads_per_worker,
            decoders=config.pipeline.decoders_per_worker or max(1, cores // workers),
            limits=config.pipeline.limits(),
            cascade=config.binning.thresholds() if config.pipeline.mode == "cascade" else None,
            pipeline=config.stage_names,
        )
        environment["TRITON_CACHE_DIR"] = str(config.state.path / KERNELS)
        seats.append(Seat(setup, device, environment))
    pool = Pool(name, seats, slab.fd, config.pipeline, metrics)
    batch = max(specs[stage].batch_size for stage in segment.stages)
    return Lane(name, segment.stages, batch, pool, asyncio.Queue(config.pipeline.queue_images))


def address_device(device: str, gpus: list[Gpu], cpu_threads: int) -> tuple[str, dict[str, str]]:
    """What a worker calls its device, and the environment that makes it the only one it sees.

    Raises ConfigError when there is no such device.
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise ConfigError(
            [f'pipeline.devices: "{device}" is no device; write "cpu", or "cuda:0" as `visiond gpus` lists them.']
        )
    if kind == "cpu":
        return "cpu", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(cpu_threads), **CPU_ENVIRONMENT}
    index = int(number or 0)
    if index >= len(gpus):
        raise ConfigError([f"pipeline.devices: there is no {device}; `visiond gpus` lists {len(gpus)}."])
    return "cuda:0", {"CUDA_VISIBLE_DEVICES": gpus[index].uuid, "OMP_NUM_THREADS": "2"}
