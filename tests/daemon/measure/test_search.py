"""The search, on simulated machines: a function from settings to a trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from daemon.layout.profile import SAFETY, Trial, TunedSettings, choose_best
from daemon.measure.search import MOST_TRIALS, Space, judge, next_settings

GIB = 1 << 30
STAGES = ("ocr", "yolo", "clip", "blip")
Machine = Callable[[TunedSettings], Trial]


def make_settings(workers: int, batch: int, placement: str = "replicated") -> TunedSettings:
    return TunedSettings(placement, workers, dict.fromkeys(STAGES, batch))


def make_space(batch: int = 128, **fields: object) -> Space:
    defaults = {
        "placements": ("replicated",),
        "batches": dict.fromkeys(STAGES, batch),
        "most_workers": 16,
        "devices": 1,
        "gpu_bytes": 140 * GIB,
        "host_bytes": 256 * GIB,
    }
    return Space(**defaults | fields)  # type: ignore[arg-type]


def make_card(
    *, context: float = 3, image: float = 0.07, saturated: float = 780, single: float = 400, knee: float = 16
) -> Machine:
    """A GPU. GiB for a worker and for each image of its batch; images/s of the whole card, and of a worker with
    large batches; the batch at which a worker reaches half of that."""

    def run(settings: TunedSettings) -> Trial:
        batch = settings.batches["ocr"]
        alone = single * batch / (batch + knee)
        together = saturated * (1 - (1 - min(1.0, alone / saturated)) ** settings.workers)
        return Trial(
            settings=settings,
            images_per_second=together,
            gpu_bytes=int((context + image * settings.batch) * GIB),
            host_bytes=3 * GIB,
            stage_seconds={"ocr": 0.6, "yolo": 0.01, "clip": 0.09, "blip": 0.3},
        )

    return run


def search(space: Space, machine: Machine) -> list[Trial]:
    trials: list[Trial] = []
    while settings := next_settings(space, trials):
        assert settings not in [trial.settings for trial in trials], "nothing is measured twice"
        trials.append(judge(space, machine(settings)))
    return trials


def best_of_all(space: Space, machine: Machine) -> float:
    """The best rate of a machine, by trying everything."""
    every = (
        judge(space, machine(make_settings(workers, batch, placement)))
        for workers in range(1, space.most_workers + 1)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
        for placement in space.placements
    )
    return max(trial.images_per_second for trial in every if not trial.failure)


MACHINES = {
    "a large card": (make_space(), make_card()),
    "a card with 24 GB": (make_space(gpu_bytes=23 * GIB), make_card()),
    "a card with 16 GB": (make_space(64, gpu_bytes=15 * GIB), make_card()),
    "a card with 8 GB": (make_space(8, gpu_bytes=8 * GIB), make_card()),
    "batches that cost much memory": (make_space(gpu_bytes=40 * GIB), make_card(image=0.2, knee=4)),
    "batches that must be large": (make_space(), make_card(knee=100)),
    "one worker is enough": (make_space(), make_card(single=780)),
    "few cores": (make_space(most_workers=2), make_card()),
    "a small host": (make_space(host_bytes=8 * GIB), make_card()),
    "a CPU": (make_space(8, gpu_bytes=None, most_workers=2, host_bytes=10 * GIB), make_card(knee=1)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_search_comes_close_to_the_best_of_all_settings_in_few_trials(name: str) -> None:
    space, machine = MACHINES[name]
    trials = search(space, machine)
    best = choose_best(trials)
    assert best
    assert best.images_per_second >= 0.95 * best_of_all(space, machine)
    assert len(trials) <= 20


def test_workers_are_added_one_at_a_time_from_one() -> None:
    first = search(make_space(), make_card())[:3]
    assert [(trial.settings.workers, trial.settings.batch) for trial in first] == [
        (1, 128),
        (2, 128),
        (3, 128),
    ]


def test_a_measurement_that_is_a_little_off_does_not_end_the_search_for_workers() -> None:
    """An H100's rates, by workers: the fourth seemed to gain 2 percent, and whole runs had 15 percent more with five."""
    rates = {1: 389.4, 2: 592.6, 3: 738.8, 4: 751.8, 5: 795.8, 6: 790.0, 7: 785.0}

    def card(settings: TunedSettings) -> Trial:
        share = 1.0 if settings.batch == 128 else 0.9
        rate = share * rates.get(settings.workers, 780.0)
        return Trial(settings=settings, images_per_second=rate, gpu_bytes=8 * GIB, host_bytes=3 * GIB)

    trials = search(make_space(gpu_bytes=80 * GIB), card)
    best = choose_best(trials)
    assert best
    assert best.settings == make_settings(5, 128)
    assert max(trial.settings.workers for trial in trials) == 6


