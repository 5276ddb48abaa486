from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.layout.devices import used_gpus
from daemon.layout.placement import (
    GPU_WORKERS,
    WORKER_BYTES,
    Batches,
    Placement,
    Segment,
    choose_batches,
    plan,
    share_out,
    size_groups,
    size_host_groups,
    working_bytes,
)
from daemon.layout.slabs import CPU_SLAB, GPU_SLAB, size_slab
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from stages.contract.base import StageSpec
from stages.registry.registry import ORDER

WEIGHTS = {"ocr": 1 << 30, "yolo": 1 << 20, "clip": 1 << 29, "blip": 1 << 30}
BATCHES = Batches(64, 64)
NEED = sum(WEIGHTS.values()) + working_bytes(BATCHES)


def make_gpus(*free_bytes: int) -> list[Gpu]:
    return [
        Gpu(index, f"GPU-{index}", f"card {index}", 2 * free, free, free, "9.0", None, ())
        for index, free in enumerate(free_bytes)
    ]


LARGE = GPU_WORKERS * NEED
MANY = 1000  # cores
VAST = 1 << 50  # bytes of the host's memory


def place(
    *gpus: Gpu,
    cores: int = MANY,
    memory: int = VAST,
    weights: dict[str, int] = WEIGHTS,
    batches: Batches = BATCHES,
    **pipeline: Any,
) -> Placement:
    return plan(parse({"pipeline": pipeline}, Path("/srv")), gpus, weights, Host(cores, memory), batches)


def test_without_a_gpu_one_worker_on_the_cpu_holds_all_stages() -> None:
    placement = place()
    assert placement.segments == (Segment(ORDER, ("cpu",)),)
    assert placement.why.startswith("no GPU")


def test_replicated_is_one_segment_on_every_device() -> None:
    placement = place(*make_gpus(LARGE, LARGE), placement="replicated", workers_per_device=1)
    assert placement.segments == (Segment(ORDER, ("cuda:0", "cuda:1")),)
    assert placement.why == 'placement = "replicated"; workers: 1 on cuda:0, 1 on cuda:1'


def test_workers_of_a_device_are_spread_over_the_devices() -> None:
    [segment] = place(*make_gpus(LARGE, LARGE), workers_per_device=2).segments
    assert segment.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")


def test_only_the_devices_asked_for_are_used() -> None:
    [segment] = place(*make_gpus(NEED, LARGE, NEED), devices=["cuda:1"]).segments
    assert set(segment.devices) == {"cuda:1"}
    assert len(segment.devices) == GPU_WORKERS


def test_a_device_has_one_name_however_it_is_written() -> None:
    gpus = make_gpus(LARGE, LARGE)
    assert place(*gpus, devices=["cuda", "cuda:01"]) == place(*gpus, devices=["cuda:0", "cuda:1"])
    assert place(*gpus, devices=["cpu:0"]) == place(*gpus, devices=["cpu"])
    assert place(*make_gpus(NEED - 1), devices=["cuda"]) == place(*make_gpus(NEED - 1))


def test_a_cpu_has_one_worker_however_many_a_gpu_has() -> None:
    placement = place(*make_gpus(LARGE), devices=["cuda:0", "cpu"])
    assert Counter(placement.segments[0].devices) == {"cuda:0": GPU_WORKERS, "cpu": 1}
    assert placement.why == f"every GPU has memory for all stages; workers: {GPU_WORKERS} on cuda:0, 1 on cpu"
    [asked_for] = place(*make_gpus(LARGE), devices=["cuda:0", "cpu"], workers_per_device=2).segments
    assert asked_for.devices == ("cuda:0", "cpu") * 2


def test_the_reason_for_a_placement_mentions_no_memory_that_was_not_checked() -> None:
    placement = place(*make_gpus(LARGE), devices=["cpu"])
    assert placement == Placement(
        (Segment(ORDER, ("cpu",)),), "no GPU is used; the CPU holds all stages; workers: 1 on cpu"
    )


