"""The steady part of a run, the middle 70 % of its images: their rate, how busy the machine was, and what limited the rate.

Before it batches fill and kernels are prepared; after it some workers have nothing left to do.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from daemon.measure.meter import DAEMON, DECODERS, WORKERS, LoadSample, Meter, StatusSample
from stages.contract.processes import count_cores

MIDDLE = (0.15, 0.85)  # shares of the images
FULL = 0.9  # of a part's time, from which it counts as busy all the time
INPUT, READ, DECODE, GPU, PUBLISH = "input", "read", "decode", "gpu", "publish"  # the parts of the way
USERS = {DECODE: DECODERS, GPU: WORKERS, READ: DAEMON}  # whose processes work for a part

Timed = TypeVar("Timed", LoadSample, StatusSample)


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are 0 to 1. None, or no shares: the steady part was too short to tell, or there is no GPU."""

    images_per_second: float
    slowest: float  # images per second, of its thirds
    fastest: float
    gpu_busy: float | None = None
    cores_busy: float | None = None
    cpu_milliseconds: float | None = None  # for an image, of all processes together
    shares: dict[str, float] = {}  # how occupied each part was
    limited_by: str = ""  # a part
    why: str = ""


def find_steady(times: Sequence[float], lag_seconds: float, meter: Meter) -> Steady:
    """times: when each image was published, in order, in seconds since the meter's start. lag_seconds: of each image from
    the end of its stages to its publication, on average.

    The part whose share is the largest limits:

    - input: looks at which no image waited, neither to be read nor for a worker;
    - read: looks at which files waited to be read or unpacked and the slab had room, but no image waited for a worker;
    - decode: CPU time of the decoders, of what they, or all cores if there are fewer, have;
    - gpu: load of the GPUs in use, as their driver reports it; on a CPU the time of the workers' threads in the stages;
    - publish: images that wait for their publication (the rate times the lag), of those that a worker has or has had.

    When no part is busy for 90 % of the time, but all cores together are, it is the part whose processes use most of them.
    When nothing is and the slab is full, that is said.
    """
    rate, slowest, fastest = measure_rate(times)
    first, last = (times[min(len(times) - 1, int(len(times) * share))] for share in MIDDLE)
    steady = Steady(images_per_second=rate, slowest=slowest, fastest=fastest)
    samples, looks = _between(meter.samples, first, last), _between(meter.looks, first, last)
    if len(samples) < 2 or len(looks) < 2:
        return steady
    cpu = {kind: _spent(samples, kind) for kind in (DECODERS, WORKERS, DAEMON)}  # cores
    loads = _loads(samples, looks, meter.devices)
    decoders = max(sample.decoders for sample in samples)
    held = statistics.fmean(look.in_flight - look.queued for look in looks)
    measured = {
        DECODE: cpu[DECODERS] / max(1, min(count_cores(), decoders)),
        **_judge_looks(looks, meter),
        **({GPU: statistics.fmean(loads)} if loads else {}),
        PUBLISH: rate * lag_seconds / max(1.0, held),
    }
    shares = {part: min(1.0, share) for part, share in measured.items()}
    cores_busy = min(1.0, sum(cpu.values()) / count_cores())
    limited_by, why = choose_limit(shares, cores_busy, cpu)
    if shares[limited_by] < FULL and sum(look.slab_share >= FULL for look in looks) * 2 > len(looks):
        why += "; the images in flight fill [pipeline] slab_bytes, so batches are small"
    return msgspec.structs.replace(
        steady,
        gpu_busy=shares[GPU] if loads else None,
        cores_busy=cores_busy,
        cpu_milliseconds=1000 * sum(cpu.values()) / max(rate, 1e-9),
        shares=shares,
        limited_by=limited_by,
        why=why,
    )


def _between(measured: Sequence[Timed], first: float, last: float) -> list[Timed]:
    return [each for each in measured if first <= each.at <= last]


def choose_limit(shares: Mapping[str, float], cores_busy: float, cpu: Mapping[str, float]) -> tuple[str, str]:
    """A part and why, by the rule of `find_steady`. cpu: cores in use, by kind of process."""
    part = max(shares, key=lambda each: shares[each])
    if shares[part] < FULL <= cores_busy:
        part = max(USERS, key=lambda each: cpu[USERS[each]])
        owner = {DECODERS: "decoders", WORKERS: "workers", DAEMON: "daemon itself"}[USERS[part]]
        return part, f"the cores are {cores_busy:.0%} busy, most of them with the {owner}"
    return part, f"it is occupied for {shares[part]:.0%} of the time"


def _spent(samples: Sequence[LoadSample], kind: str) -> float:
    """Seconds of CPU time in a second."""
    first, last = samples[0], samples[-1]
    return (last.cpu_seconds.get(kind, 0.0) - first.cpu_seconds.get(kind, 0.0)) / (last.at - first.at)


def _loads(
    samples: Sequence[LoadSample], looks: Sequence[StatusSample], devices: Sequence[str]
) -> list[float]:
    """Of the GPUs in use. devices: the names of the GPUs of a sample."""
    used = {device for look in looks for device in look.devices}
    return [
        load
        for sample in samples
        for device, load in zip(devices, sample.gpu_utilisation, strict=False)
        if load is not None and device in used
    ]


def _judge_looks(looks: Sequence[StatusSample], meter: Meter) -> dict[str, float]:
    starved = [look for look in looks if not look.queued]
    shares = {
        INPUT: sum(not look.unread for look in starved) / len(looks),
        READ: sum(look.unread > 0 and look.slab_share < FULL for look in starved) / len(looks),
    }
    first, last = looks[0], looks[-1]
    if last.at > first.at and last.workers:
        spent = (last.stage_seconds - first.stage_seconds) / (last.at - first.at)
        shares[GPU] = spent / (last.workers * meter.threads_per_worker)
    return shares


def measure_rate(times: Sequence[float]) -> tuple[float, float, float]:
    """Images per second in the middle: the slope of a line through the ends of batches. Also the lowest and
    highest rate of its thirds.

    times: when each image was finished, in order. Images of a batch are finished together, so a part that
    begins in the middle of a batch would count up to a batch too much.
    """
    ends = _ends_of_batches(times)
    begin, end = MIDDLE
    cuts = [
        _first_from(ends, int(len(times) * (begin + part * (end - begin) / 3) + 1e-9)) for part in range(4)
    ]
    thirds = [_rate(times, a, b) for a, b in itertools.pairwise(cuts) if b > a]
    middle = [end for end in ends if cuts[0] <= end <= cuts[-1]]
    if len(middle) < 3:  # too few batches for a middle part
        rate = _rate(times, 0, len(times) - 1)
        return rate, rate, rate
    rate = statistics.linear_regression([times[end] for end in middle], middle).slope
    return rate, min(rate, *thirds), max(rate, *thirds)


def _rate(times: Sequence[float], first: int, last: int) -> float:
    return (last - first) / max(times[last] - times[first], 1e-9)


def _ends_of_batches(times: Sequence[float]) -> list[int]:
    """The positions before gaps that are not much shorter than the average of the middle half. Images of a
    batch follow each other faster than that."""
    first, last = len(times) // 4, len(times) * 3 // 4
    average = (times[last] - times[first]) / max(1, last - first)
    gaps = [end for end, (a, b) in enumerate(itertools.pairwise(times)) if b - a > average / 2]
    return [*gaps, len(times) - 1]


def _first_from(ends: Sequence[int], position: int) -> int:
    return next(end for end in ends if end >= position or end == ends[-1])
