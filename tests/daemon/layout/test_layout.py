"""The configuration applied to a machine: the precision of each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from daemon.layout.layout import resolve_models, weights_of
from daemon.layout.second_looks import resolve_looks
from daemon.system.gpus import Gpu
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
