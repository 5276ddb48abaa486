"""One trial: a real daemon with these settings, in a throwaway folder, measured at work.

The images arrive when all workers are ready: first some to warm up, then those that are measured. A sidecar
is written when its result is durable, so its modification time shows when that was. The middle half of them
counts: before it the batches fill, after it some workers have nothing left to do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import tomlkit
from prometheus_client.parser import text_string_to_metric_families

from daemon.bench.meter import anonymous_bytes
from daemon.bench.rates import measure_rate
from daemon.config.loading import Config, load
from daemon.config.state import CONTROL, KERNELS
from daemon.control import fetch, find_snapshot
from daemon.core.errors import NotRunning
from daemon.monitoring.snapshot import Snapshot
from daemon.placement.profile import Profile, Settings, Trial, fill_in, write_profile
from daemon.system.gpus import list_gpus
from stages.contract.processes import environment, python

POLL_SECONDS = 0.1
MEASURE_SECONDS = 1.0  # between two readings of memory, which cost time themselves
WARM_UP_ROUNDS = 2  # a round is as many images as the workers hold at once
ROUNDS = 8  # at least, that are measured; on a slow machine FEW_ROUNDS
FEW_ROUNDS = 4
LONG = 4  # times the seconds that were asked for, from which a machine counts as slow
COMPILING = 5  # measurements that are repeated because kernels were compiled during them
SHOWN_RECORDS = 200  # sidecars that are read for the times of the stages
STOP_SECONDS = 60.0
Say = Callable[[str], None]


class Failed(Exception):
    """These settings do not work; the message is the reason."""


class Bench:
    """A throwaway folder in which one daemon after another works on the same images."""

    def __init__(
        self, config: Config, folder: Path, sample: Sequence[Path], devices: Sequence[str], seconds: float
    ) -> None:
        """sample: images in `folder`'s file system; seconds: how long to measure, roughly."""
        self.config = config
        self.folder = folder
        self.sample = sample
        self.devices = devices
        self.seconds = seconds
        self.profile: Profile | None = None  # so far; a pipelined placement follows its costs
        self.idle_bytes: dict[str, int] = {}  # in use on each GPU without a daemon
        self.inbox = folder / "inbox"
        self.home = folder / "daemon"

    def measure(self, settings: Settings, say: Say) -> Trial:
        """Run one daemon with these settings. What it could not do is the trial's failure."""
        own = self._prepare(settings)
        for gpu in list_gpus():  # the driver may still be freeing the memory of the last daemon
            self.idle_bytes[gpu.device] = min(gpu.used_bytes, self.idle_bytes.get(gpu.device, gpu.used_bytes))
        started = time.monotonic()
        with self._daemon() as process:
            watch = Watch(own, process, self.home / "log", say)
            try:
                watch.wait_until_ready()
                start_seconds = time.monotonic() - started
                times = self._measure_steady(watch, settings)
            except Failed as error:
                return Trial(settings=settings, failure=str(error))
        rate, slowest, fastest = measure_rate(times)
        workers = len(self.devices) * settings.workers
        grown = [
            peak - self.idle_bytes.get(device, 0)
            for device, peak in watch.gpu_peaks.items()
            if device in self.devices
        ]
        return Trial(
            settings=settings,
            images_per_second=rate,
            slowest=slowest,
            fastest=fastest,
            images=len(times),
            start_seconds=start_seconds,
            gpu_bytes=max([0, *grown]) // settings.workers,
            tensor_bytes=watch.tensor_bytes,
            host_bytes=watch.host_bytes // workers,
            stage_seconds=self._stage_seconds(own),
        )

    def _measure_steady(self, watch: Watch, settings: Settings) -> list[float]:
        """When each image was finished. Repeated when kernels were compiled in between."""
        held = len(self.devices) * settings.workers * settings.batch * self.config.pipeline.threads_per_worker
        began = time.monotonic()
        self._drop(watch, "warm-up", WARM_UP_ROUNDS * held)
        rough = WARM_UP_ROUNDS * held / (time.monotonic() - began)
        for number in range(COMPILING):
            compiled = self._count_kernels()
            times = self._drop(watch, f"measured-{number}", count_images(held, rough, self.seconds))
            if self._count_kernels() == compiled:
                break
        return times

    def _drop(self, watch: Watch, name: str, count: int) -> list[float]:
        """Let this number of images arrive at once, and wait for them; returns when each was finished."""
        staged = self.folder / name
        staged.mkdir()
        for number, image in zip(range(count), itertools.cycle(self.sample), strict=False):
            (staged / f"{number:07d}-{image.name}").hardlink_to(image)
        staged.rename(self.inbox / name)
        watch.wait_for_images(count)
        # A further link changes a file's ctime, so the daemon would take these for new versions.
        (self.inbox / name).rename(self.folder / f"done-{name}")
        with contextlib.suppress(FileNotFoundError):
            times = sorted(entry.stat().st_mtime for entry in os.scandir(self.home / "results" / name))
            if len(times) * 2 > count:
                return times
        raise Failed("most of the images failed; `visiond run --once --limit 20` on them shows why")

    def _prepare(self, settings: Settings) -> Config:
        """Remove what the last daemon left, except compiled kernels, and write the configuration."""
        for done in [self.inbox, *self.folder.glob("done-*")]:
            shutil.rmtree(done, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)  # removes only the link to the kernels
        (self.home / "state").mkdir(parents=True)
        self.inbox.mkdir()
        kernels = self.config.state.path / KERNELS
        kernels.mkdir(exist_ok=True)
        (self.home / "state" / KERNELS).symlink_to(kernels)
        if self.profile:
            write_profile(self.home / "state", self.profile, finished=True)
        document = fill_in(self.config, settings).model_dump(mode="json")
        document |= {
            "inbox": [{"path": str(self.inbox), "settle_seconds": 0}],
            "output": {name: str(self.home / name) for name in ("results", "failed", "done")},
            "state": {"path": str(self.home / "state")},
            "upkeep": {"verify_days": 0, "vacuum_days": 0},
            "http": {"listen": ""},
            "log": {"level": "warning", "format": "json"},
        }
        document["output"]["bins_folder"] = str(self.home / "bins")
        document["pipeline"] |= {"reuse_results": False, "rescan_seconds": 1.0, "drain_seconds": 1.0}
        file = self.home / "daemon.toml"
        file.write_text(tomlkit.dumps(document))
        return load(file)

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[subprocess.Popen[bytes]]:
        """A daemon in its own session, so that Ctrl-C reaches only this process. It stops when this one dies."""
        run = python("-m", "daemon", "run", "--config", str(self.home / "daemon.toml"))
        command = python("-m", "stages.contract.processes", str(os.getpid()), *run)
        with (self.home / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _count_kernels(self) -> int:
        return sum(1 for _ in (self.config.state.path / KERNELS).rglob("*"))

    def _stage_seconds(self, own: Config) -> dict[str, float]:
        """The average of some sidecars."""
        files = itertools.islice((self.home / "results").glob("measured-*/*.json"), SHOWN_RECORDS)
        timings = [msgspec.json.decode(file.read_bytes())["timings"] for file in files]
        return {
            stage: sum(timing.get(stage, 0.0) for timing in timings) / len(timings)
            for stage in own.stage_names
        }


class Watch:
    """Follows one daemon by its status and metrics, and remembers peaks of memory."""

    def __init__(self, config: Config, process: subprocess.Popen[bytes], log: Path, say: Say) -> None:
        self.gpu_peaks: dict[str, int] = {}  # by device: everything on it
        self.tensor_bytes = 0  # of the largest worker
        self.host_bytes = 0  # of all workers and decoders together
        self._config = config
        self._process = process
        self._log = log
        self._say = say
        self._measured_at = 0.0
        self._expected = 0

    def wait_until_ready(self) -> None:
        """Raises Failed."""
        deadline = time.monotonic() + self._config.pipeline.load_timeout_seconds
        while True:
            snapshot = self._look()
            if snapshot and snapshot.workers and all(w.state == "ready" for w in snapshot.workers):
                return
            if time.monotonic() > deadline:
                raise Failed("not all workers were ready within [pipeline] load_timeout_seconds")
            self._say(snapshot.loading_sentence() if snapshot and snapshot.workers else "starting")
            time.sleep(POLL_SECONDS)

    def wait_for_images(self, count: int) -> None:
        """Wait until this number of further images is finished. Raises Failed."""
        before, self._expected = self._expected, self._expected + count
        patience = self._config.pipeline.batch_timeout_seconds + self._config.pipeline.load_timeout_seconds
        last, changed_at = -1, time.monotonic()
        while True:
            snapshot = self._look()
            ended = snapshot.ended_in_this_run if snapshot else 0
            if snapshot and ended >= self._expected and not snapshot.in_flight:
                break
            if ended != last:
                last, changed_at = ended, time.monotonic()
            if time.monotonic() > changed_at + patience:
                raise Failed(f"no image was finished in {patience:g} s")
            self._say(f"{max(0, ended - before):,} of {count:,} images")
            time.sleep(POLL_SECONDS)
        self._measure_memory()

    def _look(self) -> Snapshot | None:
        """Raises Failed if the daemon has ended or a worker was lost."""
        if self._process.poll() is not None:
            raise Failed(self._last_words())
        snapshot = find_snapshot(self._config)
        if snapshot and (cause := next((worker.cause for worker in snapshot.workers if worker.cause), "")):
            raise Failed(f"a worker was lost: {cause}")
        if snapshot and time.monotonic() > self._measured_at + MEASURE_SECONDS:
            self._measure_memory()
        return snapshot

    def _measure_memory(self) -> None:
        with contextlib.suppress(NotRunning, psutil.NoSuchProcess):
            text = fetch(self._config.state.path / CONTROL, "GET", "/metrics").decode()
            samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
            if any(s.name == "visiond_out_of_memory_total" and s.value for s in samples):
                raise Failed("a batch did not fit into the GPU's memory")
            tensors = [
                s.value
                for s in samples
                if s.name == "visiond_worker_gpu_bytes" and s.labels["kind"] == "peak"
            ]
            self.tensor_bytes = int(max([self.tensor_bytes, *tensors]))
            children = psutil.Process(self._process.pid).children(recursive=True)
            self.host_bytes = max(self.host_bytes, sum(map(anonymous_bytes, children)))
        for gpu in list_gpus():
            self.gpu_peaks[gpu.device] = max(gpu.used_bytes, self.gpu_peaks.get(gpu.device, 0))
        self._measured_at = time.monotonic()

    def _last_words(self) -> str:
        """Why the daemon has ended: the last line of its log that it wrote itself."""
        for line in reversed(self._log.read_text(errors="replace").splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return f"the daemon ended: {json.loads(line)['event']}"
        return f"the daemon ended with status {self._process.returncode}"


def count_images(held: int, rate: float, seconds: float) -> int:
    """How many images to measure. held: in all workers at once; rate: images per second, roughly."""
    enough = min(ROUNDS * held, int(rate * seconds * LONG))
    return max(FEW_ROUNDS * held, enough, int(rate * seconds))
