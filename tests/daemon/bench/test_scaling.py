from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from PIL import Image

from daemon.bench import scaling
from daemon.bench.agreement import Agreement
from daemon.bench.job import Machine, Percentiles, Run
from daemon.bench.meter import Sample
from daemon.bench.pictures import draw_scaling
from daemon.bench.scaling import Scaling, choose, measure_scaling, middle_rate, summarize
from daemon.cli.bench import print_scaling
from daemon.core.errors import WrongArgument
from daemon.system.gpus import Gpu
from tests.daemon.bench.test_rates import stairs

SAME = Agreement(100, {"texts": 0, "captions": 3})
GPUS = [Gpu(n, f"GPU-{n}", "card", 1 << 34, 1 << 34, 0, "9.0", None, ()) for n in range(2)]


def make_run(rate: float, images: int = 100, busy: float = 0.9) -> Run:
    """A rate that is reached after a second; the GPUs are idle before that. Only the first two are busy."""
    times = [1 + number / rate for number in range(images)]
    samples = [Sample(at / 10, [busy if at > 10 else 0.0] * 2 + [0.0], [], 0, 0) for at in range(100)]
    return Run(False, 10.0, 1.0, rate, Percentiles(0, 0, 0), {"ocr": 1.0}, times, samples)


def test_the_middle_half_is_without_the_start_and_the_end() -> None:
    slow_ends = [0.0, *(5 + number / 10 for number in range(98)), 100.0]
    run = msgspec.structs.replace(make_run(1.0), published_at=slow_ends)
    assert middle_rate(run) == pytest.approx(10)


@pytest.mark.parametrize("batch", [1, 30, 128])
def test_the_rate_does_not_depend_on_where_batches_end(batch: int) -> None:
    """It is the one that `visiond tune` measures."""
    run = msgspec.structs.replace(make_run(1.0), published_at=stairs(1, batch, 16, seconds=2.0))
    assert middle_rate(run) == pytest.approx(batch / 2, rel=0.01)


def test_of_a_single_image_the_rate_is_that_of_the_run() -> None:
    assert middle_rate(make_run(7.0, images=1)) == 7.0


def test_the_weights_are_verified_once_for_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    made = SimpleNamespace()
    monkeypatch.setattr(scaling.Layout, "of", lambda config: opened.append(config) or made)
    monkeypatch.setattr(scaling.Place, "prepare", lambda *_: "settings")
    monkeypatch.setattr(
        scaling,
        "time_one_at_a_time",
        lambda layout, *_: SimpleNamespace(images_per_second=float(layout is made)),
    )
    place = scaling.Place(tmp_path, "mini")
    assert scaling.time_side_by_side(place, [tmp_path / "a.jpg"], GPUS) == 2.0
    assert opened == ["settings"]


def test_a_point_is_the_median_of_its_runs_beside_the_first_point() -> None:
    one = summarize(1, "replicated", [make_run(10.0)], 1.5, [], SAME)
    two = summarize(2, "replicated", [make_run(rate) for rate in (19.0, 22.0, 20.0)], 3.0, [one], SAME)
    assert (one.times, two.times, two.whole, two.least, two.most) == (1.0, 2.0, 20.0, 19.0, 22.0)
    assert (two.images, two.middle, two.one_at_a_time) == (100, pytest.approx(20.0), 3.0)
    assert two.quarters == pytest.approx([0, 24 / 20, 49 / 20, 74 / 20, 99 / 20])


def test_only_the_gpus_that_are_used_count_as_busy() -> None:
    runs = [make_run(10.0)]
    assert summarize(2, "replicated", runs, 1.0, [], SAME).busy == pytest.approx(0.9)
    assert summarize(3, "replicated", runs, 1.0, [], SAME).busy == pytest.approx(0.6)
    assert summarize(0, "replicated", runs, 1.0, [], SAME).busy is None


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
            tmp_path, "", [], [1, 4], 10, repeat=1, cold=0, warm=1, sample=1, progress=lambda _: None
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
    machine = Machine(["card"] * 2, None, "2.0", "3.11", 16)
    report = Scaling(command=[], version="", commit=None, machine=machine, pack="", points=points)
    print_scaling(report)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1.90", "90%", "pipelined", "of 100 images", "captions 3"))
    draw_scaling(report, tmp_path / "gpus.png")
    with Image.open(tmp_path / "gpus.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 3
