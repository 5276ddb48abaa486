"""What `auto` makes of a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.config.loading import Config, parse
from daemon.config.state import PROFILE
from daemon.layout import layout
from daemon.layout.layout import Layout
from daemon.layout.profile import (
    Machine,
    Profile,
    Trial,
    TunedSettings,
    apply,
    find_tuned,
    read_profile,
    write_profile,
)
from daemon.system.gpus import Gpu
from stages.contract.base import StageSpec
from stages.contract.processes import count_cores
from tests.daemon_process import Place

GIB = 1 << 30
SPECS = {name: StageSpec(name, "fake", fingerprint=f"{name}-1") for name in ("ocr", "clip")}


def make_gpu(free: int = 140 * GIB, name: str = "NVIDIA H200", index: int = 0) -> Gpu:
    return Gpu(index, f"GPU-{index}", name, 141 * GIB, free, 0, "9.0", None, ())


def make_trial(workers: int, batch: int, rate: float, **fields: Any) -> Trial:
    settings = TunedSettings("replicated", workers, {"ocr": batch, "clip": batch})
    return Trial(settings=settings, images_per_second=rate, gpu_bytes=12 * GIB, **fields)


MACHINE = Machine.of([make_gpu()], 16, SPECS)
PROFILE_OF_5 = Profile(
    machine=MACHINE,
    sample="200 images of the standard job",
    made_on="2026-11-23",
    trials=[make_trial(1, 128, 225), make_trial(5, 128, 640), make_trial(6, 128, 645)],
)


def configure(**document: Any) -> Config:
    return parse(document, Path("/srv"))


def use(config: Config, *gpus: Gpu) -> tuple[Config, str]:
    used = apply(config, PROFILE_OF_5, gpus)
    assert used
    return used


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    write_profile(tmp_path, PROFILE_OF_5, finished=True)
    assert read_profile(tmp_path) == PROFILE_OF_5


def test_an_interrupted_search_does_not_replace_the_last_profile_and_a_finished_one_ends_it(
    tmp_path: Path,
) -> None:
    half = msgspec.structs.replace(PROFILE_OF_5, trials=PROFILE_OF_5.trials[:1])
    write_profile(tmp_path, PROFILE_OF_5, finished=True)
    write_profile(tmp_path, half, finished=False)
    assert find_tuned(tmp_path, MACHINE) == PROFILE_OF_5
    assert read_profile(tmp_path, finished=False) == half
    write_profile(tmp_path, PROFILE_OF_5, finished=True)
    assert [file.name for file in tmp_path.iterdir()] == [PROFILE]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"machine": 3}'])
def test_a_damaged_profile_is_like_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PROFILE).write_bytes(content)
    assert read_profile(tmp_path) is None


@pytest.mark.parametrize(
    "other",
    [
        Machine.of([make_gpu(name="NVIDIA H100")], 16, SPECS),
        Machine.of([make_gpu(), make_gpu(index=1)], 16, SPECS),
        Machine.of([make_gpu()], 8, SPECS),
        Machine.of([make_gpu()], 16, SPECS | {"clip": StageSpec("clip", "fake", fingerprint="clip-2")}),
    ],
    ids=["another GPU", "another number", "other cores", "another model"],
)
def test_a_profile_of_another_machine_or_other_models_is_not_used(tmp_path: Path, other: Machine) -> None:
    write_profile(tmp_path, PROFILE_OF_5, finished=True)
    assert find_tuned(tmp_path, MACHINE)
    assert find_tuned(tmp_path, other) is None


def test_memory_in_use_does_not_make_it_another_machine() -> None:
    assert Machine.of([make_gpu(free=GIB)], 16, SPECS) == MACHINE


def test_what_was_measured_is_for_throughput() -> None:
    assert apply(configure(pipeline={"prefer": "latency"}), PROFILE_OF_5, [make_gpu()]) is None


def test_auto_takes_the_best_settings_and_says_so() -> None:
    config, why = use(configure(), make_gpu())
    assert (config.pipeline.placement, config.pipeline.workers_per_device) == ("replicated", 5)
    assert config.stages.ocr.batch_size == 128  # type: ignore[attr-defined]
    assert config.stages.yolo.batch_size == 0  # type: ignore[attr-defined]
    assert why == "`visiond tune` measured 640 images/s with these settings"


def test_what_the_configuration_sets_stays_and_no_rate_is_claimed_that_was_not_measured() -> None:
    set_by_user = configure(pipeline={"workers_per_device": 3}, stages={"ocr": {"batch_size": 16}})
    config, why = use(set_by_user, make_gpu())
    assert config.pipeline.workers_per_device == 3
    assert [getattr(config.stages, name).batch_size for name in ("ocr", "clip")] == [16, 128]
    assert why == "as `visiond tune` measured, except for what the configuration sets"


@pytest.mark.parametrize("spread", ["round-robin", "fill-first"])
def test_a_spread_that_is_set_decides_the_workers_with_the_batches_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: str
) -> None:
    gpus = [make_gpu(), make_gpu(free=40 * GIB, index=1)]
    monkeypatch.setattr(layout, "list_gpus", lambda: gpus)
    place = Place(tmp_path, {"pipeline": {"spread": spread, "workers_per_device": 0}})
    config = parse(place.settings, tmp_path)
    machine = Machine.of(gpus, count_cores(), Layout.of(config).specs)
    settings = TunedSettings("replicated", 7, dict.fromkeys(machine.models, 24))  # more than any spread gives
    trial = Trial(settings=settings, images_per_second=100, gpu_bytes=GIB)
    config.state.path.mkdir()
    write_profile(
        config.state.path, Profile(machine=machine, sample="", made_on="", trials=[trial]), finished=True
    )
    found = Layout.of(config)
    assert {spec.batch_size for spec in found.specs.values()} == {24}
    assert found.placement.why.startswith(
        "as `visiond tune` measured, except for what the configuration sets;"
    )
    assert found.placement.why.endswith(f'by spread = "{spread}"')
    assert found.placement.segments[0].devices.count("cuda:0") < 7


def test_a_spread_leaves_the_measured_workers_of_a_cpu_and_a_number_that_is_set() -> None:
    spread = {"spread": "fill-first"}
    assert use(configure(pipeline=spread))[0].pipeline.workers_per_device == 5
    both = configure(pipeline=spread | {"workers_per_device": 3})
    assert use(both, make_gpu())[0].pipeline.workers_per_device == 3


def test_a_profile_is_not_named_where_spread_and_batches_leave_nothing_open() -> None:
    stages = {name: {"batch_size": 16} for name in SPECS}
    pipeline = {"placement": "replicated", "spread": "round-robin"}
    assert apply(configure(pipeline=pipeline, stages=stages), PROFILE_OF_5, [make_gpu()]) is None


@pytest.mark.parametrize(
    "pipeline",
    [
        {"placement": "pipelined"},
        {"segment": [{"stages": ["ocr", "yolo", "clip", "blip"], "devices": ["cuda:0"]}]},
    ],
)
def test_a_placement_that_was_not_chosen_by_the_tuner_stays_as_it_is(pipeline: dict[str, Any]) -> None:
    assert apply(configure(pipeline=pipeline), PROFILE_OF_5, [make_gpu()]) is None


@pytest.mark.parametrize(("free", "workers"), [(140, 5), (67, 5), (65, 4), (27, 2), (14, 1)])
def test_a_neighbor_on_the_gpu_leaves_fewer_workers(free: int, workers: int) -> None:
    config, why = use(configure(), make_gpu(), make_gpu(free * GIB, index=1))
    assert config.pipeline.workers_per_device == workers
    assert ("hold only" in why) is (workers < 5)


def test_a_gpu_without_room_for_one_worker_is_left_to_the_usual_choice() -> None:
    assert apply(configure(), PROFILE_OF_5, [make_gpu(13 * GIB)]) is None


def test_a_profile_without_a_working_trial_is_not_used() -> None:
    failed = msgspec.structs.replace(PROFILE_OF_5, trials=[make_trial(1, 128, 0, failure="no")])
    assert apply(configure(), failed, [make_gpu()]) is None


def test_a_job_takes_its_start_and_its_images() -> None:
    assert make_trial(1, 8, 100, start_seconds=20).seconds_for(1000) == 30


@pytest.mark.parametrize(("fingerprint", "used"), [("", True), ("other", False)])
def test_the_daemon_starts_with_the_best_settings_of_a_profile_of_its_models(
    tmp_path: Path, fingerprint: str, used: bool
) -> None:
    stages = {name: {"backend": "fake"} for name in ("ocr", "clip")}
    config = parse({"pipeline": {"stages": list(stages)}, "stages": stages}, tmp_path)
    before = Layout.of(config)
    specs = {
        name: msgspec.structs.replace(spec, fingerprint=fingerprint or spec.fingerprint)
        for name, spec in before.specs.items()
    }
    machine = Machine.of(before.gpus, count_cores(), specs)
    profile = msgspec.structs.replace(PROFILE_OF_5, machine=machine, trials=[make_trial(3, 32, 100)])
    config.state.path.mkdir()
    write_profile(config.state.path, profile, finished=True)
    after = Layout.of(config)
    assert all((spec.batch_size == 32) is used for spec in after.specs.values())
    assert after.placement.why.startswith("`visiond tune` measured 100 images/s with these settings") is used
    if not before.gpus:
        assert after.placement.segments[0].devices == ("cpu",) * (3 if used else 1)
        assert after.placement.why.endswith("; workers: 3 on cpu") is used


def test_costs_are_those_of_the_first_replicated_trial_that_worked() -> None:
    """They decide where a pipelined placement cuts the stages, so later trials must not change them."""
    measured = {"ocr": 0.002, "clip": 0.001}
    failed = msgspec.structs.replace(make_trial(1, 256, 0), failure="too large", stage_seconds={"ocr": 9.0})
    first, second = make_trial(1, 128, 225, stage_seconds=measured), make_trial(2, 128, 300)
    pipelined = msgspec.structs.replace(
        first, settings=TunedSettings("pipelined", 1, {}), stage_seconds={"ocr": 7}
    )

    def costs(*trials: Trial) -> dict[str, float]:
        return msgspec.structs.replace(PROFILE_OF_5, trials=list(trials)).costs

    assert costs(failed, pipelined, first, second) == measured
    assert costs() == costs(failed) == {}
    assert costs(make_trial(1, 128, 225, stage_seconds={"ocr": 0.002})) == {}  # one stage was not measured


def test_a_pipelined_placement_follows_the_measured_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [make_gpu(index=index) for index in range(2)]
    monkeypatch.setattr(layout, "list_gpus", lambda: gpus)
    place = Place(tmp_path, {"pipeline": {"placement": "pipelined"}})
    config = parse(place.settings, tmp_path)
    before = Layout.of(config)
    cheap = dict.fromkeys(before.specs, 0.001)
    config.state.path.mkdir()
    trial = make_trial(1, 128, 225, stage_seconds=cheap | {"blip": 0.01})
    machine = Machine.of(gpus, count_cores(), before.specs)
    write_profile(
        config.state.path, Profile(machine=machine, sample="", made_on="", trials=[trial]), finished=True
    )
    stages = [[s.stages for s in found.placement.segments] for found in (before, Layout.of(config))]
    assert stages == [[("ocr",), ("yolo", "clip", "blip")], [("ocr", "yolo", "clip"), ("blip",)]]
