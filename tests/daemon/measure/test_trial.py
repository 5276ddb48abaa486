"""One trial: how a rate is read from the times of sidecars, and real daemons with fake stages."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import load
from daemon.layout.profile import Trial, TunedSettings
from daemon.measure import meter
from daemon.measure.steady import measure_rate
from daemon.measure.trial import Bench, count_images
from daemon.system.gpus import Gpu
from tests.daemon_process import Place, picture
from tests.forked import TOKEN


@pytest.mark.parametrize(
    ("held", "rate", "images"),
    [(16, 1.0, 64), (16, 3.0, 120), (16, 5.0, 128), (16, 500.0, 5000), (1280, 700.0, 10240)],
    ids=["very slow", "slow", "rounds", "fast", "many workers"],
)
def test_a_measurement_is_long_enough_and_not_too_long(held: int, rate: float, images: int) -> None:
    assert count_images(held, rate, seconds=10) == images


def run_trial(
    tmp_path: Path,
    settings: TunedSettings,
    options: dict[str, Any],
    said: list[str] | None = None,
    devices: Sequence[str] = ("cpu",),
) -> Trial:
    place = Place(tmp_path, {"pipeline": {"stages": ["ocr"]}, "stages": {"ocr": {"options": options}}})
    sample = tmp_path / "sample"
    sample.mkdir()
    for number in range(5):
        (sample / f"{number}.ppm").write_bytes(picture(number))
    config = load(place.config)
    config.state.path.mkdir()
    bench = Bench(config, tmp_path, sorted(sample.iterdir()), devices, seconds=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, place.token)
        trial = bench.measure(settings, (said if said is not None else []).append)
    assert place.orphans() == []
    return trial


def one_stage(workers: int, batch: int) -> TunedSettings:
    return TunedSettings("replicated", workers, {"ocr": batch})


def test_a_trial_measures_the_latency_of_its_stage_and_processes_no_image_twice(tmp_path: Path) -> None:
    right = pytest.approx(50, rel=0.15)
    for number in range(3):  # a trial is wrong when another program takes the processor for a moment
        folder, said = tmp_path / str(number), list[str]()
        folder.mkdir()
        trial = run_trial(folder, one_stage(1, 8), {"latency_per_image_seconds": 0.02}, said)
        assert trial.failure == ""
        if trial.images_per_second == right:
            break
    assert trial.images_per_second == right
    measured = [file.stat().st_mtime for file in folder.glob("daemon/results/measured-*/*.json")]
    assert (trial.images_per_second, trial.slowest, trial.fastest) == pytest.approx(
        measure_rate(sorted(measured))
    )
    assert trial.slowest <= trial.images_per_second <= trial.fastest
    assert trial.host_bytes > 1 << 20
    assert (trial.gpu_bytes, trial.tensor_bytes) == (0, 0)
    assert list(trial.stage_seconds) == ["ocr"]
    assert any(text.startswith("loading models") or text == "starting" for text in said)
    assert any(text.endswith("of 32 images") for text in said)  # two rounds of two batches, to warm up
    # The daemon looks for changed files once a second, and all files are links to a few images.
    with contextlib.closing(sqlite3.connect(folder / "daemon" / "state" / "ledger.sqlite")) as ledger:
        assert ledger.execute("SELECT COUNT(*) FROM image").fetchone() == (32 + trial.images,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"unusable": "no such weights"}, "no such weights"),
        ({"fail": {"P6": "oom"}, "oom_above": 4}, "a batch did not fit into the GPU's memory"),
        ({"fail": {"P6": "exit"}}, "a worker was lost"),
        ({"fail": {"P6": "error"}}, "most of the images failed"),
    ],
)
def test_settings_that_do_not_work_are_a_failure_with_its_reason(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    trial = run_trial(tmp_path, one_stage(1, 8), options)
    assert reason in trial.failure
    assert trial.images_per_second == 0


def test_the_memory_of_a_worker_is_what_its_gpu_holds_more_than_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake GPU, of which a neighbor has 10 GiB; another GPU is not used."""
    used = itertools.chain([10], itertools.repeat(34))

    def list_gpus() -> list[Gpu]:
        now = next(used) << 30
        return [Gpu(index, "", "card", 80 << 30, 0, now * (1 + index), "9.0", None, ()) for index in (0, 1)]

    monkeypatch.setattr(meter, "list_gpus", list_gpus)
    trial = run_trial(tmp_path, one_stage(2, 2), {}, devices=["cuda:0"])
    assert trial.gpu_bytes == (34 - 10 << 30) // 2


def test_kernels_that_the_trial_compiles_are_kept_and_images_are_not(tmp_path: Path) -> None:
    place_kernels = tmp_path / "state" / "kernels"
    run_trial(tmp_path, one_stage(1, 2), {})
    (place_kernels / "compiled").touch()
    bench = Bench(
        load(tmp_path / "daemon.toml"), tmp_path, sorted((tmp_path / "sample").iterdir()), ["cpu"], 0.5
    )
    assert not bench.measure(one_stage(1, 2), lambda text: None).failure
    assert os.listdir(place_kernels) == ["compiled"]
    assert os.listdir(tmp_path / "inbox") == []
    assert {name for name in os.listdir(tmp_path) if name.startswith("done-")} == {
        "done-warm-up",
        "done-measured-0",
    }


def test_a_measurement_during_which_kernels_were_compiled_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0, 3, 3, 3])
    monkeypatch.setattr(Bench, "_count_kernels", lambda self: next(counts))
    run_trial(tmp_path, one_stage(1, 2), {})
    assert set(os.listdir(tmp_path / "daemon" / "results")) == {"warm-up", "measured-0", "measured-1"}
