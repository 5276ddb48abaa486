from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from daemon.core.errors import WrongArgument
from daemon.layout.layout import Layout
from daemon.measure import scaling
from daemon.measure.job import Percentiles, Run
from daemon.measure.place import MachineInfo, Place
from daemon.measure.report import draw_scaling, print_scaling
from daemon.measure.scaling import Agreement, Scaling, choose, measure_scaling, summarize
from daemon.measure.steady import Steady
from daemon.system.gpus import Gpu

SAME = Agreement(100, {"texts": 0, "captions": 3})
GPUS = [Gpu(n, f"GPU-{n}", "card", 1 << 34, 1 << 34, 0, "9.0", None, ()) for n in range(2)]


def make_run(rate: float, images: int = 100, busy: float | None = 0.9) -> Run:
    """A rate that is reached after a second."""
    times = [1 + number / rate for number in range(images)]
    steady = Steady(images_per_second=2 * rate, slowest=rate, fastest=rate, gpu_busy=busy)
    return Run(False, 10.0, 1.0, rate, Percentiles(0, 0, 0), {"ocr": 1.0}, times, [], steady)


def test_the_weights_are_verified_once_for_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    made = SimpleNamespace()
    monkeypatch.setattr(Layout, "of", lambda config: opened.append(config) or made)
    monkeypatch.setattr(Place, "prepare", lambda *_: "settings")
    monkeypatch.setattr(
        scaling,
        "time_one_at_a_time",
        lambda layout, *_: SimpleNamespace(images_per_second=float(layout is made)),
    )
    place = Place(tmp_path, "mini")
    assert scaling.time_side_by_side(place, [tmp_path / "a.jpg"], GPUS) == 2.0
    assert opened == ["settings"]


def test_a_point_is_the_median_of_its_runs_beside_the_first_point() -> None:
    one = summarize(1, "replicated", [make_run(10.0)], 1.5, [], SAME)
    two = summarize(2, "replicated", [make_run(rate) for rate in (19.0, 22.0, 20.0)], 3.0, [one], SAME)
    assert (one.times, two.times, two.whole, two.least, two.most) == (1.0, 2.0, 20.0, 19.0, 22.0)
    assert (two.images, two.middle, two.one_at_a_time) == (100, 40.0, 3.0)
    assert two.quarters == pytest.approx([0, 24 / 20, 49 / 20, 74 / 20, 99 / 20])


def test_without_a_gpu_none_is_busy() -> None:
    assert summarize(2, "replicated", [make_run(10.0)], 1.0, [], SAME).busy == pytest.approx(0.9)
    assert summarize(0, "replicated", [make_run(10.0)], 1.0, [], SAME).busy is None


def test_the_first_gpus_are_named_in_the_configuration() -> None:
    assert choose(GPUS[:1], "replicated") == ['devices = ["cuda:0"]', 'placement = "replicated"']
    assert choose([], "replicated")[0] == 'devices = ["cpu"]'


def test_more_gpus_than_there_are_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "list_gpus", lambda: GPUS)
    with pytest.raises(
        WrongArgument, match="--gpus names 4, but this machine has 2 GPUs; 0 measures the CPU"
    ):
        measure_scaling(
            Place(tmp_path), [1, 4], 10, repeat=1, cold=0, warm=1, sample=1, progress=lambda _: None
        )
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_shown_as_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = summarize(1, "replicated", [make_run(10.0)], 1.5, [], SAME)
    points = [
        one,
        *(summarize(2, kind, [make_run(19.0)], 3.0, [one], SAME) for kind in ("replicated", "pipelined")),
    ]
    machine = MachineInfo(["card"] * 2, None, "2.0", "3.11", 16)
    report = Scaling(command=[], version="", commit=None, machine=machine, pack="", points=points)
    print_scaling(report)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1.90", "90%", "pipelined", "of 100 images", "captions 3"))
    draw_scaling(report, tmp_path / "gpus.png")
    with Image.open(tmp_path / "gpus.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 3