def test_settings_that_gain_little_do_not_replace_others_that_need_less() -> None:
    rates = {1: 100.0, 2: 102.0}
    trials = [Trial(settings=make_settings(n, 8), images_per_second=rate) for n, rate in rates.items()]
    assert choose_best(trials) == trials[0]


def test_no_trial_is_made_that_the_memory_measured_so_far_rules_out() -> None:
    space, machine = make_space(gpu_bytes=24 * GIB), make_card()
    for trial in search(space, machine):
        same = [t for t in search(space, machine) if t.settings.batches == trial.settings.batches]
        fewest = min(same, key=lambda t: t.settings.workers)
        if trial is not fewest and trial.settings != fewest.settings:
            assert SAFETY * fewest.gpu_bytes * trial.settings.workers <= 24 * GIB


def test_two_workers_with_half_the_batch_are_tried_where_two_with_the_whole_do_not_fit() -> None:
    tried = [trial.settings for trial in search(make_space(gpu_bytes=23 * GIB), make_card())]
    assert make_settings(2, 128) not in tried
    assert make_settings(2, 64) in tried


def test_a_failed_start_stops_the_workers_there() -> None:
    whole = make_card()

    def fragile(settings: TunedSettings) -> Trial:
        if settings.workers > 3:
            return Trial(settings=settings, failure="a worker was lost")
        return whole(settings)

    trials = search(make_space(), fragile)
    best = choose_best(trials)
    assert best
    assert best.settings.workers == 3
    assert max(trial.settings.workers for trial in trials) == 4
    assert [trial.settings.batch for trial in trials if trial.settings.workers == 4].count(128) == 1


def test_if_the_first_settings_do_not_work_smaller_ones_are_tried() -> None:
    def tiny(settings: TunedSettings) -> Trial:
        if settings.batch > 16:
            return Trial(settings=settings, failure="a batch did not fit into the GPU's memory")
        return make_card()(settings)

    best = choose_best(search(make_space(), tiny))
    assert best
    assert best.settings.batch == 16


def test_where_nothing_works_the_search_ends() -> None:
    trials = search(make_space(), lambda settings: Trial(settings=settings, failure="no"))
    assert choose_best(trials) is None
    assert [trial.settings.batch for trial in trials] == [128, 64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(("factor", "chosen"), [(1.2, "pipelined"), (0.8, "replicated")])
def test_both_placements_are_timed_and_the_faster_one_is_chosen(factor: float, chosen: str) -> None:
    card = make_card()

    def machine(settings: TunedSettings) -> Trial:
        trial = card(settings)
        rate = trial.images_per_second * (factor if settings.placement == "pipelined" else 1)
        return Trial(settings=settings, images_per_second=rate, stage_seconds=trial.stage_seconds)

    space = make_space(placements=("replicated", "pipelined"), devices=2)
    best = choose_best(search(space, machine))
    assert best
    assert best.settings.placement == chosen
    assert best.images_per_second >= 0.95 * best_of_all(space, machine)


def test_a_stage_whose_batches_should_be_smaller_gets_its_own_size() -> None:
    card = make_card(knee=60)

    def machine(settings: TunedSettings) -> Trial:
        trial = card(make_settings(settings.workers, settings.batches["ocr"]))
        penalty = 0.8 ** max(0.0, math.log2(settings.batches["blip"] / 64))
        return Trial(
            settings=settings,
            images_per_second=trial.images_per_second * penalty,
            gpu_bytes=trial.gpu_bytes,
            stage_seconds=trial.stage_seconds,
        )

    best = choose_best(search(make_space(), machine))
    assert best
    assert best.settings.batches["blip"] == 64
    assert best.settings.batches["ocr"] > 64


def test_the_number_of_trials_is_bounded() -> None:
    ever_faster = itertools.count(1)
    trials = search(
        make_space(most_workers=1000),
        lambda settings: Trial(settings=settings, images_per_second=2.0 ** next(ever_faster)),
    )
    assert len(trials) == MOST_TRIALS