@pytest.mark.parametrize(
    ("free", "cores", "memory", "workers"),
    [
        (LARGE, MANY, VAST, GPU_WORKERS),
        (100 * LARGE, MANY, VAST, GPU_WORKERS),
        (2 * NEED, MANY, VAST, 2),
        (3 * NEED - 1, MANY, VAST, 2),
        (LARGE, 8, VAST, 6),
        (LARGE, 4, VAST, 3),
        (LARGE, 3, VAST, 2),
        (LARGE, 1, VAST, 1),
        (LARGE, MANY, 4 * WORKER_BYTES - 1, 3),
        (LARGE, MANY, 0, 1),
        (NEED - 1, MANY, VAST, 1),
    ],
)
def test_memory_and_cores_bound_the_workers_on_a_gpu(
    free: int, cores: int, memory: int, workers: int
) -> None:
    [segment] = place(*make_gpus(free), cores=cores, memory=memory).segments
    assert segment.devices == ("cuda:0",) * workers


@pytest.mark.parametrize(("mebibytes", "workers"), [(24_000, 4), (16_000, 3)])
def test_a_card_with_little_memory_has_the_workers_that_were_measured(mebibytes: int, workers: int) -> None:
    weights = {"ocr": 40 << 20, "yolo": 10 << 20, "clip": 300 << 20, "blip": 620 << 20}
    gpus = make_gpus(mebibytes << 20)
    [segment] = place(*gpus, weights=weights, batches=choose_batches(gpus, "throughput")).segments
    assert len(segment.devices) == workers


@pytest.mark.parametrize(
    ("gibibytes", "batches"),
    [
        (141, Batches(128, 128)),
        (80, Batches(128, 128)),
        (24, Batches(64, 64)),
        (16, Batches(64, 32)),
        (9.5, Batches(32, 32)),
        (5, Batches(64, 32)),
        (4, Batches(16, 16)),
        (2, Batches(8, 8)),
    ],
)
def test_batches_leave_room_for_workers(gibibytes: float, batches: Batches) -> None:
    assert choose_batches(make_gpus(int(gibibytes * 2**30)), "throughput") == batches


def test_a_gpu_with_little_memory_does_not_make_batches_smaller_than_it_must() -> None:
    """Others may use most of a large GPU."""
    large = 200 << 30
    assert choose_batches(make_gpus(large, int(9.5 * 2**30)), "throughput") == Batches(64, 64)
    assert choose_batches(make_gpus(large, 5 << 30), "throughput") == Batches(64, 32)
    assert choose_batches(make_gpus(large, 2 << 30), "throughput") == Batches(8, 8)


def spec(name: str, batch_size: int) -> StageSpec:
    return StageSpec(name=name, backend="fake", fingerprint="", batch_size=batch_size)


def test_only_stages_that_take_memory_have_the_smaller_batches() -> None:
    batches = Batches(64, 32)
    sizes = {name: batches.of_stage(name) for name in ("ocr", "yolo", "clip", "blip")}
    assert sizes == {"ocr": 64, "yolo": 32, "clip": 64, "blip": 32}
    assert Batches.of([spec(name, size) for name, size in sizes.items()]) == batches
    assert Batches.of([spec("clip", 64)]) == Batches(64, 0)


def test_smaller_batches_of_these_stages_save_memory() -> None:
    full, smaller, small = map(working_bytes, (Batches(64, 64), Batches(64, 32), Batches(32, 32)))
    assert small < smaller < full
    assert full - smaller > smaller - small


@pytest.mark.parametrize(
    ("pipeline", "used"),
    [
        ({}, [0, 1]),
        ({"devices": ["cuda:1"]}, [1]),
        ({"devices": ["cuda"]}, [0]),
        ({"devices": ["cpu"]}, []),
        ({"devices": ["cuda:0", "cpu"]}, []),
        ({"devices": ["cuda:1", "cpu:0"]}, []),
        ({"segment": [{"stages": list(ORDER), "devices": ["cuda:1"]}]}, [1]),
        ({"segment": [{"stages": list(ORDER), "devices": ["cuda"]}]}, [0]),
    ],
)
def test_only_gpus_that_are_used_decide_about_batches_and_shared_memory(
    pipeline: dict[str, Any], used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 2 * GPU_SLAB)
    config, gpus = parse({"pipeline": pipeline}, Path("/srv")), make_gpus(LARGE, 1 << 30)
    assert [gpu.index for gpu in used_gpus(config, gpus)] == used
    assert size_slab(config, gpus) == (len(used) * GPU_SLAB or CPU_SLAB)


