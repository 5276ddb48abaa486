"""What limits the rate: the rule, applied to moments that were a second apart. The daemon applies it to its last seconds, bench
and tune to the steady part of a run. docs/monitoring.md says what each part means. Imports nothing heavy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from daemon.core.hints import command

INPUT, READ, DECODE, GPU, WORKERS, PUBLISH = "input", "read", "decode", "gpu", "workers", "publish"
PARTS = (INPUT, READ, DECODE, GPU, WORKERS, PUBLISH)  # in the order in which an image passes them
WAITS = {  # what threads of workers can wait for
    READ: "until files are read or unpacked",
    PUBLISH: "until results are in the ledger and published",
    INPUT: "for files, and nothing is there to be read",
}
# kinds of process; others count as the daemon
IN_DAEMON, IN_WORKERS, IN_DECODERS, IN_UNPACKERS = OWNERS = ("daemon", "workers", "decoders", "unpackers")
FULL = 0.9  # of a part's time, from which it counts as busy all the time
STARVED = 0.25  # of the workers' threads, from which what they wait for limits; at the end of a run some always wait
FEWEST = 3  # moments that say anything


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one moment. Shares are 0 to 1, and of the threads of the workers that are ready."""

    at: float  # Unix seconds
    ended: int  # images since the daemon started
    in_flight: int
    occupied: float | None = (
        None  # share that has a batch, of the segment that has most; None: no worker is ready
    )
    waiting: dict[str, float] = {}  # share that has none, by what it waits for: one of WAITS
    crowded: bool = False  # less than a batch is queued, and the next file waits for room in the slab
    gpu_busy: float | None = (
        None  # of the GPUs in use, on average; None: there are none, or they do not report it
    )
    cpu_seconds: dict[str, float] = {}  # so far, by kind of process; those that have ended count too
    decoders: int = 0  # processes
    cores: int = 1  # that the daemon may use


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """part: one of PARTS; empty: nothing limits, or it is not known. shares: how occupied each part was, 0 to 1."""

    part: str = ""
    why: str = ""
    shares: dict[str, float] = {}
    cores_busy: float | None = None  # 0 to 1
    cores_used: float = 0.0  # seconds of CPU time in a second
    cores_by_kind: dict[str, float] = {}  # the same by kind of process
    crowded: bool = False  # the images in flight fill the slab, so batches are small

    def sentence(self) -> str:
        """What limits, why, and what to do about it; empty if nothing limits."""
        return f"limited by {self.part}: {self.why}. {self._fix()}" if self.part else ""

    def _fix(self) -> str:
        full_cores = (self.cores_busy or 0.0) >= FULL
        match self.part:
            case "input":
                return "More files would be processed at once"
            case "read":
                return "A faster disk or network for the inboxes helps"
            case "publish":
                return "A faster disk for [state] path and [output] results helps"
            case "gpu" if self.shares.get(GPU, 0.0) >= FULL:
                return "More or faster GPUs help, or smaller models"
            case "workers" if self.crowded:
                return "Set a larger [pipeline] slab_bytes"
            case "workers" if not full_cores:
                keys = "a larger workers_per_device or threads_per_worker under [pipeline]"
                return f"Set {keys}; `{command('tune')}` finds out how many"
            case "decode" if not full_cores:
                return "Set a larger [pipeline] decoders_per_worker"
        return "More cores help" + (", or a GPU" if self.part == GPU else "")


