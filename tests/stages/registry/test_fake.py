from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stages.blip.descriptor import Caption
from stages.contract.base import DeviceLost, Image, ImageError, OutOfMemory, Reason, Stage, StageSpec
from stages.contract.binning import Thresholds, judge
from stages.ocr.descriptor import Ocr
from stages.registry import fake, registry
from stages.yolo.descriptor import Objects
from tests.daemon_process import PATIENCE


def make_stage(name: str, *, batch_size: int = 16, **options: Any) -> Stage:
    stage = registry.build(
        StageSpec(name=name, backend="fake", batch_size=batch_size, options=options), "none"
    )
    stage.load()
    return stage


def make_image(data: bytes) -> Image:
    return Image(memoryview(data), 640, 480)


IMAGES = [make_image(b"image %d" % index) for index in range(200)]


@pytest.mark.parametrize("name", registry.ORDER)
def test_the_same_bytes_give_the_same_answer_in_any_batch(name: str) -> None:
    together = make_stage(name).run(IMAGES)
    alone = [make_stage(name).run([image])[0] for image in IMAGES[:20]]
    assert together[:20] == alone
    assert len({msgspec.json.encode(answer) for answer in together}) > 4


def test_fake_answers_are_consistent() -> None:
    for answer in make_stage("yolo").run(IMAGES):
        assert isinstance(answer, Objects)
        assert answer.count == len(answer.detections)
        assert answer.unique == len({found.label for found in answer.detections})
        centers = [
            ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            for box in (found.box for found in answer.detections)
        ]
        spread = [max(axis) - min(axis) for axis in zip(*centers, strict=True)] or [0.0, 0.0]
        assert answer.dispersion == pytest.approx(spread[0] * spread[1] / (640 * 480))
    for answer in make_stage("ocr").run(IMAGES):
        assert isinstance(answer, Ocr)
        boxes = [
            (line.box[2][0] - line.box[0][0]) * (line.box[2][1] - line.box[0][1]) for line in answer.lines
        ]
        assert answer.area_ratio == pytest.approx(sum(boxes) / (640 * 480))


def test_fakes_fill_every_bin() -> None:
    ocr, yolo, blip = (make_stage(name).run(IMAGES) for name in ("ocr", "yolo", "blip"))
    bins = {
        judge({"ocr": encode(a), "yolo": encode(b), "blip": encode(c)}, Thresholds()).name
        for a, b, c in zip(ocr, yolo, blip, strict=True)
    }
    assert bins == {"A", "B", "C"}


def encode(answer: object) -> bytes:
    return msgspec.json.encode(answer)


def test_a_caption_has_a_similarity_only_after_clip() -> None:
    image = make_image(b"x")
    before = make_stage("blip").run([image])[0]
    image.results["clip"] = make_stage("clip").run([image])[0]  # type: ignore[assignment]
    after = make_stage("blip").run([image])[0]
    assert isinstance(before, Caption)
    assert isinstance(after, Caption)
    assert before.similarity is None
    assert after.similarity is not None


@pytest.mark.parametrize(("fault", "transient"), [("error", False), ("transient", True)])
def test_a_marked_image_fails_and_its_batch_mates_do_not(fault: str, transient: bool) -> None:
    stage = make_stage("clip", fail={"BAD": fault})
    good, bad = stage.run([make_image(b"good"), make_image(b"some BAD bytes")])
    assert not isinstance(good, ImageError)
    assert isinstance(bad, ImageError)
    assert (bad.reason, bad.transient) == (Reason.STAGE, transient)


@pytest.mark.parametrize(
    ("fault", "error"), [("raise", ValueError), ("oom", OutOfMemory), ("lost", DeviceLost)]
)
def test_a_marked_image_raises(fault: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_stage("clip", fail={"BAD": fault}).run([make_image(b"BAD")])


def test_memory_runs_out_only_above_the_given_batch_size() -> None:
    stage = make_stage("clip", fail={"BAD": "oom"}, oom_above=2)
    bad, good = make_image(b"BAD"), make_image(b"good")
    assert len(stage.run([bad, good])) == 2
    with pytest.raises(OutOfMemory):
        stage.run([bad, good, good])


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages.clip.options.fail: write a table, each value \"error\" or"):
        make_stage("clip", fail={"BAD": "segfaul"})


def test_the_refusal_of_an_unknown_option_lists_all_options() -> None:
    with pytest.raises(
        ValueError,
        match="fake takes load_seconds, latency_seconds, latency_per_image_seconds, fail, oom_above",
    ):
        make_stage("clip", colour=1)


FATAL = """
import os
from stages.registry import registry
from stages.contract.base import Image, StageSpec
stage = registry.build(StageSpec(name="ocr", backend="fake", options={"fail": {"BAD": "%s"}}), "none")
os.write(1, b"ready\\n")
stage.run([Image(memoryview(b"BAD"), 1, 1)])
"""


@pytest.mark.parametrize(("fault", "status"), [("segfault", -11), ("exit", 3)])
def test_a_marked_image_ends_the_process(fault: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", FATAL % fault], check=False).returncode == status


HEARTBEAT = """
import os, threading, time
def beat():
    while True:
        os.write(1, b"beat\\n")
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
"""


def test_a_hanging_image_stops_every_thread_of_the_process() -> None:
    command = [sys.executable, "-c", HEARTBEAT + FATAL % "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            pass
        deadline = time.monotonic() + PATIENCE
        while select.select([process.stdout], [], [], 0.3)[0]:
            # beats from before it hung; none in 30 of their periods
            assert os.read(process.stdout.fileno(), 4096), "it ended"
            assert time.monotonic() < deadline, "other threads go on"
        process.kill()


def test_latency_counts_forward_passes_and_images() -> None:
    stage = make_stage("yolo", batch_size=2, latency_seconds=0.02, latency_per_image_seconds=0.01)
    started = time.perf_counter()
    stage.run(IMAGES[:3])
    assert time.perf_counter() - started >= 0.07


def test_a_device_loses_time_when_another_process_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []  # a clock would also count what a busy machine takes
    monkeypatch.setattr(fake, "time", SimpleNamespace(sleep=slept.append))
    device = tmp_path / "device"
    stage = make_stage("ocr", latency_seconds=0.5, device_file=str(device), switch_seconds=2.0)
    slept.clear()  # of its loading
    stage.run(IMAGES[:1])  # it did not have the device before
    stage.run(IMAGES[:1])
    device.write_text("1")  # another process had it
    stage.run(IMAGES[:1])
    assert slept == [2.0, 0.5, 0.5, 2.0, 0.5]


def test_an_answer_costs_a_few_microseconds() -> None:
    stages = [make_stage(name) for name in registry.ORDER]
    started = time.process_time()
    for stage in stages:
        for _ in range(25):
            stage.run(IMAGES)
    assert (time.process_time() - started) / (25 * len(IMAGES)) < 50e-6  # all four stages
