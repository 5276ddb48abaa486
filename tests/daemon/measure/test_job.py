"""What a benchmark keeps for the next run, and what it removes. tests/acceptance/test_benchmark.py runs one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import typer

from daemon.cli.bench import bench, read_table
from daemon.config.loading import load, parse
from daemon.core.errors import VisiondError
from daemon.measure.ceiling import measure_ceiling
from daemon.measure.job import Percentiles, Run, run_job
from daemon.measure.meter import LoadSample
from daemon.measure.place import Place, Report, make_once
from daemon.measure.report import print_quarters
from daemon.measure.steady import Steady
from daemon.measure.throwaway import Throwaway
from daemon.server.control import find_snapshot
from tests.daemon_process import Place as FakePlace
from tests.daemon_process import picture, wait_for
from tests.makers import tree


@pytest.mark.parametrize(("cold", "left"), [(False, ["kernels"]), (True, [])])
def test_a_run_finds_no_results_and_compiled_kernels_only_when_warm(
    tmp_path: Path, cold: bool, left: list[str]
) -> None:
    place = Place(tmp_path, "mini")
    for file in ("state/ledger.sqlite", "state/kernels/a.cubin", "results/a.jpg.json"):
        (place.daemon_folder / file).parent.mkdir(parents=True, exist_ok=True)
        (place.daemon_folder / file).touch()
    place.prepare(tmp_path / "images", cold=cold)
    assert [path.name for path in (place.daemon_folder / "state").iterdir()] == left
    assert not (place.daemon_folder / "results").exists()


def test_weights_are_named_as_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Place(tmp_path, "mini").pack == "mini"
    assert Place(tmp_path, "./mine").pack == str(tmp_path / "mine")
    assert Place(tmp_path).pack == str(tmp_path / "pack")


def test_lines_for_the_pipeline_reach_the_daemon(tmp_path: Path) -> None:
    config = Place(tmp_path, "mini", ["workers_per_device = 2", "threads_per_worker = 3"]).prepare(
        tmp_path / 'a"b'
    )
    assert (config.pipeline.workers_per_device, config.pipeline.threads_per_worker) == (2, 3)
    assert config.inbox[0].path == tmp_path / 'a"b'


def test_an_incomplete_folder_is_made_again_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "a").touch()
        if len(made) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "images", make)
    assert not (tmp_path / "images").exists()
    for _ in range(2):
        assert [path.name for path in make_once(tmp_path / "images", make).iterdir()] == ["a"]
    assert len(made) == 2


def test_percentiles_lie_among_what_was_measured() -> None:
    assert Percentiles.of([number / 100 for number in range(101)]) == Percentiles(0.5, 0.95, 0.99)


def test_workers_are_fed_from_memory(tmp_path: Path) -> None:
    place = FakePlace(tmp_path)
    place.drop_many(range(200))
    config = parse(place.settings, tmp_path)
    images = sorted(place.inbox().iterdir())
    assert measure_ceiling(config, images, 0.5) > 0
    # Nothing is written.
    assert tree(tmp_path).keys() == {f"inbox/{image.name}" for image in images} | {"daemon.toml"}


def test_images_that_the_workers_fail_on_from_memory_are_reported(tmp_path: Path) -> None:
    place = FakePlace(tmp_path, {"stages": {"ocr": {"options": {"fail": {"RAISE": "raise"}}}}})
    place.drop("a.ppm", picture(1, b"RAISE"))
    with pytest.raises(VisiondError, match="failed on 1 images fed from memory"):
        measure_ceiling(parse(place.settings, tmp_path), [place.inbox() / "a.ppm"], 0.5)


LOOK = """
[[second_look]]
name = "every"
when = "tests.daemon.measure.test_job:every"
stage = "ocr"
backend = "fake"
options = { salt = 7 }
"""
FAKE = ['stages = ["ocr"]', "[stages.ocr]", 'backend = "fake"']


def every(record: dict[str, Any]) -> bool:
    return not record["path"].startswith("00")


def test_second_looks_are_measured_apart_from_first_ones(tmp_path: Path) -> None:
    inbox = tmp_path / "images"
    inbox.mkdir()
    for number in range(10, 14):
        for name in (f"00-{number}.ppm", f"{number}.ppm"):
            (inbox / name).write_bytes(picture(number + 50 * name.startswith("00")))
    run = run_job(Place(tmp_path / "bench", "mini", FAKE, LOOK), inbox, cold=False)
    [look] = run.second_looks
    assert (look.name, look.stage, look.images, look.failed, len(run.published_at)) == (
        "every",
        "ocr",
        4,
        0,
        8,
    )
    assert look.images_per_second > 0 < run.images_per_second
    assert run.stage_seconds.keys() == {"ocr"}


def test_a_daemon_whose_measurement_is_interrupted_does_not_say_how_to_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hang = {"ocr": {"options": {"fail": {"HANG": "hang"}}}}
    place = FakePlace(tmp_path, {"stages": hang, "pipeline": {"drain_seconds": 0.1}})
    place.drop("a.ppm", picture(1, b"HANG"))
    config = load(place.config)
    with contextlib.suppress(KeyboardInterrupt), Throwaway(config, place.config, "--once"):
        wait_for(lambda: (state := find_snapshot(config)) and state.in_flight, "the image in a worker")
        raise KeyboardInterrupt
    assert "Stopped" not in capfd.readouterr().err


def test_an_interrupted_benchmark_says_that_it_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr("daemon.cli.bench.measure", interrupted)
    with pytest.raises(typer.Exit) as ended:
        bench(tmp_path / "bench")
    assert ended.value.exit_code == 130
    assert "Stopped: nothing was reported" in capsys.readouterr().err


def test_only_one_table_of_a_second_look_is_taken_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "looks.toml"
    file.write_text(LOOK)
    assert read_table(file) == LOOK
    for text, message in (
        ("[http]\n", "and nothing else"),
        ("[second_look]\n", "and nothing else"),
        ("second_look = []\n", "and nothing else"),
        ("[[", "cannot be read"),
        (LOOK + LOOK, "has 2 .* a run of its own"),
    ):
        file.write_text(text)
        with pytest.raises(typer.BadParameter, match=message):
            read_table(file)


def test_a_drift_is_seen_in_the_quarters(capsys: pytest.CaptureFixture[str]) -> None:
    times = [number / 10 for number in range(100)] + [10 + number / 5 for number in range(101)]
    samples = [LoadSample(at, [None], [at << 20], 3 << 20, 2 << 20) for at in range(31)]
    steady = Steady(images_per_second=1, slowest=1, fastest=1)
    print_quarters(Run(False, 1.0, 1.0, 1.0, Percentiles(0, 0, 0), {}, times, samples, steady))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["1", "10.0", "5", "2", "3"],
        ["2", "10.0", "10", "2", "3"],
        ["3", "5.0", "20", "2", "3"],
        ["4", "5.0", "30", "2", "3"],
    ]
