"""Which settings to measure next. A pure function of what was measured so far: no files, no processes.

It climbs from one worker: from the best settings so far it takes one step that has not been measured yet, and
goes on from there if that was faster. Each step costs the start of a daemon, so steps that cannot fit into
the memory are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from daemon.layout.profile import SAFETY, Trial, TunedSettings, choose_best

LARGEST_BATCH = 1024
MOST_TRIALS = 30
LARGE_SHARE = 0.25  # of the time of all stages, from which a stage's own batch size is worth a trial


@dataclass(frozen=True, slots=True)
class Space:
    """Where to search. placements: the possible ones, the usual one first. gpu_bytes: free memory of the
    smallest GPU; None without one. host_bytes: free memory of the host."""

    placements: tuple[str, ...]
    batches: dict[str, int]  # by stage, to begin with
    most_workers: int  # on each device
    devices: int
    gpu_bytes: int | None
    host_bytes: int


def next_settings(space: Space, trials: Sequence[Trial]) -> TunedSettings | None:
    """The settings to measure next; None when no step from the best ones is left."""
    if not trials:
        return TunedSettings(space.placements[0], 1, space.batches)
    if len(trials) >= MOST_TRIALS:
        return None
    tried = [trial.settings for trial in trials]
    best = choose_best(trials)
    steps = _steps(space, trials, best) if best else _retreats(space, tried[-1])
    return next((step for step in steps if step not in tried and not _is_hopeless(space, trials, step)), None)


def judge(space: Space, trial: Trial) -> Trial:
    """The trial, as a failure if a long run may not have enough memory. One worker with batches of one image
    is never refused: there is nothing smaller."""
    settings = trial.settings
    if (
        trial.failure
        or _has_room(space, trial, settings.workers)
        or (settings.workers, settings.batch) == (1, 1)
    ):
        return trial
    return msgspec.structs.replace(
        trial, failure=f"a long run may need {SAFETY - 1:.0%} more memory than this, which is not there"
    )


def _steps(space: Space, trials: Sequence[Trial], best: Trial) -> Iterator[TunedSettings]:
    now = best.settings
    more, larger = msgspec.structs.replace(now, workers=now.workers + 1), _scaled(now, 2)
    if more.workers <= space.most_workers:
        yield more
        if _is_hopeless(space, trials, more):
            yield _with_more_workers(space, trials, _scaled(more, 0.5))
        elif _is_no_slower(trials, more, best):
            # A measurement is a few percent off, which can hide what one worker gains, but rarely what two do.
            yield msgspec.structs.replace(more, workers=min(more.workers + 1, space.most_workers))
    yield larger
    if _is_hopeless(space, trials, larger) and now.workers > 1:
        yield _with_larger_batches(space, trials, msgspec.structs.replace(larger, workers=now.workers - 1))
    yield _scaled(now, 0.5)
    for placement in space.placements:
        yield msgspec.structs.replace(now, placement=placement)
    total = sum(best.stage_seconds.values())
    for stage, seconds in sorted(best.stage_seconds.items(), key=lambda item: -item[1]):
        if seconds >= LARGE_SHARE * total and len(now.batches) > 1:
            yield _scaled(now, 0.5, stage)
            yield _scaled(now, 2, stage)


def _is_no_slower(trials: Sequence[Trial], settings: TunedSettings, best: Trial) -> bool:
    return any(
        trial.settings == settings and trial.images_per_second >= best.images_per_second for trial in trials
    )


def _retreats(space: Space, last: TunedSettings) -> Iterator[TunedSettings]:
    """Nothing has worked yet: less memory with each step."""
    for placement in space.placements:
        yield msgspec.structs.replace(last, placement=placement)
    yield _scaled(last, 0.5)


def _scaled(settings: TunedSettings, factor: float, stage: str = "") -> TunedSettings:
    """With all batches, or those of one stage, larger or smaller by this factor."""
    batches = {
        name: min(LARGEST_BATCH, max(1, int(size * factor))) if stage in ("", name) else size
        for name, size in settings.batches.items()
    }
    return msgspec.structs.replace(settings, batches=batches)


def _is_hopeless(space: Space, trials: Sequence[Trial], step: TunedSettings) -> bool:
    """Whether less has failed already, or what was measured shows that this does not fit."""
    for trial in trials:
        done = trial.settings
        if done.placement != step.placement:
            continue
        no_more = done.workers <= step.workers and all(
            size <= step.batches[stage] for stage, size in done.batches.items()
        )
        if trial.failure and no_more:
            return True
        if not trial.failure and no_more and not _has_room(space, trial, step.workers):
            return True
    return False


def _with_more_workers(space: Space, trials: Sequence[Trial], settings: TunedSettings) -> TunedSettings:
    """As many workers as should fit, at least those of the settings."""
    fitting = settings
    while fitting.workers < space.most_workers and _should_fit(
        space, trials, more := msgspec.structs.replace(fitting, workers=fitting.workers + 1)
    ):
        fitting = more
    return fitting


def _with_larger_batches(space: Space, trials: Sequence[Trial], settings: TunedSettings) -> TunedSettings:
    """Batches as large as should fit, at least those of the settings."""
    fitting = settings
    while fitting.batch < LARGEST_BATCH and _should_fit(space, trials, more := _scaled(fitting, 2)):
        fitting = more
    return fitting


def _should_fit(space: Space, trials: Sequence[Trial], settings: TunedSettings) -> bool:
    """Whether the GPU's memory should suffice. A worker's memory is a straight line over its batch, through
    the smallest and the largest that were measured; with fewer than two nothing is assumed to fit."""
    measured = {trial.settings.batch: trial.gpu_bytes for trial in trials if trial.gpu_bytes}
    if space.gpu_bytes is None or len(measured) < 2:
        return False
    low, high = min(measured), max(measured)
    slope = (measured[high] - measured[low]) / (high - low)
    each = measured[low] + slope * (settings.batch - low)
    return SAFETY * each * settings.workers <= space.gpu_bytes


def _has_room(space: Space, trial: Trial, workers: int) -> bool:
    """Whether the memory holds this number of workers like those of a trial."""
    host = SAFETY * trial.host_bytes * workers * space.devices <= space.host_bytes
    return host and (space.gpu_bytes is None or SAFETY * trial.gpu_bytes * workers <= space.gpu_bytes)
