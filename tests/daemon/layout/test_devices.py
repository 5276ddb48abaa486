"""Which GPUs the names in the configuration mean."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from daemon.config.loading import Config, parse
from daemon.core.errors import ConfigError
from daemon.layout import layout
from daemon.layout.devices import ALLOCATORS, address_device, assume_gpus, select_devices, used_gpus
from daemon.layout.layout import Layout, digest_settings
from daemon.layout.placement import WORKER_BYTES
from daemon.maintenance import redo
from daemon.measure.explain import explain
from daemon.service.lifecycle import Service
from daemon.system import host
from daemon.system.children import descendants
from daemon.system.gpus import Gpu
from tests.daemon_process import Place, running, until

GIB = 1 << 30


def make_gpu(index: int, name: str, free: int = 70, part: int | None = None) -> Gpu:
    kind = "GPU" if part is None else f"MIG-{part}"
    uuid = f"{kind}-{index}f2e-77aa"
    return Gpu(index, uuid, name, 80 * GIB, free * GIB, (80 - free) * GIB, "9.0", None, (), part)


MIXED = [
    make_gpu(0, "NVIDIA H100 80GB HBM3"),
    make_gpu(1, "NVIDIA A100-SXM4-80GB", free=5),
    make_gpu(2, "NVIDIA H100 80GB HBM3", free=5),
    make_gpu(3, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", part=0),
    make_gpu(3, "NVIDIA A100-SXM4-80GB MIG 3g.40gb", part=1),
]


def config_of(**pipeline: Any) -> Config:
    return parse({"pipeline": pipeline}, Path("/srv"))


def select(*devices: str, gpus: list[Gpu] = MIXED, **pipeline: Any) -> list[str]:
    return select_devices(config_of(devices=list(devices), **pipeline), gpus).pipeline.devices


def problems(*devices: str, gpus: list[Gpu] = MIXED, **pipeline: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        select(*devices, gpus=gpus, **pipeline)
    return caught.value.problems


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("cpu", ["cpu"]),
        ("cuda", ["cuda:0"]),
        ("cuda:02", ["cuda:2"]),
        ("cuda:3:1", ["cuda:3:1"]),
        ("cuda:3", ["cuda:3:0", "cuda:3:1"]),  # divided: its MIG devices
        ("H100", ["cuda:0", "cuda:2"]),
        ("h100 80gb", ["cuda:0", "cuda:2"]),
        ("H10", ["cuda:0", "cuda:2"]),
        ("A100", ["cuda:1", "cuda:3:0", "cuda:3:1"]),
        ("MIG 1g.10gb", ["cuda:3:0"]),
        ("3g.40gb", ["cuda:3:1"]),
        ("GPU-2f2e-77aa", ["cuda:2"]),
        ("gpu-2F2", ["cuda:2"]),
        ("MIG-1-3f2e-77aa", ["cuda:3:1"]),
    ],
)
def test_a_name_means_these_gpus(name: str, devices: list[str]) -> None:
    assert select(name) == devices


def test_whole_words_of_a_name_come_first() -> None:
    gpus = [make_gpu(0, "NVIDIA A100-SXM4-80GB"), make_gpu(1, "NVIDIA A10")]
    assert select("A10", gpus=gpus) == ["cuda:1"]
    assert select("A1", gpus=gpus) == ["cuda:0", "cuda:1"]


def test_a_name_adds_no_gpu_twice_but_a_number_may_be_repeated() -> None:
    assert select("cuda:0", "H100") == ["cuda:0", "cuda:2"]
    assert select("cuda:0", "cuda:0") == ["cuda:0", "cuda:0"]


def test_all_gpus_are_used_if_none_is_named() -> None:
    assert select() == []
    assert len(used_gpus(config_of(), MIXED)) == len(MIXED)


def test_segments_are_resolved_likewise() -> None:
    stages = ["ocr", "yolo", "clip", "blip"]
    tables = [
        {"stages": stages[:1], "devices": ["H100"]},
        {"stages": stages[1:], "devices": ["MIG-1-3f"]},
    ]
    made = select_devices(config_of(segment=tables), MIXED)
    assert [table.devices for table in made.pipeline.segment] == [["cuda:0", "cuda:2"], ["cuda:3:1"]]
    tables[1]["devices"] = ["V100"]
    assert problems(segment=tables)[0].startswith(
        'pipeline.segment[1].devices: no GPU has "V100" in its name'
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("L4", 'no GPU has "L4" in its name'),
        ("cuda:7", "there is no cuda:7"),
        ("cuda:0:1", "there is no cuda:0:1"),
        ("GPU-abc", "there is no GPU with the UUID GPU-abc"),
    ],
)
def test_an_error_names_what_there_is_and_what_to_write(name: str, problem: str) -> None:
    there = (
        "there are cuda:0 (NVIDIA H100 80GB HBM3, GPU-0f2e-77aa). Write one of these names, or a part of it"
    )
    assert problems(name, gpus=MIXED[:1]) == [
        f"pipeline.devices: {problem}; {there}; `visiond gpus` lists them."
    ]


def test_without_a_gpu_the_error_says_so() -> None:
    assert problems("H100", gpus=[]) == [
        'pipeline.devices: no GPU has "H100" in its name; this machine has no GPU that NVIDIA\'s driver lists. '
        'Write "cpu" instead, or remove the key.'
    ]


def test_the_start_of_several_uuids_is_refused() -> None:
    [problem] = problems("MIG-")
    assert problem.startswith(
        "pipeline.devices: MIG- is the start of several UUIDs; write more of it: cuda:3:0 ("
    )


def test_gpus_with_too_little_free_memory_are_left_out() -> None:
    assert select(min_free_gpu_bytes="20GB") == ["cuda:0", "cuda:3:0", "cuda:3:1"]
    assert select("H100", min_free_gpu_bytes="20GB") == ["cuda:0"]
    assert select("cpu", "cuda:1", min_free_gpu_bytes="20GB") == ["cpu"]
    assert select("H100", min_free_gpu_bytes="5GB") == ["cuda:0", "cuda:2"]
    assert select(gpus=[], min_free_gpu_bytes="20GB") == []


def test_if_no_gpu_has_enough_memory_the_error_says_what_each_has() -> None:
    [problem] = problems("cuda:1", "cuda:2", min_free_gpu_bytes="20 GiB")
    assert problem.startswith(
        "pipeline.min_free_gpu_bytes: no GPU has 20,480 MiB free: cuda:1 (NVIDIA A100-SXM4-80GB) with 5,120 MiB free, "
        "cuda:2 (NVIDIA H100 80GB HBM3) with 5,120 MiB free. Set a smaller value"
    )


def test_gpus_are_selected_once() -> None:
    """A GPU that fills up later is still used."""
    selected = select_devices(config_of(min_free_gpu_bytes="20GB"), MIXED)
    later = [make_gpu(gpu.index, gpu.name, free=1, part=gpu.part) for gpu in MIXED]
    assert select_devices(selected, later) == selected


def test_a_gpu_that_is_not_there_is_assumed_for_kernels() -> None:
    assert assume_gpus(config_of(devices=["H100", "cpu"])).pipeline.devices == ["cuda:0", "cpu"]


def test_plan_names_the_gpus_in_use_and_says_which_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: MIXED)
    config = parse(Place(tmp_path).settings, tmp_path)
    pipeline = config.pipeline.model_copy(update={"devices": ["H100"], "min_free_gpu_bytes": 20 * GIB})
    told = explain(config.model_copy(update={"pipeline": pipeline})).sentences
    assert (
        "In use: cuda:0 (NVIDIA H100 80GB HBM3, GPU-0f2e-77aa); [pipeline] devices can choose GPUs by each of these "
        "names, and by part of the second."
    ) in told
    [reason] = [sentence for sentence in told if sentence.startswith("Reason: ")]
    assert reason.endswith(
        "not used, as min_free_gpu_bytes asks for more: cuda:2 (NVIDIA H100 80GB HBM3) with 5,120 MiB free."
    )


@pytest.mark.parametrize("free", [5, 70])
def test_a_gpu_that_is_left_out_for_its_memory_changes_no_dtype(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are found again by fingerprints, which include dtypes, and `visiond redo --stale` compares them."""
    old = dataclasses.replace(make_gpu(1, "Tesla T4", free=free), compute_capability="7.5")
    gpus = [make_gpu(0, "NVIDIA H100 80GB HBM3"), old]
    for module in (layout, redo):
        monkeypatch.setattr(module, "list_gpus", lambda: gpus)
    config = parse(Place(tmp_path, {"pipeline": {"min_free_gpu_bytes": "20GB"}}).settings, tmp_path)
    made = Layout.of(config)
    assert len(used_gpus(made.config, gpus)) == (2 if free > 20 else 1)
    assert {spec.dtype for spec in made.specs.values()} == {"float16"}
    reader = SimpleNamespace(newest_done=lambda **_: [], inboxes=dict)
    stale = redo.choose_stale(cast(Any, reader), config)
    assert stale.settings_digest == digest_settings(config, made.specs)


