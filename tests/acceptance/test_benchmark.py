"""`visiond bench` as a user runs it, with the small pack and a handful of images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from daemon.cli.bench import bench
from daemon.measure import scaling
from daemon.measure.job import Timings
from stages.contract.manifest import MANIFEST, Manifest, StageEntry, write_manifest
from tests.daemon_process import PATIENCE
from tests.forked import run_forked

pytestmark = pytest.mark.timeout(400)  # three processes load the models, one after another

COUNT = 4
OPTIONS = ["--pack", "mini", "--cold", "1", "--warm", "0", "--sample", "1", "--single", "2"]
STAGES = ["yolo", "clip"]  # to read the images would take longer than everything else
TWO_STAGES = ["--pipeline", f"stages = {STAGES}"]
NO_PAGE = ["--pipeline", "[page]", "--pipeline", 'listen = ""']  # its process is not measured here


def run_bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "daemon", "bench", "--folder", str(folder), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=350)


def refuse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bench", "--folder", str(folder), *options]
    return run_forked(command, folder, os.environ, folder / "output", PATIENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a benchmark has run."""
    folder = tmp_path_factory.mktemp("bench")
    reports = ["--json", "bench.json", "--plot", "bench.png"]
    ended = run_bench(folder, "--count", str(COUNT), *OPTIONS, *TWO_STAGES, *NO_PAGE, *reports)
    assert ended.returncode == 0, ended.stderr
    (folder / "told").write_text(ended.stdout)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "bench.json").read_bytes())
    return report


def test_the_ratio_is_of_the_daemon_to_one_image_at_a_time(report: dict[str, Any], folder: Path) -> None:
    [run], slow = report["runs"], report["one_at_a_time"]
    assert (run["cold"], slow["images"]) == (True, 1)
    assert report["images_per_second"] == run["images_per_second"] > 0
    assert report["ratio"] == pytest.approx(
        run["images_per_second"] * sum(slow["stage_seconds"].values()) / slow["images"]
    )
    assert f"{report['ratio']:.1f} times as fast as one image at a time" in (folder / "told").read_text()


def test_the_rate_counts_from_loaded_models_to_the_last_sidecar(report: dict[str, Any]) -> None:
    [run] = report["runs"]
    assert len(run["published_at"]) == COUNT
    assert 0 < run["load_seconds"] < run["published_at"][-1] <= run["wall_seconds"]
    assert run["images_per_second"] == pytest.approx(
        COUNT / (run["published_at"][-1] - run["load_seconds"]), rel=0.01
    )


def test_every_stage_has_its_seconds_both_ways(report: dict[str, Any]) -> None:
    [run], slow = report["runs"], report["one_at_a_time"]
    assert list(run["stage_seconds"]) == list(slow["stage_seconds"]) == STAGES
    assert all(seconds > 0 for seconds in [*run["stage_seconds"].values(), *slow["stage_seconds"].values()])


def test_workers_hold_the_models_and_the_daemon_does_not(report: dict[str, Any]) -> None:
    samples = report["runs"][0]["samples"]
    assert (
        max(sample["daemon_bytes"] for sample in samples)
        < 200 << 20
        < max(sample["workers_bytes"] for sample in samples)
    )


def test_a_single_image_takes_its_work_and_little_more(report: dict[str, Any]) -> None:
    single, work = report["single_image"], sum(report["runs"][0]["stage_seconds"].values())
    assert 0 < single["p50"] <= single["p95"] <= single["p99"]
    assert single["p50"] < 2 * work + 10  # seconds; the next scan would come after 30


def test_the_machine_and_the_command_are_reported(report: dict[str, Any]) -> None:
    assert report["command"][1:] == ["bench", "--folder", *report["command"][3:]]
    assert report["machine"]["cores"] > 0
    assert report["machine"]["torch"][0].isdigit()


def test_the_picture_can_be_looked_at(folder: Path) -> None:
    with Image.open(folder / "bench.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 2  # more than empty axes


def test_numbers_of_gpus_are_measured_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is the CPU. A fake stage is enough here, and the same images one at a time are measured above."""
    manifest = Manifest(name="fakes", notice="", stages={"yolo": StageEntry("fake", {})}, digests={})
    (tmp_path / "fakes").mkdir()
    write_manifest(tmp_path / "fakes" / MANIFEST, manifest)
    monkeypatch.setattr(scaling, "time_one_at_a_time", lambda *_: Timings(1, 2.5, {}))
    bench(
        folder=tmp_path,
        count=COUNT,
        pack=str(tmp_path / "fakes"),
        pipeline=['stages = ["yolo"]'],
        cold=0,
        warm=1,
        sample=1,
        gpus="0",
        json=tmp_path / "gpus.json",
    )
    [point] = json.loads((tmp_path / "gpus.json").read_bytes())["points"]
    assert (point["gpus"], point["placement"], point["images"], point["times"]) == (
        0,
        "replicated",
        COUNT,
        1.0,
    )
    assert point["least"] == point["whole"] == point["most"] > 0
    assert point["one_at_a_time"] == 2.5


def test_what_is_no_list_of_numbers_is_refused(tmp_path: Path) -> None:
    refused = refuse(tmp_path, "--gpus", "1,two")
    assert refused.returncode == 64
    assert "--gpus 1,two is not a list of numbers" in refused.stderr


def test_a_job_with_fewer_images_than_its_samples_is_refused(tmp_path: Path) -> None:
    refused = refuse(tmp_path, "--count", "10", "--sample", "10", "--single", "2")
    assert refused.returncode == 64
    assert "at least 11;" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [("--gpus", "1"), ("--models", "all")])
def test_a_second_look_is_not_dropped_by_a_measurement_that_has_none(
    tmp_path: Path, other: tuple[str, str]
) -> None:
    refused = refuse(tmp_path, "--second-look", "looks.toml", *other)
    assert refused.returncode == 64
    assert f"cannot be used together with {other[0]}" in " ".join(refused.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_several_second_looks_is_refused_with_its_brackets(tmp_path: Path) -> None:
    (tmp_path / "looks.toml").write_text("[[second_look]]\n[[second_look]]\n")
    refused = refuse(tmp_path, "--second-look", "looks.toml")
    assert refused.returncode == 64
    assert "has 2 [[second_look]] tables" in " ".join(refused.stderr.split())


def test_the_help_shows_the_brackets_of_a_table(tmp_path: Path) -> None:
    assert (
        "[[second_look]]"
        in run_forked(["bench", "--help"], tmp_path, os.environ, tmp_path / "o", PATIENCE).stdout
    )


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    refused = refuse(tmp_path, "--json", str(tmp_path / "missing" / "bench.json"))
    assert refused.returncode == 64
    assert "cannot write" in refused.stderr
    assert list(tmp_path.iterdir()) == []
