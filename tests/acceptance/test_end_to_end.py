"""End to end: unseen scenes are dropped into the inbox of a real daemon, which has no network,
and its sidecars are compared with the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH, Truth, read_truth
from visiond_mini.captions import caption_is_true, groups_are_true
from visiond_mini.score import count_words

# The pack's card has 0.95 of 2,000 scenes; for some twelve, the standard deviation is 0.06.
LEAST_OF_OBJECTS = 0.8
UNSEEN = 60_011  # a seed that no pack was trained on
COUNT = 24

CONFIG = """
[[inbox]]
settle_seconds = 0
[http]
listen = ""
# Their texts can be read in smaller pages too, in a fourth of the time.
[stages.ocr.options]
max_side = 640
map_side = 320
"""

# Every Python process of the daemon reports that it started, and each IPv4 and IPv6 socket.
HOOK = """
import sys
def note(word):
    open(FILE, "a").write(f"{word}\\n")
def observe(event, arguments):
    if event == "socket.__new__" and arguments[1] in (2, 10):
        note("socket")
note("process")
sys.addaudithook(observe)
"""
WITHOUT_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]

Answers = list[tuple[Truth, dict[str, Any]]]


@dataclass(frozen=True)
class Run:
    answers: Answers  # each scene's truth with its sidecar
    reports: Counter[str]  # of the hook
    had_network: bool


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("scenes")
    write_samples(folder / "inbox", COUNT, UNSEEN)
    (folder / "daemon.toml").write_text(CONFIG)
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK.replace("FILE", repr(str(folder / "reports"))))
    prefix = [] if subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode else WITHOUT_NETWORK
    command = [sys.executable, "-P", "-m", "daemon", "run", "--once", "--config", str(folder / "daemon.toml")]
    environment = os.environ | {"PYTHONPATH": str(folder / "hook")}
    subprocess.run([*prefix, *command], check=True, timeout=300, env=environment)
    reports = Counter((folder / "reports").read_text().split())
    truths = read_truth(folder / "inbox" / TRUTH)
    return Run([(truth, read_sidecar(folder, truth)) for truth in truths], reports, not prefix)


def read_sidecar(folder: Path, truth: Truth) -> dict[str, Any]:
    sidecar: dict[str, Any] = json.loads((folder / "results" / f"{truth.file}.json").read_bytes())
    return sidecar


@pytest.fixture(scope="module")
def answers(run: Run) -> Answers:
    return run.answers


@pytest.mark.timeout(400)
def test_no_process_opens_a_socket_to_a_network(run: Run) -> None:
    if run.had_network:
        pytest.skip("no network namespace may be made here")
    assert run.reports["process"] >= 2, "the daemon and a worker"
    assert run.reports["socket"] == 0


def share(marks: list[bool]) -> float:
    return sum(marks) / len(marks)


@pytest.mark.timeout(400)
def test_captions_name_what_is_there(answers: Answers) -> None:
    assert share([caption_is_true(sidecar["caption"]["text"], truth) for truth, sidecar in answers]) >= 0.9


def test_captions_of_objects_have_their_colors_and_counts(answers: Answers) -> None:
    photos = [(truth, sidecar) for truth, sidecar in answers if truth.kind == "photo"]
    assert len(photos) >= 12
    assert (
        share([groups_are_true(sidecar["caption"]["text"], truth) for truth, sidecar in photos])
        >= LEAST_OF_OBJECTS
    )


def test_the_first_tag_is_true(answers: Answers) -> None:
    assert share([sidecar["clip"]["tags"][0]["label"] in truth.tags for truth, sidecar in answers]) >= 0.95


def test_objects_are_found_and_no_others(answers: Answers) -> None:
    found = missed = invented = 0
    for truth, sidecar in answers:
        named = Counter(detection["label"] for detection in sidecar["objects"]["detections"])
        there = Counter(thing.label for thing in truth.objects)
        found, missed, invented = (
            found + (named & there).total(),
            missed + (there - named).total(),
            invented + (named - there).total(),
        )
    assert found >= 0.95 * (found + missed)
    assert invented <= 0.05 * found


def test_text_is_read(answers: Answers) -> None:
    right = written = 0
    for truth, sidecar in answers:
        words = count_words(line.text for line in truth.lines)
        read = count_words(line["text"] for line in sidecar["ocr"]["lines"])
        right, written = right + (words & read).total(), written + words.total()
    assert right >= 0.95 * written > 0


def test_boxes_are_of_the_upright_image(answers: Answers) -> None:
    turned = [(truth, sidecar) for truth, sidecar in answers if truth.orientation != 1]
    assert turned
    for truth, sidecar in turned:
        assert (sidecar["source"]["width"], sidecar["source"]["height"]) == (truth.width, truth.height)


def test_bins_are_those_of_the_truth(answers: Answers) -> None:
    assert share([sidecar["bin"]["name"] == truth.bin for truth, sidecar in answers]) >= 0.97
    assert {sidecar["bin"]["name"] for _, sidecar in answers} == {"A", "B", "C"}


def test_every_result_says_that_the_pack_is_a_demonstration(answers: Answers) -> None:
    assert all("mini pack" in sidecar["notice"] for _, sidecar in answers)