def set_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(Host, "here", lambda: Host(16, free_bytes))


@pytest.mark.parametrize(
    ("free_gib", "gpus", "slab_gib"),
    [(4, 1, 1), (4, 4, 4), (64, 1, 8), (128, 1, 12), (128, 4, 16), (512, 4, 48)],
)
def test_shared_memory_is_an_eighth_of_what_is_free_within_bounds_for_each_gpu(
    free_gib: int, gpus: int, slab_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, free_gib << 30)
    assert size_slab(parse({}, Path("/srv")), make_gpus(*[LARGE] * gpus)) == slab_gib << 30
    configured = parse({"pipeline": {"slab_bytes": "2 GiB"}}, Path("/srv"))
    assert size_slab(configured, make_gpus(*[LARGE] * gpus)) == 2 << 30


def test_more_pixels_are_decoded_at_once_where_the_memory_of_all_threads_allows_it() -> None:
    large, small = make_gpus(140_000_000_000, 12_000_000_000)
    assert size_groups([large], 10) == 875_000_000
    assert size_groups([large], 2) == 5 * size_groups([large], 10)
    assert size_groups([large, small], 10) == size_groups([small], 10) == size_groups([], 1) == 200_000_000
    assert size_host_groups(Host(16, 120_000_000_000), 10) == 500_000_000
    assert size_host_groups(Host(4, 16_000_000_000), 6) == 200_000_000


def count_by(spread: str, *gpus: Gpu, **host: Any) -> dict[str, int]:
    return Counter(place(*gpus, spread=spread, **host).segments[0].devices)


def test_each_gpu_has_the_workers_that_its_own_memory_allows_and_its_share_of_the_host() -> None:
    unequal = make_gpus(LARGE, 2 * NEED, NEED)
    assert count_by("memory-aware", *unequal) == {"cuda:0": GPU_WORKERS, "cuda:1": 2, "cuda:2": 1}
    assert place(*unequal).why.endswith(f"workers: {GPU_WORKERS} on cuda:0, 2 on cuda:1, 1 on cuda:2")
    assert place(*unequal).limit == f"each worker needs {NEED >> 20:,} MiB of GPU memory"
    assert len(place(*make_gpus(LARGE, LARGE), memory=4 * WORKER_BYTES).segments[0].devices) == 2 * 2
    assert len(place(*make_gpus(LARGE, LARGE), cores=6).segments[0].devices) == 2 * 2


def test_round_robin_starts_as_many_workers_on_each_gpu() -> None:
    assert count_by("round-robin", *make_gpus(LARGE, 2 * NEED)) == {"cuda:0": 2, "cuda:1": 2}
    assert place(*make_gpus(LARGE, 2 * NEED), spread="round-robin").why.endswith(
        '2 on cuda:0, 2 on cuda:1, by spread = "round-robin"'
    )


def test_fill_first_fills_one_gpu_before_the_next_and_leaves_the_last_ones_free() -> None:
    gpus = make_gpus(3 * NEED, LARGE, LARGE, LARGE)
    assert count_by("fill-first", *gpus, cores=11) == {"cuda:0": 3, "cuda:1": 5}
    assert count_by("fill-first", *gpus) == {"cuda:0": 3} | dict.fromkeys(
        ["cuda:1", "cuda:2", "cuda:3"], GPU_WORKERS
    )
    held = place(*gpus, spread="fill-first", cores=6, devices=["cuda", "cpu"])
    assert Counter(held.segments[0].devices)["cpu"] == 1


def test_a_number_of_workers_that_is_set_is_that_of_each_gpu_however_they_are_spread() -> None:
    for spread in ("memory-aware", "round-robin", "fill-first"):
        [segment] = place(*make_gpus(LARGE, NEED), spread=spread, workers_per_device=2).segments
        assert segment.devices == ("cuda:0", "cuda:1") * 2


def test_auto_replicates_where_the_memory_suffices() -> None:
    placement = place(*make_gpus(NEED, NEED))
    assert placement.segments == (Segment(ORDER, ("cuda:0", "cuda:1")),)
    assert placement.why.startswith("every device has memory for all stages")


