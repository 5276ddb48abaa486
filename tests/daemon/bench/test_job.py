"""What a benchmark keeps for the next run, and what it removes. tests/acceptance/test_benchmark.py runs one."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.bench.ceiling import measure_ceiling
from daemon.bench.job import Percentiles, Place, make_once
from daemon.config.loading import parse
from daemon.errors import VisiondError
from tests.daemon_process import Place as FakePlace
from tests.daemon_process import picture
from tests.makers import tree


@pytest.mark.parametrize(("cold", "left"), [(False, ["kernels"]), (True, [])])
def test_a_run_finds_no_results_and_compiled_kernels_only_when_warm(
    tmp_path: Path, cold: bool, left: list[str]
) -> None:
    place = Place(tmp_path, "mini")
    for file in ("state/ledger.sqlite", "state/kernels/a.cubin", "results/a.jpg.json"):
        (place.home / file).parent.mkdir(parents=True, exist_ok=True)
        (place.home / file).touch()
    place.prepare(tmp_path / "images", cold=cold)
    assert [path.name for path in (place.home / "state").iterdir()] == left
    assert not (place.home / "results").exists()


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
