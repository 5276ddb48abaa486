"""The rates of models alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.measure import alone, models
from daemon.measure.models import RateRequest, find_specs, measure_models
from daemon.measure.place import Place
from stages.contract.base import Image, StageSpec
from tests.daemon_process import Place as Daemon
from tests.stages import checkpoints
from tests.stages.pictures import draw_image


def measure_fake(monkeypatch: pytest.MonkeyPatch, **options: object) -> models.Measurement:
    """A fake stage with these options, at batches of 1, 2 and 4."""
    images: list[Image] = [draw_image(8, 8, 0)] * 2
    monkeypatch.setattr(alone, "read_batches", lambda *_: iter([images]))
    spec = StageSpec(name="yolo", backend="fake", options=options)
    return alone.measure(RateRequest(spec, "cpu", ["a.jpg", "b.jpg"], (1, 2, 4), 0.05))


@pytest.mark.parametrize(
    ("rates", "sizes"), [([10, 10.2, 99], [1, 2]), ([10, 15, 20], [1, 2, 4]), ([10, 9, 99], [1, 2])]
)
def test_no_larger_batch_is_tried_once_one_is_hardly_faster(
    rates: list[float], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(rates)
    monkeypatch.setattr(alone, "time_stage", lambda *_: next(found))
    measured = measure_fake(monkeypatch)
    assert [rate.batch_size for rate in measured.rates] == sizes
    assert measured.best
    assert measured.best.images_per_second == max(rates[: len(sizes)])


def test_a_rate_is_that_of_images_and_not_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(images: Sequence[Image]) -> list[None]:
        now[0] += 0.5
        return [None] * len(images)

    monkeypatch.setattr(alone, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    stage: Any = SimpleNamespace(run=run)
    assert alone.time_stage(stage, [draw_image(8, 8, 0)] * 3, seconds=2.0) == 6.0


def test_a_model_that_cannot_be_loaded_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_fake(monkeypatch, unusable="no such weights")
    assert (found.rates, found.problem) == ([], "no such weights")


def test_all_models_are_those_of_the_folder_and_of_libraries(tmp_path: Path) -> None:
    found = [(name, spec.name) for name, spec in find_specs(["all"], tmp_path, "float32")]
    assert found == [("mini", "yolo"), ("mini", "clip"), ("mini", "blip"), ("ppocr", "ocr")]


def test_a_model_is_measured_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "IMAGES", 2)
    monkeypatch.setattr(models, "CPU_BATCHES", (2,))
    checkpoints.TOWERS["clip"](folder := tmp_path / "own")
    said: list[str] = []
    report = measure_models(Place(tmp_path), [str(folder)], tmp_path, seconds=0.01, progress=said.append)
    [model] = report.models
    assert said == [f"1 of 1: {folder}, clip"]
    assert (model.stage, model.backend, model.dtype) == ("clip", "transformers", "float32")
    assert model.measurement.best
    assert model.measurement.best.images_per_second > 0
    assert model.measurement.memory_bytes > 100e6
    assert model.file_bytes >= (folder / "model.safetensors").stat().st_size


def test_a_name_that_no_model_has_is_refused(tmp_path: Path) -> None:
    refused = Daemon(tmp_path).command("bench", "--folder", tmp_path / "bench", "--models", "rf-detr-smal")
    assert refused.returncode == os.EX_CONFIG
    assert 'did you mean "rf-detr-small"?' in refused.stderr.replace("\n", " ")
