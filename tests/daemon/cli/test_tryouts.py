"""`visiond check` builds each stage in a separate process; a stage that cannot be built stops `run` with a clear message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon.cli import tryouts
from daemon.config.loading import parse
from daemon.layout import Layout
from daemon.workers.tryout import Tryout
from stages.registry import ORDER
from tests.daemon_process import Daemon, Place

SENTENCE = "x.pt is a YOLO pose model; visiond takes others."


def try_all(folder: Path, pipeline: dict[str, Any] | None = None, **options: dict[str, Any]) -> dict[str, Tryout]:
    """Trials of fake stages with these options, by stage. Every JPEG has JFIF in it, the page too."""
    stages = {stage: {"backend": "fake", "options": options.get(stage, {})} for stage in ORDER}
    config = parse({"stages": stages, "pipeline": {"devices": ["cpu"], **(pipeline or {})}}, folder)
    return {tryout.stage: tryout for tryout in tryouts.try_stages(Layout.of(config))}


def test_check_builds_each_stage_unless_it_is_to_be_quick(tmp_path: Path) -> None:
    place = Place(tmp_path, {"stages": {"clip": {"backend": "fake", "options": {"load_seconds": 0.2}}}})
    told = place.command("check")
    assert told.returncode == 0, told.stderr
    built = [line for line in told.stdout.splitlines() if "answers a test page" in line]
    assert [line.split()[2] for line in built] == list(ORDER)
    assert "stage clip on cpu: loads in 0.2 s" in told.stdout
    assert "answers a test page" not in place.command("check", "--quick").stdout


def test_a_stage_that_cannot_be_built_is_refused_by_check_and_run_with_the_same_sentence(tmp_path: Path) -> None:
    place = Place(tmp_path, {"stages": {"yolo": {"backend": "fake", "options": {"unusable": SENTENCE}}}})
    place.drop_many(range(1))
    checked, run = place.command("check"), place.run_once()
    assert (checked.returncode, run.returncode) == (os.EX_CONFIG, os.EX_CONFIG)
    assert f"error   stage yolo on cpu: {SENTENCE}\n" in checked.stdout
    assert json.loads(run.stderr.splitlines()[-1])["event"] == SENTENCE
    assert "Traceback" not in checked.stderr + run.stderr


def test_a_stage_that_ends_or_hangs_its_process_or_fails_on_the_page_is_one_finding(tmp_path: Path) -> None:
    seconds = {"load_timeout_seconds": 2.0, "batch_timeout_seconds": 1.0}
    faults = {"ocr": "segfault", "yolo": "raise", "clip": "hang"}
    found = try_all(tmp_path, seconds, **{stage: {"fail": {"JFIF": fault}} for stage, fault in faults.items()})
    assert found["ocr"].problem == "the process that built and tried it was killed by SIGSEGV."
    assert found["yolo"].problem.startswith("it is built, but fails on a test page: stage: yolo: ")
    assert found["clip"].problem == "it was not built and tried within 3 s."
    assert (found["blip"].problem, b"text" in found["blip"].answer) == ("", True)
    assert list(found) == list(ORDER)


def test_stages_of_other_segments_know_what_was_said_of_the_page(tmp_path: Path) -> None:
    tables = [{"stages": ["ocr", "yolo", "clip"], "devices": ["cpu"]}, {"stages": ["blip"], "devices": ["cpu"]}]
    found = try_all(tmp_path, {"segment": tables})
    assert json.loads(found["blip"].answer)["similarity"] is not None  # which is held against CLIP's answer


def test_a_trial_runs_no_code_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("resource.py", "msgspec.py", "daemon.py"):
        (tmp_path / name).write_text("open('trap', 'w')")
    monkeypatch.chdir(tmp_path)
    assert all(not tryout.problem for tryout in try_all(tmp_path).values())
    assert not (tmp_path / "trap").exists()


def test_the_process_that_asks_loads_no_torch() -> None:
    program = "import sys, daemon.cli.check, daemon.cli.making; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


NOTICE = "random: means nothing"


def test_a_notice_is_shown_wherever_results_are(tmp_path: Path) -> None:
    noted = {stage: {"backend": "fake", "options": {"notice": NOTICE}} for stage in ("yolo", "clip")}
    place = Place(tmp_path, {"stages": noted, "http": {"listen": "127.0.0.1:0"}})
    line = f"yolo and clip: {NOTICE}"
    place.drop_many(range(1))
    assert f"Note: {line}." in place.run_once().stderr
    for command, shown in ((("status",), "stdout"), (("show", "1"), "stdout"), (("list",), "stderr"), (("check",), "stdout")):
        assert line in getattr(place.command(*command), shown), command
    resting = json.loads(place.command("status", "--json").stdout)
    with Daemon(place) as daemon:
        daemon.wait_event("models carry a notice", notice=line)
        assert line in daemon.fetch("/")[1].decode()
        assert json.loads(daemon.fetch("/api/status")[1])["notices"] == resting["notices"] == {"yolo": NOTICE, "clip": NOTICE}
        metrics = daemon.fetch("/metrics")[1].decode()
    shown = [row for row in metrics.splitlines() if row.startswith("visiond_stage_notice_info{")]
    assert {row.split("}")[0].partition("{")[2] for row in shown if row.endswith(" 1.0")} == {
        'notice="random",stage="yolo"',
        'notice="random",stage="clip"',
    }
    assert len(shown) == 12
