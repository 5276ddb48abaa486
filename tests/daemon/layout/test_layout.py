"""The configuration applied to a machine: the precision of each model, and what it prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from daemon.layout.layout import Layout
from daemon.layout.models import resolve_models, weights_of
from daemon.layout.second_looks import resolve_looks
from daemon.system.gpus import Gpu
from daemon.system.host import Host
from stages.contract.base import StageSpec
from tests.stages import readers

GIB = 1 << 30


def make_gpu(capability: str) -> Gpu:
    return Gpu(0, "GPU-0", "card", 80 * GIB, 80 * GIB, 0, capability, None, ())


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    readers.READERS["glm_ocr"](folder := tmp_path_factory.mktemp("models") / "reader")
    return folder


def find_dtypes(gpus: list[Gpu], folder: Path, **tables: Any) -> dict[str, str]:
    """By stage or look."""
    config = parse({"models": {"folder": str(folder / "models")}, **tables}, folder)
    specs = resolve_models(config, gpus)
    return {name: spec.dtype for name, spec in (specs | resolve_looks(config, gpus, specs)).items()}


@pytest.mark.parametrize(
    ("gpus", "dtypes", "page"),
    [
        ([make_gpu("9.0")], ["float16", "float16", "bfloat16", "bfloat16"], "bfloat16"),
        ([make_gpu("7.5")], ["float16"] * 4, "float16"),
        ([], ["float32"] * 4, "float32"),
    ],
)
def test_each_model_has_the_half_precision_of_its_backend(
    gpus: list[Gpu], dtypes: list[str], page: str, reader: Path, tmp_path: Path
) -> None:
    look = {"name": "page", "when": "A", "stage": "ocr", "model": str(reader)}
    found = find_dtypes(gpus, tmp_path, second_look=[look])
    assert found == dict(zip(("ocr", "yolo", "clip", "blip"), dtypes, strict=True)) | {"page": page}


def test_a_configured_precision_is_kept(reader: Path, tmp_path: Path) -> None:
    table = {"model": str(reader), "dtype": "float32"}
    found = find_dtypes([make_gpu("9.0")], tmp_path, stages={"ocr": table})
    assert (found["ocr"], found["yolo"]) == ("float32", "float16")


def test_hashes_are_those_of_the_same_model_on_every_device(tmp_path: Path) -> None:
    """Else all hashes would be outdated after a move from a CPU to a GPU."""
    config = parse({"pipeline": {"stages": ["ocr", "hash"]}}, tmp_path)
    machines: list[list[Gpu]] = [[], [make_gpu("7.5")], [make_gpu("9.0")]]
    on_each = [resolve_models(config, gpus) for gpus in machines]
    assert len({specs["hash"].fingerprint for specs in on_each}) == 1
    assert len({specs["ocr"].fingerprint for specs in on_each}) == 2


@pytest.mark.parametrize("dtype", ["float16", "half", "float32"])
def test_another_precision_of_a_stage_that_has_only_one_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"stages": {"hash": {"dtype": dtype}}}, tmp_path)
    assert caught.value.problems == [
        "stages.hash.dtype: hash computes in float64 on every device; remove dtype from [stages.hash]."
    ]


def test_smaller_weights_count_as_a_part_of_their_files(reader: Path) -> None:
    """Otherwise a model that fits would be spread over GPUs."""
    files = {"model": str(reader)}
    specs = [
        StageSpec(name=dtype, backend="reader", files=files, dtype=dtype)
        for dtype in ("bfloat16", "int8", "int4")
    ]
    whole, *small = weights_of(specs).values()
    assert [size / whole for size in small] == pytest.approx([0.5, 0.3], rel=1e-4)


def find_settings(folder: Path, pipeline: dict[str, Any], **ocr: int) -> dict[str, Any]:
    """Of the worker, on an H100, of a daemon with fake stages."""
    stages: dict[str, dict[str, Any]] = {
        name: {"backend": "fake"} for name in ("ocr", "yolo", "clip", "blip")
    }
    stages["ocr"] |= ocr
    made = Layout.of(parse({"pipeline": pipeline, "stages": stages}, folder), gpus=[make_gpu("9.0")])
    [segment] = made.placement.segments
    setup, _ = made.set_up(segment, 0, 1 << 20)
    return {
        "workers": len(segment.devices),
        "threads": setup.threads,
        "batches": [spec.batch_size for spec in setup.stages],
        "single": {spec.single for spec in setup.stages},
    }


@pytest.mark.parametrize("pipeline", [{}, {"prefer": "throughput"}])
def test_by_default_a_gpu_has_several_workers_with_large_batches(
    pipeline: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "here", lambda *_: Host(cores=16, free_bytes=100 * GIB))
    settings = {"workers": 8, "threads": 2, "batches": [128] * 4, "single": {False}}
    assert find_settings(tmp_path, pipeline) == settings


def test_for_latency_a_device_has_one_worker_with_one_small_batch_at_a_time(tmp_path: Path) -> None:
    settings = {"workers": 1, "threads": 1, "batches": [8] * 4, "single": {True}}
    assert find_settings(tmp_path, {"prefer": "latency"}) == settings


def test_what_is_set_beside_a_preference_wins(tmp_path: Path) -> None:
    settings = {"workers": 3, "threads": 2, "batches": [32, 8, 8, 8], "single": {True}}
    pipeline = {"prefer": "latency", "workers_per_device": 3, "threads_per_worker": 2}
    assert find_settings(tmp_path, pipeline, batch_size=32) == settings