@pytest.mark.anyio
@pytest.mark.parametrize("executors", [1, 2])
async def test_a_worker_sees_only_its_mig_device(
    executors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a MIG device to a process in no other way."""
    monkeypatch.setattr(layout, "list_gpus", lambda: MIXED)
    pipeline = {"devices": ["MIG 1g.10gb", "H100"], "workers_per_device": 1, "executors": executors}
    place = Place(tmp_path, {"pipeline": pipeline})
    assert await list_visible(place) == ["GPU-0f2e-77aa", "GPU-2f2e-77aa", "MIG-0-3f2e-77aa"]


async def list_visible(place: Place) -> list[str]:
    """What each worker of a daemon in this process sees, sorted."""
    service = Service(parse(place.settings, place.folder))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        await until(lambda: service.loaded)
        seen = sorted(map(visible_to, running("daemon.workers.child", descendants(os.getpid()))))
        tasks.cancel_scope.cancel()
    return seen


def visible_to(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    [value] = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return value.decode()


def test_layout_has_only_devices_of_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: MIXED)
    config = parse(Place(tmp_path, {"pipeline": {"devices": ["3g.40gb", "cuda:3:0"]}}).settings, tmp_path)
    made = Layout.of(config)
    assert made.config.pipeline.devices == ["cuda:3:1", "cuda:3:0"]
    assert made.placement.segments[0].devices == ("cuda:3:1", "cuda:3:0")


def test_several_annotators_on_a_machine_share_its_cores_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, each with a GPU of its own, have together what one daemon has with both."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(host, "measure_free", lambda *_: 1 << 40)
    gpus = [make_gpu(0, "NVIDIA H100 80GB HBM3"), make_gpu(1, "NVIDIA H100 80GB HBM3")]
    config = parse(Place(tmp_path, {"pipeline": {"workers_per_device": 0}}).settings, tmp_path)

    def divide(*made: Layout) -> list[tuple[int, int]]:
        """The workers of each segment, and the decoders of each worker."""
        return [
            (len(segment.devices), each.set_up(segment, 0, 1 << 20)[0].decoders)
            for each in made
            for segment in each.placement.segments
        ]

    assert divide(Layout.of(config, gpus=gpus)) == [(6, 2)]
    assert divide(*(Layout.of(config, gpus=[gpu], sharers=2) for gpu in gpus)) == [(3, 2), (3, 2)]
    monkeypatch.setattr(host, "measure_free", lambda *_: 3 * WORKER_BYTES)
    assert divide(Layout.of(config, gpus=gpus[:1], sharers=2)) == [(1, 4)]


def test_a_gpus_memory_grows_in_one_segment_unless_the_user_has_settings_of_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    gpu = MIXED[0]
    assert address_device("cuda:0", [gpu], 1)[1]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in address_device("cpu", [gpu], 1)[1]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in address_device("cuda:0", [gpu], 1)[1]