def test_auto_spreads_the_stages_if_a_gpu_is_too_small_and_names_it() -> None:
    placement = place(*make_gpus(LARGE, NEED - 1))
    assert len(placement.segments) == 2
    assert placement.why == f"all stages need {NEED >> 20} MiB, more than is free on card 1"


def test_a_single_gpu_that_is_too_small_is_not_reported_as_large_enough() -> None:
    assert "every device has memory" not in place(*make_gpus(NEED - 1)).why


def test_a_small_gpu_that_is_not_used_does_not_matter() -> None:
    placement = place(*make_gpus(LARGE, 0, LARGE), devices=["cuda:0", "cuda:2"])
    assert len(placement.segments) == 1


@pytest.mark.parametrize("count", range(1, 9))
def test_pipelined_runs_every_stage_once_in_order_and_uses_every_device_once(count: int) -> None:
    segments = place(*make_gpus(*[LARGE] * count), placement="pipelined", workers_per_device=1).segments
    assert tuple(stage for segment in segments for stage in segment.stages) == ORDER
    assert [device for segment in segments for device in segment.devices] == [
        f"cuda:{index}" for index in range(count)
    ]
    assert min(2, count) <= len(segments) <= len(ORDER)


def test_where_memory_is_scarce_a_device_holds_as_few_stages_as_possible() -> None:
    assert [segment.stages for segment in place(*make_gpus(*[NEED - 1] * 4)).segments] == [
        (stage,) for stage in ORDER
    ]


def test_the_stages_are_cut_where_the_dearest_run_is_cheapest() -> None:
    segments = place(*make_gpus(LARGE, LARGE), placement="pipelined").segments
    assert [segment.stages for segment in segments] == [("ocr",), ("yolo", "clip", "blip")]


def test_further_devices_go_to_the_dearest_run_for_its_devices() -> None:
    """ocr costs 0.60 and the others 0.40 of an image's time. With a device for each of them the rate would be
    that of one interpreter; with two runs there can be several executors."""
    shares = {
        count: [
            len(set(segment.devices))
            for segment in place(*make_gpus(*[LARGE] * count), placement="pipelined").segments
        ]
        for count in (3, 4, 5, 6, 7, 8)
    }
    assert shares == {3: [2, 1], 4: [2, 2], 5: [3, 2], 6: [4, 2], 7: [4, 3], 8: [5, 3]}


def test_measured_costs_decide_where_the_stages_are_cut() -> None:
    costs = {"ocr": 0.1, "yolo": 0.1, "clip": 0.1, "blip": 0.7}
    config = parse({"pipeline": {"placement": "pipelined"}}, Path("/srv"))
    found = plan(config, make_gpus(LARGE, LARGE), WEIGHTS, Host(MANY, VAST), BATCHES, costs)
    assert [segment.stages for segment in found.segments] == [("ocr", "yolo", "clip"), ("blip",)]
    assert found.costs == costs


def test_pipelined_starts_as_many_workers_on_each_device_as_are_asked_for() -> None:
    segments = place(*make_gpus(LARGE, LARGE), placement="pipelined", workers_per_device=2).segments
    assert [segment.devices for segment in segments] == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]


def test_pipelined_starts_as_many_workers_on_each_device_as_its_run_has_memory_for() -> None:
    """One interpreter does not keep a GPU busy, whatever stages it has."""
    of_ocr, of_rest = (
        sum(WEIGHTS[stage] for stage in stages) + working_bytes(BATCHES)
        for stages in (["ocr"], ["yolo", "clip", "blip"])
    )
    placement = place(*make_gpus(4 * of_ocr, 3 * of_rest + 1), placement="pipelined")
    assert [segment.devices for segment in placement.segments] == [("cuda:0",) * 4, ("cuda:1",) * 3]
    assert placement.limit == f"each worker needs {of_rest >> 20:,} MiB of GPU memory"


def test_the_devices_of_a_pipelined_placement_share_the_host() -> None:
    gpus = make_gpus(LARGE, LARGE)
    few_cores = place(*gpus, placement="pipelined", cores=6)
    little_memory = place(*gpus, placement="pipelined", memory=2 * 2 * WORKER_BYTES)
    assert [len(segment.devices) for segment in few_cores.segments] == [2, 2]
    assert [len(segment.devices) for segment in little_memory.segments] == [2, 2]


