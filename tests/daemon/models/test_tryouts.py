"""`visiond check` builds each stage in a separate process; a
stage that cannot be built stops `run` with a clear message."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.check import examine
from daemon.config.loading import load, parse
from daemon.core.messages import Setup
from daemon.layout.layout import Layout
from daemon.models import examining, tryouts
from daemon.workers.tryout import Tryout, draw_images, try_stage
from stages.contract.base import Image, ImageError, Limits, Result, Stage, StageSpec
from stages.images.images import inspect
from stages.registry import registry
from stages.registry.fake import FakeStage
from stages.registry.registry import ORDER
from tests.daemon_process import Daemon, Place

SENTENCE = "x.pt is a YOLO pose model; visiond takes others."


def try_all(
    folder: Path, pipeline: dict[str, Any] | None = None, **options: dict[str, Any]
) -> dict[str, Tryout]:
    """Trials of fake stages with these options, by stage. Every JPEG has JFIF in it, the page too."""
    stages = {stage: {"backend": "fake", "options": options.get(stage, {})} for stage in ORDER}
    config = parse({"stages": stages, "pipeline": {"devices": ["cpu"], **(pipeline or {})}}, folder)
    return {tryout.stage: tryout for tryout in tryouts.try_stages(Layout.of(config))}


def test_check_builds_each_stage_unless_it_is_to_be_quick(tmp_path: Path) -> None:
    place = Place(tmp_path, {"stages": {"clip": {"backend": "fake", "options": {"load_seconds": 0.2}}}})
    told = place.command("check")
    assert told.returncode == 0, told.stderr
    built = [line for line in told.stdout.splitlines() if "processes two test images" in line]
    assert [line.split()[2] for line in built] == list(ORDER)
    seconds = re.search(r"stage clip on cpu: loads in (\d+\.\d) s", told.stdout)
    assert seconds
    assert float(seconds[1]) >= 0.2
    assert "processes two test images" not in place.command("check", "--quick").stdout


def test_a_stage_that_cannot_be_built_is_refused_by_check_and_run_with_the_same_sentence(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, {"stages": {"yolo": {"backend": "fake", "options": {"unusable": SENTENCE}}}})
    place.drop_many(range(1))
    checked, run = place.command("check"), place.run_once()
    assert (checked.returncode, run.returncode) == (os.EX_CONFIG, os.EX_CONFIG)
    assert f"error   stage yolo on cpu: {SENTENCE}\n" in checked.stdout
    assert json.loads(run.stderr.splitlines()[-1])["event"] == SENTENCE
    assert "Traceback" not in checked.stderr + run.stderr


def test_a_stage_that_ends_its_process_or_fails_on_the_page_is_one_finding(tmp_path: Path) -> None:
    faults = {"ocr": "segfault", "yolo": "raise"}
    found = try_all(tmp_path, **{stage: {"fail": {"JFIF": fault}} for stage, fault in faults.items()})
    assert found["ocr"].problem == "its test process was killed by SIGSEGV."
    assert found["yolo"].problem.startswith(
        "it is built, but fails on a test image of 1280×960: stage: yolo: "
    )
    assert (found["blip"].problem, [b"text" in answer for answer in found["blip"].answers]) == (
        "",
        [True, True],
    )
    assert list(found) == list(ORDER)


def test_a_stage_that_hangs_its_process_is_one_finding(tmp_path: Path) -> None:
    hangs = {"stages": ["clip"], "load_timeout_seconds": 2.0, "batch_timeout_seconds": 1.0}
    found = try_all(tmp_path, hangs, clip={"fail": {"JFIF": "hang"}})
    assert {stage: trial.problem for stage, trial in found.items()} == {
        "clip": "building and trying it took longer than 3 s."
    }


def test_stages_of_other_segments_get_the_results_of_earlier_ones(tmp_path: Path) -> None:
    tables = [
        {"stages": ["ocr", "yolo", "clip"], "devices": ["cpu"]},
        {"stages": ["blip"], "devices": ["cpu"]},
    ]
    found = try_all(tmp_path, {"segment": tables})
    similarities = [json.loads(answer)["similarity"] for answer in found["blip"].answers]
    assert len(similarities) == 2
    assert None not in similarities  # computed with CLIP's embedding


def test_a_stage_that_works_only_on_images_of_one_size_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "build", Stacking)
    spec = StageSpec("ocr", "fake")
    setup = Setup("w", "cpu", [spec], 0, 1, 1, Limits(), None, ["ocr"])
    images = draw_images(setup.limits)
    tried = try_stage(setup, spec, images, [{}, {}])
    assert (tried.problem, len(tried.answers)) == ("", 2), "each image alone succeeds"
    assert "fails on two images of different size in one batch" in tried.warning
    assert "equal size, but got (1280, 960) and (720, 960)" in tried.warning
    assert try_stage(setup, spec, [images[0], images[0]], [{}, {}]).warning == ""
    found = [Tryout("ocr", "cpu", warning=tried.warning, answers=tried.answers)]
    monkeypatch.setattr(examining, "try_stages", lambda _: found)
    place = Place(tmp_path)
    findings = list(examine(load(place.config), place.config))
    assert [
        finding.text for finding in findings if finding.grade == "warning" and "stage ocr" in finding.text
    ] == [f"stage ocr on cpu: {tried.warning}"]


def test_importing_the_libraries_of_a_stage_is_not_counted_as_loading_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find, clock, first = registry.find_class, [0.0], [True]

    def find_slowly(spec: StageSpec) -> type[Stage]:
        clock[0] += 0.3 * (first.pop() if first else False)
        return find(spec)

    monkeypatch.setattr(registry, "find_class", find_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    spec = StageSpec("ocr", "fake")
    setup = Setup("w", "cpu", [spec], 0, 1, 1, Limits(), None, ["ocr"])
    tried = [try_stage(setup, spec, draw_images(setup.limits), [{}, {}]) for _ in range(2)]
    assert [(trial.import_seconds, trial.load_seconds) for trial in tried] == [(0.3, 0.0), (0.0, 0.0)]
    assert [
        "imports its libraries in 0.3 s, loads in 0.0 s, and processes" in trial.summary for trial in tried
    ] == [True, False]


@pytest.mark.parametrize("pixels", [1, 10_000, 100_000_000])
def test_the_test_images_differ_and_keep_every_limit(pixels: int) -> None:
    limits = Limits(max_pixels=pixels, max_aspect_ratio=1.34)
    first, second = (inspect(memoryview(image), limits) for image in draw_images(limits))
    assert first.width * first.height == 1 or (first.width, first.height) != (second.width, second.height)


class Stacking(FakeStage):
    """Stacks the images of a batch, as `torch.stack` does."""

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        sizes = [(image.width, image.height) for image in images]
        if len(set(sizes)) > 1:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {sizes[0]} and {sizes[1]}"
            )
        return super().run(images)


def test_a_trial_runs_no_code_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource.py", "msgspec.py", "daemon.py"):
        (tmp_path / name).write_text("open('trap', 'w')")
    monkeypatch.chdir(tmp_path)
    assert all(not tryout.problem for tryout in try_all(tmp_path).values())
    assert not (tmp_path / "trap").exists()


def test_the_process_that_asks_loads_no_torch() -> None:
    program = "import sys, daemon.cli.check, daemon.models.making; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


NOTICE = "random: means nothing"


def test_a_notice_is_shown_wherever_results_are(tmp_path: Path) -> None:
    noted = {stage: {"backend": "fake", "options": {"notice": NOTICE}} for stage in ("yolo", "clip")}
    place = Place(tmp_path, {"stages": noted, "http": {"listen": "127.0.0.1:0"}})
    line = f"yolo and clip: {NOTICE}"
    place.drop_many(range(1))
    assert f"Note: {line}." in place.run_once().stderr
    for command, shown in (
        (("status",), "stdout"),
        (("show", "1"), "stdout"),
        (("list",), "stderr"),
        (("check",), "stdout"),
    ):
        assert line in getattr(place.command(*command), shown), command
    resting = json.loads(place.command("status", "--json").stdout)
    with Daemon(place) as daemon:
        daemon.wait_event("models have a notice", notice=line)
        assert line in daemon.fetch("/")[1].decode()
        assert (
            json.loads(daemon.fetch("/api/status")[1])["notices"]
            == resting["notices"]
            == {"yolo": NOTICE, "clip": NOTICE}
        )
        metrics = daemon.fetch("/metrics")[1].decode()
    rows = [row for row in metrics.splitlines() if row.startswith("visiond_stage_notice_info{")]
    assert {row.split("}")[0].partition("{")[2] for row in rows if row.endswith(" 1.0")} == {
        'notice="random",stage="yolo"',
        'notice="random",stage="clip"',
    }
    assert len(rows) == 12
