"""Groups of devices, "cuda:0+cuda:1": from the configuration to one worker that sees them all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.config.loading import Config, parse
from daemon.core.errors import ConfigError
from daemon.core.messages import Beat
from daemon.layout import layout, placement
from daemon.layout.devices import address_device, assume_gpus, select_devices, used_gpus
from daemon.layout.layout import Layout
from daemon.layout.placement import CONTEXT_BYTES, Segment
from daemon.system.cores import Cores
from daemon.system.gpus import Gpu
from daemon.workers import opening
from daemon.workers.kernels import list_wants
from daemon.workers.slot import Room, need_for
from stages.contract.base import StageSpec
from tests.daemon.layout.test_devices import GIB, MIXED, list_visible, make_gpu
from tests.daemon_process import STAGES, Place, picture
from tests.stages.captioners import CAPTIONERS

FOUR = [make_gpu(number, "NVIDIA H100 80GB HBM3") for number in range(4)]


def config_of(*devices: str, then: list[str] | None = None) -> Config:
    """Two segments; the second, with BLIP, is on these devices. then: the devices of the first."""
    tables = [
        {"stages": list(STAGES[:3]), "devices": then or ["cuda:0"]},
        {"stages": ["blip"], "devices": list(devices)},
    ]
    return parse({"pipeline": {"segment": tables}}, Path("/srv"))


def select(*devices: str, gpus: list[Gpu] = FOUR, then: list[str] | None = None) -> list[str]:
    return select_devices(config_of(*devices, then=then), gpus).pipeline.segment[1].devices


def refused(*devices: str, gpus: list[Gpu] = FOUR, then: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        select(*devices, gpus=gpus, then=then)
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("cuda:0+cuda:1", "cuda:0+cuda:1"),
        (" cuda + cuda:03 ", "cuda:0+cuda:3"),
        ("GPU-2f2e+cuda:0", "cuda:2+cuda:0"),
        ("cpu+cpu:1", "cpu:0+cpu:1"),
    ],
)
def test_a_group_has_one_form(written: str, meant: str) -> None:
    assert select(written) == [meant]
    assert select(meant) == [meant]


def test_several_groups_are_several_places_for_workers() -> None:
    assert select("cuda:0+cuda:1", "cuda:2+cuda:3") == ["cuda:0+cuda:1", "cuda:2+cuda:3"]
    assert select("cuda:0+cuda:1", "cuda:0+cuda:1") == ["cuda:0+cuda:1", "cuda:0+cuda:1"]


@pytest.mark.parametrize(
    ("devices", "gpus", "problem"),
    [
        (
            ["cuda:0+cuda:0"],
            FOUR,
            'the group "cuda:0+cuda:0" has cuda:0 twice; a group needs different devices, for example "cuda:0+cuda:1".',
        ),
        (["GPU-1f2e+cuda:1"], FOUR, 'the group "GPU-1f2e+cuda:1" has cuda:1 twice'),
        (
            ["cpu:1+cpu:1"],
            FOUR,
            'has cpu:1 twice; a group needs different devices, for example "cpu:0+cpu:1".',
        ),
        (
            ["cuda:0+cpu"],
            FOUR,
            '"cuda:0+cpu" has both a CPU and a GPU, but a model is spread over devices of one',
        ),
        (["cuda:0+cuda:9"], FOUR, "there is no cuda:9; there are cuda:0 (NVIDIA H100"),
        (["cuda:0+"], FOUR, '"" is not a device; write "cpu", or a GPU'),
        (
            ["H100+cuda:0"],
            FOUR,
            "H100 means 4 GPUs, but a member of a group is one; write cuda:0 (NVIDIA H100",
        ),
        (["cuda:0+cuda:3:1"], MIXED, "cuda:3:1 means a MIG device, of which CUDA shows one to a process"),
    ],
)
def test_a_group_that_cannot_be_is_refused(devices: list[str], gpus: list[Gpu], problem: str) -> None:
    told = refused(*devices, gpus=gpus)
    assert told.startswith("pipeline.segment[1].devices")
    assert problem in told


@pytest.mark.parametrize("then", [["cuda:0"], ["cuda:1+cuda:2"]])
def test_a_device_is_in_one_group_only(then: list[str]) -> None:
    """But a group may share a device with the stages of another segment that are not spread."""
    other = [] if len(then[0]) > len("cuda:0") else ["cuda:1+cuda:2"]
    assert refused("cuda:0+cuda:1", *other, then=then).startswith(
        "pipeline.segment: cuda:1 is in two groups, cuda:"
    )
    assert select("cuda:0+cuda:1", then=["cuda:0"]) == ["cuda:0+cuda:1"]


def test_a_group_is_written_into_a_segment() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"pipeline": {"devices": ["cuda:0+cuda:1"]}}, Path("/srv"))
    [problem] = caught.value.problems
    assert problem.startswith('pipeline.devices[0]: "cuda:0+cuda:1" is a group of devices')
    assert "write it as devices of a [[pipeline.segment]] table" in problem


def test_all_gpus_of_a_group_are_used() -> None:
    assert used_gpus(config_of("cuda:1+cuda:3"), FOUR) == [FOUR[0], FOUR[1], FOUR[3]]
    assert used_gpus(config_of("cpu:0+cpu:1"), FOUR) == []


def test_gpus_of_a_group_that_are_not_there_are_assumed_for_kernels() -> None:
    assert assume_gpus(config_of("cuda:1+cuda:3")).pipeline.segment[1].devices == ["cuda:0"]


@pytest.mark.parametrize("stages", [["ocr", "yolo"], list(STAGES)])
def test_a_segment_without_a_model_that_can_be_spread_is_refused(stages: list[str], tmp_path: Path) -> None:
    tables = [{"stages": stages, "devices": ["cpu:0+cpu:1"]}]
    with pytest.raises(ConfigError) as caught:
        Layout.of(parse({"pipeline": {"stages": stages, "segment": tables}}, tmp_path))
    assert caught.value.problems == [
        f'pipeline.segment[0].devices: "cpu:0+cpu:1" is a group, but no model of this segment ({", ".join(stages)}) can be '
        "spread over several devices; stages with backends that can: ocr (reader), blip (blip2, chat). "
        'Write each device by itself: ["cpu:0", "cpu:1"].'
    ]


def layout_of(tmp_path: Path, tables: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(layout, "list_gpus", lambda: FOUR)
    return Layout.of(parse(Place(tmp_path, {"pipeline": {"segment": tables}}).settings, tmp_path))


def test_a_worker_gets_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [{"stages": list(STAGES), "devices": ["cuda:2+cuda:1", "cuda:3"], "workers_per_device": 2}]
    made = layout_of(tmp_path, tables, monkeypatch)
    [segment] = made.placement.segments
    assert segment.devices == ("cuda:2+cuda:1", "cuda:3") * 2
    setup, environment = made.set_up(segment, 0, 0)
    assert setup.device == "cuda:0"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-2f2e-77aa,GPU-1f2e-77aa"
    assert {tuple(spec.spread) for spec in setup.stages} == {("cuda:0", "cuda:1")}
    alone, environment = made.set_up(segment, 1, 0)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-3f2e-77aa"
    assert {tuple(spec.spread) for spec in alone.stages} == {()}
    monkeypatch.setattr(opening, "is_installed", lambda: True)
    assert [*opening._open_servers(made, segment)] == ["cuda:3"]  # the workers of a group take turns


def test_a_stage_knows_with_how_many_workers_it_shares_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[dict[str, Any]] = [
        {"stages": ["ocr", "yolo"], "devices": ["cuda:0", "cuda:1"], "workers_per_device": 2},
        {"stages": ["clip", "blip"], "devices": ["cuda:1"]},
    ]
    made = layout_of(tmp_path, tables, monkeypatch)
    found = {
        (segment.name, device, spec.workers)
        for segment in made.placement.segments
        for number, device in enumerate(segment.devices)
        for spec in made.set_up(segment, number, 0)[0].stages
    }
    assert found == {("ocr+yolo", "cuda:0", 2), ("ocr+yolo", "cuda:1", 3), ("clip+blip", "cuda:1", 3)}


def test_stages_that_cannot_be_spread_are_on_the_first_device() -> None:
    ocr = StageSpec("ocr", "ppocr")
    assert placement.spread_over(["cuda:0", "cuda:1"], ocr) is ocr
    assert placement.spread_over(["cuda:0", "cuda:1"], StageSpec("blip", "chat")).spread == [
        "cuda:0",
        "cuda:1",
    ]
    assert placement.spread_over([], StageSpec("blip", "chat")).spread == []


def test_a_pretended_group_is_the_cpu_for_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layout_of(tmp_path, [{"stages": list(STAGES), "devices": ["cpu:0+cpu:1"]}], monkeypatch)
    [segment] = made.placement.segments
    setup, environment = made.set_up(segment, 0, 0)
    assert (setup.device, setup.stages[3].spread) == ("cpu", ["cpu:0", "cpu:1"])
    assert environment == address_device("cpu", FOUR, int(environment["OMP_NUM_THREADS"]))[1]
    assert opening._measure_rooms(made, [range(1)]) == {}


def test_a_worker_of_a_group_runs_near_its_first_gpu_and_has_kernels_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [{"stages": list(STAGES), "devices": ["cuda:2+cuda:1"]}]
    asked: list[list[str]] = []

    def place(gpus: object, devices: list[str], sharers: int) -> Cores:
        asked.append(devices)
        return Cores(8, {"cuda:2": [4, 5], "cuda:1": [0, 1]})

    monkeypatch.setattr(Cores, "of", place)
    made = layout_of(tmp_path, tables, monkeypatch)
    assert asked == [["cuda:2"]]
    assert made.set_up(made.placement.segments[0], 0, 0)[0].cores == [4, 5]
    old = [make_gpu(1, "old")]
    specs = {"ocr": StageSpec("ocr", "ppocr")}
    assert list_wants([Segment(("ocr",), ("cuda:2+cuda:1",))], specs, old) == []
    assert list_wants([Segment(("ocr",), ("cuda:1+cuda:2",))], specs, old) != []


@pytest.mark.anyio
async def test_the_memory_of_a_group_is_that_of_its_gpus_together() -> None:
    before = [make_gpu(0, "H100", free=70), make_gpu(1, "H100", free=60), make_gpu(2, "H100", free=1)]
    now = [make_gpu(0, "H100", free=30), make_gpu(1, "H100", free=40), make_gpu(2, "H100", free=0)]
    group = Room(before[:2], lambda: now)
    assert await group.measure_free() == 70 * GIB
    group.slots.append(SimpleNamespace(worker=SimpleNamespace(beat=Beat(0, device_used_bytes=50 * GIB))))  # type: ignore[arg-type]
    assert await group.measure_taken() == 60 * GIB - 50 * GIB - 2 * CONTEXT_BYTES
    assert await Room(before[:2], lambda: now[:1]).measure_free() is None
    assert need_for([GIB], 2) - need_for([GIB], 1) == need_for([], 1)


@pytest.mark.anyio
@pytest.mark.parametrize("executors", [1, 2])
async def test_one_worker_sees_all_gpus_of_its_group(
    executors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: FOUR)
    tables = [{"stages": list(STAGES), "devices": ["cuda:1+cuda:0", "cuda:2+cuda:3"]}]
    place = Place(tmp_path, {"pipeline": {"segment": tables, "executors": executors}})
    assert await list_visible(place) == ["GPU-1f2e-77aa,GPU-0f2e-77aa", "GPU-2f2e-77aa,GPU-3f2e-77aa"]


def test_a_spread_model_writes_sidecars(tmp_path: Path) -> None:
    """A real model on two pretended devices, from a configuration to its captions."""
    CAPTIONERS["blip-2"](tmp_path / "blip-2")
    tables = [{"stages": ["blip"], "devices": ["cpu:0+cpu:1"]}]
    blip = {"model": "./blip-2", "backend": "", "options": {"max_new_tokens": 4, "force_tokens": 4}}
    settings = {"pipeline": {"stages": ["blip"], "segment": tables}, "stages": {"blip": blip}}
    place = Place(tmp_path, settings)
    place.drop("one.ppm", picture(1))
    checked = place.command("check")
    assert "stage blip on cpu:0+cpu:1: imports its libraries in" in checked.stdout, checked.stdout
    ran = place.run_once()
    assert ran.returncode == os.EX_OK, ran.stderr
    [ready] = [line for line in ran.stderr.splitlines() if '"worker ready"' in line]
    assert json.loads(ready)["device"] == "cpu:0+cpu:1"
    assert place.sidecar("one.ppm")["caption"]["text"]
