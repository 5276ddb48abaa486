"""One trial: a real daemon with these settings, in a throwaway folder, measured at work.

The images arrive when all workers are ready: first some to warm up, then those that are measured. A sidecar
is written when its result is durable, so its modification time shows when that was. The middle 70 % of them
counts: before it the batches fill, after it some workers have nothing left to do.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import tomlkit

from daemon.config.loading import Config, load
from daemon.config.state import KERNELS
from daemon.layout.profile import Profile, Trial, TunedSettings, fill_in, write_profile
from daemon.ledger.record import Record
from daemon.measure.job import read_results
from daemon.measure.meter import Meter, read_gpu_bytes
from daemon.measure.steady import find_steady
from daemon.measure.throwaway import Failed, Say, Throwaway

WARM_UP_ROUNDS = 2  # a round is as many images as the workers hold at once
ROUNDS = 8  # at least, that are measured; on a slow machine FEW_ROUNDS
FEW_ROUNDS = 4
LONG = 4  # times the seconds that were asked for, from which a machine counts as slow
COMPILING = 5  # measurements that are repeated because kernels were compiled during them


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
        self.daemon_folder = folder / "daemon"

    def measure(self, settings: TunedSettings, say: Say) -> Trial:
        """Run one daemon with these settings. What it could not do is the trial's failure."""
        own = self._prepare(settings)
        for device, used in read_gpu_bytes().items():  # the driver may still free the last daemon's memory
            self.idle_bytes[device] = min(used, self.idle_bytes.get(device, used))
        started = time.monotonic()
        with (
            Throwaway(
                own, self.daemon_folder / "daemon.toml", log=self.daemon_folder / "log", say=say
            ) as daemon,
            Meter(daemon.process.pid, own) as meter,
        ):
            try:
                daemon.wait_until_ready()
                start_seconds = time.monotonic() - started
                records, written = self._measure_steady(daemon, settings)
            except Failed as error:
                return Trial(settings=settings, failure=str(error))
        times = [at - meter.started for at in sorted(written)]
        steady = find_steady(times, meter)
        return Trial(
            settings=settings,
            images_per_second=steady.images_per_second,
            slowest=steady.slowest,
            fastest=steady.fastest,
            images=len(times),
            start_seconds=start_seconds,
            gpu_bytes=self._grown_bytes(meter) // settings.workers,
            tensor_bytes=daemon.tensor_bytes,
            host_bytes=max((sample.workers_bytes for sample in meter.samples), default=0)
            // (len(self.devices) * settings.workers),
            stage_seconds={
                stage: statistics.fmean(record.outputs[stage].seconds for record in records)
                for stage in own.stage_names
            },
            gpu_busy=steady.gpu_busy,
            cores_busy=steady.cores_busy,
            limited_by=steady.limited_by,
        )

    def _grown_bytes(self, meter: Meter) -> int:
        """The most that a GPU had in use more than when it was idle."""
        return max(
            (
                used - self.idle_bytes.get(device, 0)
                for sample in meter.samples
                for device, used in zip(meter.devices, sample.gpu_used_bytes, strict=False)
                if device in self.devices
            ),
            default=0,
        )

    def _measure_steady(self, daemon: Throwaway, settings: TunedSettings) -> tuple[list[Record], list[float]]:
        """The images, and when each was finished. Repeated when kernels were compiled in between."""
        held = len(self.devices) * settings.workers * settings.batch * self.config.pipeline.threads_per_worker
        began = time.monotonic()
        self._drop(daemon, "warm-up", WARM_UP_ROUNDS * held)
        rough = WARM_UP_ROUNDS * held / (time.monotonic() - began)
        for number in range(COMPILING):
            compiled = self._count_kernels()
            found = self._drop(daemon, f"measured-{number}", count_images(held, rough, self.seconds))
            if self._count_kernels() == compiled:
                break
        return found

    def _drop(self, daemon: Throwaway, name: str, count: int) -> tuple[list[Record], list[float]]:
        """Let this number of images arrive at once, and wait for them; returns when each was finished."""
        staged, own = self.folder / name, self.folder / f"sample-{name}"
        staged.mkdir()
        own.mkdir()
        # Other links of a file whose names have left the inbox would be the same images under new names.
        copies = [
            Path(shutil.copyfile(image, own / f"{n}-{image.name}")) for n, image in enumerate(self.sample)
        ]
        for number, image in zip(range(count), itertools.cycle(copies), strict=False):
            (staged / f"{number:07d}-{image.name}").hardlink_to(image)
        staged.rename(self.inbox / name)
        daemon.wait_for_images(count)
        # A further link changes a file's ctime, so the daemon would take these for new versions.
        (self.inbox / name).rename(self.folder / f"done-{name}")
        records, written = read_results(daemon.config, f"{name}/".encode())
        if len(written) * 2 > count:
            return records, written
        raise Failed("most of the images failed; `visiond run --once --limit 20` on them shows why")

    def _prepare(self, settings: TunedSettings) -> Config:
        """Remove what the last daemon left, except compiled kernels, and write the configuration."""
        for done in [self.inbox, *self.folder.glob("done-*"), *self.folder.glob("sample-*")]:
            shutil.rmtree(done, ignore_errors=True)
        shutil.rmtree(self.daemon_folder, ignore_errors=True)  # removes only the link to the kernels
        (self.daemon_folder / "state").mkdir(parents=True)
        self.inbox.mkdir()
        kernels = self.config.state.path / KERNELS
        kernels.mkdir(exist_ok=True)
        (self.daemon_folder / "state" / KERNELS).symlink_to(kernels)
        if self.profile:
            write_profile(self.daemon_folder / "state", self.profile, finished=True)
        document = fill_in(self.config, settings).model_dump(mode="json")
        document |= {
            "inbox": [{"path": str(self.inbox), "settle_seconds": 0}],
            "output": {name: str(self.daemon_folder / name) for name in ("results", "failed", "done")},
            "state": {"path": str(self.daemon_folder / "state")},
            "upkeep": {"verify_days": 0, "forget_days": 0, "vacuum_days": 0},
            "http": {"listen": ""},
            "log": {"level": "warning", "format": "json"},
        }
        document["output"]["bins_folder"] = str(self.daemon_folder / "bins")
        document["pipeline"] |= {"reuse_results": False, "rescan_seconds": 1.0, "drain_seconds": 1.0}
        file = self.daemon_folder / "daemon.toml"
        file.write_text(tomlkit.dumps(document))
        return load(file)

    def _count_kernels(self) -> int:
        return sum(1 for _ in (self.config.state.path / KERNELS).rglob("*"))


def count_images(held: int, rate: float, seconds: float) -> int:
    """How many images to measure. held: in all workers at once; rate: images per second, roughly."""
    enough = min(ROUNDS * held, int(rate * seconds * LONG))
    return max(FEW_ROUNDS * held, enough, int(rate * seconds))