def find_limit(moments: Sequence[Moment]) -> Limit:
    """The first of these that holds is what limits:

    - gpu: the GPUs in use are busy for 90 % of the time; decode: the decoders are, of what they, or all cores if there are
      fewer, have;
    - all cores are 90 % busy: the part whose processes use most of them. Without GPUs the workers' are those of the part gpu;
    - read, publish, input: more than a quarter of the workers' threads wait for it, and more than for the others;
    - workers: their threads are occupied.

    Nothing limits if no image ended meanwhile and none is in flight at the end. Nor is anything known before the daemon's first
    image has ended: the first batches also load and compile.
    """
    moments = _at_work(moments)
    if len(moments) < FEWEST or not _seconds(moments):
        return Limit()
    cpu = {kind: _spent(moments, kind) for kind in OWNERS}
    shares, cores = _measure(moments, cpu[IN_DECODERS]), moments[-1].cores
    cores_busy = min(1.0, sum(cpu.values()) / cores)
    part, why = _choose(shares, cores_busy, cpu)
    if crowded := part == WORKERS and sum(moment.crowded for moment in moments) * 2 > len(moments):
        why += "; the images in flight fill [pipeline] slab_bytes, so batches are small"
    return Limit(
        part=part,
        why=why,
        shares=shares,
        cores_busy=cores_busy,
        cores_used=sum(cpu.values()),
        cores_by_kind=cpu,
        crowded=crowded,
    )


def _measure(moments: Sequence[Moment], decoding: float) -> dict[str, float]:
    """How occupied each part was, 0 to 1. decoding: cores that the decoders used."""
    loads = [moment.gpu_busy for moment in moments if moment.gpu_busy is not None]
    decoders = max(moment.decoders for moment in moments)
    measured = {
        **{part: statistics.fmean(moment.waiting.get(part, 0.0) for moment in moments) for part in WAITS},
        DECODE: decoding / max(1, min(moments[-1].cores, decoders)),
        WORKERS: statistics.fmean(moment.occupied or 0.0 for moment in moments),
    }
    if loads:
        measured[GPU] = statistics.fmean(loads)
    return {part: min(1.0, measured[part]) for part in sorted(measured, key=PARTS.index)}


def _at_work(moments: Sequence[Moment]) -> list[Moment]:
    """Those with ready workers after the first image, without the idle time before others. None if nothing was done."""
    ready = [moment for moment in moments if moment.occupied is not None and moment.ended]
    if not ready or (not ready[-1].in_flight and ready[-1].ended == ready[0].ended):
        return []
    begun = next(n for n, moment in enumerate(ready) if moment.in_flight or moment.ended > ready[0].ended)
    return ready[begun:]


def _seconds(moments: Sequence[Moment]) -> float:
    return moments[-1].at - moments[0].at


def _spent(moments: Sequence[Moment], kind: str) -> float:
    """Seconds of CPU time in a second. The clock may have been set back, and a look may have missed a process."""
    spent = moments[-1].cpu_seconds.get(kind, 0.0) - moments[0].cpu_seconds.get(kind, 0.0)
    return max(0.0, spent / _seconds(moments))


def _choose(shares: Mapping[str, float], cores_busy: float, cpu: Mapping[str, float]) -> tuple[str, str]:
    """A part and why, by the rule of `find_limit`. cpu: cores in use, by kind of process."""
    if full := [part for part in (GPU, DECODE) if shares.get(part, 0.0) >= FULL]:
        part = max(full, key=lambda each: shares[each])
        return part, f"{'the GPUs' if part == GPU else 'the decoders'} are {shares[part]:.0%} busy"
    if cores_busy >= FULL:
        kind = max(cpu, key=lambda each: cpu[each])
        of_workers = WORKERS if GPU in shares else GPU
        of_daemon = max(READ, PUBLISH, key=lambda each: shares[each])
        parts = {IN_DECODERS: DECODE, IN_WORKERS: of_workers, IN_UNPACKERS: READ, IN_DAEMON: of_daemon}
        owner = "daemon itself" if kind == IN_DAEMON else kind
        return parts[kind], f"the cores are {cores_busy:.0%} busy, most of them with the {owner}"
    wait = max(WAITS, key=lambda each: shares[each])
    if shares[wait] > STARVED:
        return wait, f"the workers' threads wait {WAITS[wait]} for {shares[wait]:.0%} of the time"
    also = f"the cores are {cores_busy:.0%} busy"
    if GPU in shares:
        also = f"the GPUs are {shares[GPU]:.0%} busy and the cores {cores_busy:.0%}"
    return WORKERS, f"their threads have a batch for {shares[WORKERS]:.0%} of the time, while {also}"
