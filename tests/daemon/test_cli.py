"""Every command as a process of its own, on a small finished run: its output, its exit status, its help."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sqlite3
from pathlib import Path

import pytest

from daemon.cli import app
from tests.daemon_process import Daemon, Place, counts_of, picture

ESCAPE, OVERRIDE = "\x1b", "\u202e"
EVIL = f"evil{ESCAPE}[2J{OVERRIDE}[bold]\n.ppm"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Six images are done, one of them of an evil name and with an evil text; one has failed."""
    place = Place(tmp_path_factory.mktemp("cli"))
    place.drop_many(range(5))
    place.drop(EVIL, picture(7))  # a variant with lines of text
    place.drop("broken.jpg", b"no picture")
    run = place.run_once()
    assert run.returncode == 1
    place.assert_kept(DONE=6, FAILED=1)
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as ledger, ledger:
        text = json.dumps(f"click {ESCAPE}]8;;http://evil.example{ESCAPE}\\here[/red]{OVERRIDE}")[1:-1]
        line = f'{{"text":"{text}","score":0.9,"box":[[0,0],[1,0],[1,1],[0,1]]}}'
        payload = f'{{"lines":[{line}],"count":1,"area_ratio":0.1}}'
        digest = "SELECT digest FROM image WHERE path LIKE 'evil%' OR CAST(path AS TEXT) LIKE 'evil%'"
        ocr = "SELECT id FROM model WHERE stage = 'ocr'"
        ledger.execute(f"UPDATE result SET payload = ? WHERE model = ({ocr}) AND digest = ({digest})", (payload.encode(),))
    return place


def say(place: Place, *arguments: str | Path) -> str:
    """The command's output; it must have gone well."""
    done = place.command(*arguments)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_status_tells_the_counts_of_the_ledger_when_no_daemon_runs(place: Place) -> None:
    told = json.loads(say(place, "status", "--json"))
    assert (told["running"], told["done"], told["failed"], told["workers"]) == (False, 6, 1, [])


def test_show_tells_every_criterion_and_every_stages_time(place: Place) -> None:
    told = say(place, "show", place.inbox() / "00003.ppm")
    assert told.startswith("00003.ppm  DONE")
    for word in (
        "caption  a picture of",
        "text_boxes",
        "spatial_dispersion",
        "clip_similarity",
        "bin ",
        "ocr",
        "blip",
        "8×8 PPM",
    ):
        assert word in told
    assert json.loads(say(place, "show", "00003.ppm", "--json")) == place.sidecar("00003.ppm")


def test_show_tells_why_an_image_failed_and_takes_its_number_too(place: Place) -> None:
    (number,) = place.rows("SELECT id FROM image WHERE status = 2")[0]
    told = say(place, "show", str(number))
    assert "broken.jpg  FAILED" in told
    assert "reason  not-an-image: the bytes are plain text (1 tries)" in told


def test_what_files_and_images_say_reaches_the_terminal_escaped(place: Place) -> None:
    told = say(place, "show", place.inbox() / EVIL)
    assert ESCAPE not in told
    assert OVERRIDE not in told
    assert "evil\\x1b[2J\\u202e[bold]\\n.ppm  DONE" in told
    assert "click \\x1b]8;;http://evil.example\\x1b\\here[/red]\\u202e" in told
    missing = place.command("show", f"no{ESCAPE}[31m such")
    assert missing.returncode == os.EX_NOINPUT
    assert "The ledger knows no image no\\x1b[31m such." in missing.stderr


def test_export_writes_a_row_for_each_image_or_those_of_a_bin(place: Place, tmp_path: Path) -> None:
    say(place, "export", "--format", "jsonl", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert place.sidecar("00002.ppm") in lines
    chosen = [line["source"]["path"] for line in lines if line["bin"]["name"] == lines[0]["bin"]["name"]]
    file = tmp_path / "bin.csv"
    assert say(place, "export", "--bin", lines[0]["bin"]["name"], file) == f"{len(chosen)} images in {file}\n"
    with file.open(newline="") as opened:
        assert [row["path"] for row in csv.DictReader(opened)] == chosen


def test_retry_brings_a_failed_image_back_with_and_without_a_daemon(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("broken.jpg", b"no picture")
    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        told = say(place, "status")
        assert told.startswith("0 done, 1 failed, 0 skipped, 0 pending")
        assert "ocr+yolo+clip+blip/0" in told
        assert say(place, "retry", place.inbox() / "broken.jpg") == "1 images are pending again\n"
        daemon.wait_idle(2)
        assert daemon.stop() == 0
    place.assert_kept(FAILED=1)
    assert say(place, "retry", "--all") == "1 images are pending again\n"
    assert counts_of(place) == {"PENDING": 1}


def test_gpus_and_plan_tell_what_is_there_and_what_would_be_done(place: Place) -> None:
    listed = json.loads(say(place, "gpus", "--json"))
    assert all(
        {"name", "total_bytes", "free_bytes", "used_bytes", "compute_capability", "processes"} <= gpu.keys() for gpu in listed
    )
    planned = json.loads(say(place, "plan", "--json"))
    assert [stage for segment in planned["segments"] for stage in segment["stages"]] == ["ocr", "yolo", "clip", "blip"]
    assert planned["why"]


def test_check_tells_each_problem_with_its_mend_and_what_is_well(tmp_path: Path) -> None:
    bad = Place(tmp_path)
    bad.inbox().rmdir()
    bad.configure({"binning": {"rules": "no_such_module:rule"}})
    told = bad.command("check")
    assert told.returncode == os.EX_CONFIG
    assert f"mkdir -p {bad.inbox()}" in told.stdout
    assert "no_such_module" in told.stdout
    assert f"output.results: {bad.site.results} can be written." in told.stdout


def test_models_list_names_the_packs(place: Place) -> None:
    assert all({"name", "folder", "stages"} <= pack.keys() for pack in json.loads(say(place, "models", "list", "--json")))


def test_samples_are_written_with_their_truth(place: Place, tmp_path: Path) -> None:
    assert say(place, "samples", tmp_path / "new", "--count", "2", "--seed", "5") == f"2 images in {tmp_path / 'new'}\n"
    truths = [json.loads(line) for line in (tmp_path / "new" / "truth.jsonl").read_text().splitlines()]
    assert len(truths) == 2
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_each_command_explains_itself_with_an_example() -> None:
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    commands = {
        f"{prefix}{command.name or command.callback.__name__}": command.callback.__doc__
        for prefix, group in groups
        for command in group.registered_commands
        if command.callback
    }
    assert {"run", "status", "show", "retry", "export", "gpus", "plan", "check", "samples", "models list"} <= commands.keys()
    assert [name for name, text in commands.items() if f"Example: visiond {name}" not in (text or "")] == []


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["status", "--jsno"], os.EX_USAGE, "--json"),
        (["export", "--ratio", "A=lots", "no.csv"], os.EX_CONFIG, "write it like A=0.4"),
        (["status", "--config", "no-such.toml"], os.EX_CONFIG, "no-such.toml cannot be read"),
    ],
    ids=["an option", "a mix", "a configuration"],
)
def test_a_mistake_is_named_with_its_mend_and_an_exit_status_of_its_own(
    place: Place, arguments: list[str], status: int, word: str
) -> None:
    done = place.command(*arguments)
    assert done.returncode == status
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_ledger_status_says_so(tmp_path: Path) -> None:
    fresh = Place(tmp_path).command("status")
    assert fresh.returncode == os.EX_NOINPUT
    assert "`visiond run` makes it" in fresh.stderr