def test_where_no_memory_is_left_for_a_run_it_has_one_worker() -> None:
    segments = place(*make_gpus(1, 1)).segments
    assert [segment.devices for segment in segments] == [("cuda:0",), ("cuda:1",)]


def test_a_pipelined_placement_on_the_cpu_has_one_worker_for_each_run() -> None:
    placement = place(placement="pipelined", devices=["cpu", "cpu"])
    assert [segment.devices for segment in placement.segments] == [("cpu",), ("cpu",)]


def test_a_part_of_the_stages_is_spread_likewise() -> None:
    segments = place(*make_gpus(LARGE, LARGE, LARGE), placement="pipelined", stages=["ocr", "clip"]).segments
    assert [(segment.stages, len(set(segment.devices))) for segment in segments] == [
        (("ocr",), 2),
        (("clip",), 1),
    ]


def test_explicit_segments_are_used_unchanged() -> None:
    tables = [
        {"stages": ["ocr"], "devices": ["cuda:1", "cuda:0"], "workers_per_device": 2},
        {"stages": ["yolo", "clip", "blip"], "devices": ["cpu"]},
    ]
    assert place(*make_gpus(0), segment=tables, placement="replicated") == Placement(
        (
            Segment(("ocr",), ("cuda:1", "cuda:0", "cuda:1", "cuda:0")),
            Segment(("yolo", "clip", "blip"), ("cpu",)),
        ),
        "set by the [[pipeline.segment]] tables",
    )


@pytest.mark.parametrize(
    ("devices", "executors", "parts"),
    [
        ("abab", 0, ["abab"]),
        ("abcabc", 0, ["aa", "bb", "cc"]),
        ("abab", 2, ["aa", "bb"]),
        ("abab", 1, ["abab"]),
        ("abcabc", 2, ["acac", "bb"]),
        ("aa", 4, ["a", "a"]),
        ("a", 0, ["a"]),
    ],
)
def test_the_workers_of_a_gpu_are_in_one_executor(devices: str, executors: int, parts: list[str]) -> None:
    placement = Placement((Segment(tuple(ORDER), tuple(devices)),), "")
    shares = share_out(placement, executors)
    assert ["".join(devices[number] for number in part[0]) for part in shares] == parts
    assert sorted(number for part in shares for number in part[0]) == list(range(len(devices)))


OCR, REST = ("ocr",), ("yolo", "clip", "blip")


def share_pipelined(ocr: str, rest: str, executors: int = 0) -> list[tuple[str, str]]:
    """For each executor, the devices of its workers."""
    placement = Placement((Segment(OCR, tuple(ocr)), Segment(REST, tuple(rest))), "")
    shares = share_out(placement, executors)
    for segment, devices in enumerate((ocr, rest)):
        assert sorted(n for part in shares for n in part[segment]) == list(range(len(devices)))
    return [("".join(ocr[n] for n in a), "".join(rest[n] for n in b)) for a, b in shares]


@pytest.mark.parametrize(
    ("ocr", "rest", "executors", "parts"),
    [
        ("a", "b", 0, [("a", "b")]),
        ("ab", "c", 0, [("ab", "c")]),
        ("ab", "c", 3, [("ab", "c")]),  # each needs a worker of each segment
        ("ab", "cd", 0, [("a", "c"), ("b", "d")]),
        ("ab", "cd", 1, [("ab", "cd")]),
        ("abc", "def", 2, [("ac", "df"), ("b", "e")]),
        ("aabb", "ccdd", 0, [("aa", "cc"), ("bb", "dd")]),
        ("abcde", "fgh", 0, [("ad", "f"), ("be", "g"), ("c", "h")]),
        ("aa", "bb", 0, [("aa", "bb")]),  # a device's workers stay together
        ("aa", "bb", 2, [("a", "b"), ("a", "b")]),  # unless more executors are asked for
    ],
)
def test_each_executor_of_a_pipelined_placement_has_devices_for_all_stages(
    ocr: str, rest: str, executors: int, parts: list[tuple[str, str]]
) -> None:
    assert share_pipelined(ocr, rest, executors) == parts
