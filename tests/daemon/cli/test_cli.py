"""Every command in a separate process, on a small finished run: its output, exit status and help."""

from __future__ import annotations

import collections
import contextlib
import csv
import inspect
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import pytest

from daemon.cli import commands
from daemon.cli.commands import app
from daemon.config.state import lock_state
from daemon.core.jobs import JobStatus
from daemon.core.messages import Output
from daemon.terminal.display import StandardError, show_record
from stages.weights.packs import MINI
from tests.daemon_process import PATIENCE, Daemon, Place, counts_of, free_port, picture, wait_for
from tests.forked import Forked, run_forked
from tests.makers import make_outputs, make_record

ESCAPE, OVERRIDE = "\x1b", "\u202e"
EVIL = f"evil{ESCAPE}[2J{OVERRIDE}[bold]\n.ppm"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Six images are DONE, one of them with a hostile name and a hostile text; one has FAILED."""
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
        content = (
            "SELECT content.id FROM content JOIN image USING (digest) WHERE CAST(path AS TEXT) LIKE 'evil%'"
        )
        ocr = "SELECT id FROM model WHERE stage = 'ocr'"
        ledger.execute(
            f"UPDATE result SET payload = ?, checksum = NULL WHERE model = ({ocr}) AND content = ({content})",
            (payload.encode(),),
        )
    return place


def say(place: Place, *arguments: str | Path) -> str:
    """The output of a command that must succeed."""
    done = place.command(*arguments)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_status_shows_the_counts_of_the_ledger_when_no_daemon_is_running(place: Place) -> None:
    told = json.loads(say(place, "status", "--json"))
    assert (told["running"], told["done"], told["failed"], told["workers"]) == (False, 6, 1, [])
    assert "no daemon is running" in say(place, "status")


def test_status_names_the_process_that_uses_the_state_folder_before_it_answers(place: Place) -> None:
    with lock_state(place.folder / "state"):
        assert json.loads(say(place, "status", "--json"))["held_by"] == os.getpid()
        assert f"no daemon answers yet: process {os.getpid()} uses" in say(place, "status")


def test_show_prints_every_criterion_and_every_stages_time(place: Place) -> None:
    told = say(place, "show", place.inbox() / "00003.ppm")
    assert told.startswith("00003.ppm  DONE")
    for word in (
        f"inbox  {place.inbox()}",
        "caption  a picture of",
        "text boxes",
        "objects spread over",
        "likeness of caption and image",
        "bin ",
        "ocr",
        "blip",
        "seconds (average of its batch)",
        "fake",
        "8×8 PPM",
    ):
        assert word in told
    assert json.loads(say(place, "show", "00003.ppm", "--json")) == place.sidecar("00003.ppm")


def test_show_says_what_a_fingerprint_stands_for_also_by_its_first_digits(place: Place) -> None:
    provenance = place.sidecar("00003.ppm")["provenance"]["ocr"]
    fingerprint = place.sidecar("00003.ppm")["models"]["ocr"]
    about = json.loads(say(place, "show", fingerprint, "--json"))
    assert (about["fingerprint"], about["stage"], about["is_current"]) == (fingerprint, "ocr", True)
    assert about["results"] == 6
    assert {name: about[name] for name in provenance} == provenance
    assert about["versions"] == [provenance["visiond"]]
    first = fingerprint[: len("sha256:") + 8]
    assert json.loads(say(place, "show", first, "--json")) == about
    told = say(place, "show", fingerprint)
    for word in ("is_current", "true", "float32", "fake", fingerprint):
        assert word in told


def test_a_fingerprint_that_is_unknown_or_a_digest_of_an_image_is_nothing_that_show_knows(
    place: Place,
) -> None:
    for name, said in (
        ("sha256:00000000", "No model in the ledger has the fingerprint sha256:00000000"),
        (place.sidecar("00003.ppm")["source"]["digest"], "There is no image sha256:"),
    ):
        refused = place.command("show", name)
        assert refused.returncode == os.EX_NOINPUT
        assert said in refused.stderr


def test_show_prints_the_text_of_a_page_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = b'{"lines":[],"count":0,"area_ratio":0.0,"text":"# Bill\\n\\nTotal [5]","cut":true}'
    show_record(make_record(tmp_path, outputs=make_outputs() | {"ocr": Output(payload, 0.25)}))
    told = capsys.readouterr().out
    assert "# Bill" in told
    assert "Total [5]" in told
    assert "cut at max_new_tokens" in told


def test_show_prints_why_an_image_failed_and_accepts_its_number(place: Place) -> None:
    (number,) = place.rows("SELECT id FROM image WHERE status = 2")[0]
    told = say(place, "show", str(number))
    assert "broken.jpg  FAILED" in told
    assert "reason  not-an-image: the bytes are plain text\nattempts  1\n" in told
    assert "×" not in told  # a file that is not an image has no size


def test_show_says_what_gone_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_record(make_record(tmp_path, status=JobStatus.GONE))
    assert "reason  it was deleted or replaced before it was read; a new version" in capsys.readouterr().out


def test_a_bug_in_visiond_has_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(commands, "command_tree", fail)
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == os.EX_SOFTWARE
    assert "RuntimeError: a defect" in capfd.readouterr().err


def test_an_image_whose_name_is_listed_with_escapes_answers_to_the_number_beside_it(place: Place) -> None:
    [row] = [row for row in say(place, "list").splitlines() if "evil" in row]
    number, _, listed, _ = row.split("\t")
    refused = place.command("show", listed)
    assert refused.returncode == os.EX_NOINPUT
    assert "or its number as `visiond list` prints it" in refused.stderr.replace("\n", " ")
    assert json.loads(say(place, "show", number, "--json"))["source"]["path"] == EVIL


def test_list_shows_which_files_failed_and_why(place: Place) -> None:
    told = say(place, "list", "--status", "failed")
    assert told.endswith(
        f"\tFAILED\t{place.inbox() / 'broken.jpg'}\tnot-an-image: the bytes are plain text\n"
    )
    assert "00001.ppm" not in told
    assert told == say(place, "list", "--state", "FAILED")  # as the list prints it
    [document] = json.loads(say(place, "list", "--status", "failed", "--json"))
    assert (document["source"]["path"], document["reason"]) == ("broken.jpg", "not-an-image")
    assert document["source"]["inbox"] == str(place.inbox())
    assert json.loads(say(place, "list", "--status", "skipped", "--json")) == []


def test_a_listing_is_bounded_and_reports_that(place: Place) -> None:
    done = place.command("list", "--limit", "2")
    assert len(done.stdout.splitlines()) == 2
    assert "--limit N lists more" in done.stderr


def test_a_listing_is_a_plain_row_an_image_for_programs_and_fits_the_terminal_for_people(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row.split("\t") for row in say(place, "list").splitlines()]
    assert len(rows) == 7
    assert {len(row) for row in rows} == {4}
    assert not any(cell != cell.strip() for row in rows for cell in row)
    monkeypatch.setenv("COLUMNS", "50")
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as terminal, open(slave, "wb") as screen:
        assert place.command("list", stdout=screen).returncode == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.read(1 << 16).decode()).splitlines()
    assert max(map(len, lines)) <= 50
    column = slice(lines[0].index("file"), lines[0].index("bin or reason"))
    # folded, and whole
    assert str(place.inbox() / "broken.jpg") in "".join(line[column].strip() for line in lines)


def test_a_name_in_two_inboxes_is_refused_with_both(tmp_path: Path) -> None:
    place = Place(tmp_path, {"inbox": [{"name": name, "settle_seconds": 0} for name in ("one", "two")]})
    paths = [place.drop("a.ppm", picture(number), name) for number, name in enumerate(("one", "two"))]
    assert place.run_once().returncode == 0
    both = place.command("show", "a.ppm")
    assert both.returncode == os.EX_USAGE
    assert "Several images match a.ppm; use the complete path or the number:" in both.stderr
    assert all(f"DONE  {path}" in both.stderr for path in paths)
    assert json.loads(say(place, "show", paths[1], "--json"))["source"]["inbox"] == str(place.inbox("two"))


def test_names_and_texts_of_images_are_escaped_on_the_terminal(place: Place) -> None:
    told = say(place, "show", place.inbox() / EVIL)
    assert ESCAPE not in told
    assert OVERRIDE not in told
    assert "evil\\x1b[2J\\u202e[bold]\\n.ppm  DONE" in told
    assert "click \\x1b]8;;http://evil.example\\x1b\\here[/red]\\u202e" in told
    missing = place.command("show", f"no{ESCAPE}[31m such")
    assert missing.returncode == os.EX_NOINPUT
    assert "There is no image no\\x1b[31m such in the ledger." in missing.stderr


def test_export_writes_a_row_for_each_image_or_those_of_a_bin(place: Place, tmp_path: Path) -> None:
    say(place, "export", "--format", "jsonl", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert place.sidecar("00002.ppm") in lines
    chosen = [line["source"]["path"] for line in lines if line["bin"]["name"] == lines[0]["bin"]["name"]]
    file = tmp_path / "bin.csv"
    assert say(place, "export", "--bin", lines[0]["bin"]["name"], file).endswith(f" in {file}\n")
    with file.open(newline="") as opened:
        assert [row["path"] for row in csv.DictReader(opened)] == chosen


@pytest.mark.parametrize("words", [[], ["picture", "--by", "words"], ["--json"]])
def test_a_search_says_that_it_shows_only_some(place: Place, words: list[str]) -> None:
    count = len(json.loads(say(place, "search", *words, "--json")))
    cut = place.command("search", *words, "--limit", str(count - 1))
    assert f"Only the first {count - 1} images are shown; --limit N shows more." in cut.stderr
    assert "--limit" not in place.command("search", *words, "--limit", str(count)).stderr


def test_a_single_image_is_in_no_group_of_near_duplicates(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.run_once().returncode == 0
    told = place.command("duplicates")
    assert (told.stdout, told.stderr) == (
        "",
        "No image is near a better one; 1 image compared. A lower --near finds more.\n",
    )


def test_duplicates_name_the_notice_of_the_model_that_images_are_compared_by(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.run_once().returncode == 0
    with contextlib.closing(sqlite3.connect(place.site.ledger)) as ledger, ledger:
        ledger.execute("UPDATE model SET notice = stage || ' is a toy'")
    assert "Note: clip: clip is a toy." in place.command("duplicates").stderr
    assert "yolo" not in place.command("duplicates").stderr


def test_duplicates_are_images_with_near_embeddings_and_the_best_of_a_group_comes_first(
    tmp_path: Path,
) -> None:
    """The fake model has 16 embeddings, which have nothing in common."""
    place = Place(tmp_path)
    place.drop_many(range(20))
    assert place.run_once().returncode == 0
    sidecars = json.loads(say(place, "list", "--status", "done", "--json"))
    told = place.command("duplicates", "--json")
    found = json.loads(told.stdout)
    groups = [[image["id"] for image in group] for group in found["groups"]]
    alike = collections.defaultdict(list)
    for sidecar in sidecars:
        alike[sidecar["clip"]["embedding"]["base64"]].append(sidecar["id"])
    assert sorted(map(sorted, groups)) == sorted(sorted(ids) for ids in alike.values() if len(ids) > 1)
    assert groups
    assert found["near_duplicates"] == sum(len(group) - 1 for group in groups)
    assert found["bytes"] == sum(image["bytes"] for group in found["groups"] for image in group[1:])
    listed = place.command("duplicates", "--limit", "1")
    rows = [line.split("\t") for line in listed.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["1", "1.000"]] * len(groups[0])
    assert [int(row[2]) for row in rows] == groups[0]
    assert f"of 20 images {found['near_duplicates']} are near better ones" in listed.stderr
    assert ("Only the first group is shown; --limit N" in listed.stderr) == (len(groups) > 1)
    file = tmp_path / "a.csv"
    for options, written in (((), 20), (("--unique",), 20 - found["near_duplicates"])):
        exported = place.command("export", "--near", "0.95", *options, "--force", file)
        assert (exported.returncode, exported.stderr) == (0, "")
        with file.open(newline="") as opened:
            found_rows = list(csv.DictReader(opened))
        assert len(found_rows) == written
    assert {row["near_duplicate_of"] for row in found_rows} == {""}
    for wrong in ("1", "hash:1", "sharpness", "hash:"):
        assert place.command("duplicates", "--near", wrong).returncode == os.EX_USAGE
    assert place.command("export", "--near", "hash:x", "--force", file).returncode == os.EX_USAGE
    assert place.command("duplicates", "--bin", "Z").returncode == os.EX_USAGE


def test_a_search_in_a_bin_that_does_not_exist_is_refused_and_the_bins_are_named(place: Place) -> None:
    refused = place.command("search", "picture", "--by", "words", "--bin", "Z")
    assert (refused.returncode, "There is no bin Z; bins are A, B, C." in refused.stderr) == (
        os.EX_USAGE,
        True,
    )


def test_no_export_replaces_the_configuration(place: Place) -> None:
    before = place.config.read_text()
    refused = place.command("export", "--format", "csv", "--force", place.config)
    assert (refused.returncode, "is the configuration" in refused.stderr) == (os.EX_USAGE, True)
    assert place.config.read_text() == before


def test_several_bins_can_be_exported(place: Place) -> None:
    rows = list(
        csv.DictReader(io.StringIO(say(place, "export", "--bin", "A", "--bin", "B", "-"), newline=""))
    )
    assert sorted(row["bin"] for row in rows) == list("ABBBBB")


def test_an_export_into_an_inbox_is_refused(place: Place) -> None:
    refused = place.command("export", place.inbox() / "results.csv")
    assert (refused.returncode, "is inside the inbox" in refused.stderr) == (os.EX_USAGE, True)


def test_export_writes_to_standard_output(place: Place) -> None:
    rows = list(csv.DictReader(io.StringIO(say(place, "export", "-"), newline="")))
    lines = [json.loads(line) for line in say(place, "export", "-", "-f", "jsonl").splitlines()]
    assert [row["path"] for row in rows] == [line["source"]["path"] for line in lines]
    assert {row["inbox"] for row in rows} == {str(place.inbox())}
    assert len(rows) == 6


@pytest.mark.parametrize("file", ["mix.csv", "-"])
def test_export_by_ratio_reports_how_many_images_it_leaves_out(
    place: Place, tmp_path: Path, file: str
) -> None:
    # of one A and five B
    mixed = place.command("export", "--ratio", "A=1,B=1", file if file == "-" else tmp_path / file)
    assert mixed.stderr == "4 images left out to keep the shares.\n"


@pytest.mark.parametrize("command", ["export", "backup"])
def test_an_existing_file_is_replaced_only_with_force(place: Place, tmp_path: Path, command: str) -> None:
    file = tmp_path / "mine.csv"
    file.touch()
    refused = place.command(command, file)
    assert refused.returncode == os.EX_CANTCREAT
    assert f"{file} already exists; name another file, or replace it with --force." in refused.stderr
    assert file.read_bytes() == b""
    for _ in range(2):  # the second time what the first has written
        assert say(place, command, "--force", file).endswith(f" {file}\n")
        assert file.read_bytes()


@pytest.mark.parametrize("command", ["export", "backup"])
def test_a_file_that_the_command_did_not_write_is_not_replaced_with_force(
    place: Place, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "mine.csv"
    file.write_bytes(b"id,photograph\n")
    refused = place.command(command, "--force", file)
    assert refused.returncode == os.EX_CANTCREAT
    assert f"{file} is no file of this command, so --force does not replace it." in refused.stderr
    assert file.read_bytes() == b"id,photograph\n"


PRINTING = (
    *(
        "status",
        "list --json",
        "show 00001.ppm",
        "show 00001.ppm --json",
        "export -",
        "export - -f jsonl",
        "gpus",
        "plan",
    ),
    *("check --quick", "check --quick --json", "verify", "models list", "--version", "--help"),
)
STARTED = ["env"]  # a command with this prefix is not forked, so it ends as an interpreter ends
EACH_COMMAND = pytest.mark.parametrize(
    ("command", "prefix"), [*((command, []) for command in PRINTING), ("status", STARTED)]
)


@EACH_COMMAND
def test_a_command_whose_output_cannot_be_written_ends_with_a_message(
    place: Place, command: str, prefix: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        done = place.command(*command.split(), stdout=full, prefix=prefix)
    assert done.returncode == os.EX_IOERR
    assert done.stderr == "visiond: standard output cannot be written: No space left on device.\n"


@EACH_COMMAND
def test_a_reader_that_has_had_enough_ends_a_command_quietly(
    place: Place, command: str, prefix: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        done = place.command(*command.split(), stdout=gone, prefix=prefix)
    assert done.returncode == 128 + signal.SIGPIPE
    assert not done.stderr


def test_a_closed_standard_output_is_refused_with_the_fix(place: Place) -> None:
    done = place.command("list", prefix=["sh", "-c", 'exec "$@" >&-', "sh"])
    assert done.returncode == os.EX_IOERR
    assert done.stderr == "visiond: standard output is closed; redirect it, for example with >/dev/null.\n"


def test_a_standard_error_that_is_full_and_does_not_block_ends_no_work() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    with StandardError(writer, "w") as error:
        assert error.write(b"nobody reads this") == 17
    os.close(reader)


@pytest.mark.parametrize("end", ["2>/dev/full", "2>&-"])
def test_a_standard_error_that_cannot_be_written_ends_no_work(tmp_path: Path, end: str) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    prefix = ["sh", "-c", f'exec "$@" {end}', "sh"]
    assert place.command("run", "--once", prefix=prefix).returncode == 0
    place.assert_kept(DONE=3)
    assert place.command("show", "no such", prefix=prefix).returncode == os.EX_NOINPUT


def test_retry_brings_a_failed_image_back_with_and_without_a_daemon(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("broken.jpg", b"no picture")
    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        told = say(place, "status")
        assert told.startswith("0 done, 1 failed, 0 skipped, 0 pending")
        assert "ocr+yolo+clip+blip/0" in told
        assert say(place, "retry", place.inbox() / "broken.jpg") == "1 image pending again\n"
        daemon.wait_idle(2)
        assert daemon.stop() == 0
    place.assert_kept(FAILED=1)
    retried = place.command("retry", "--all")
    assert retried.stdout == "1 image pending again\n"
    assert retried.stderr == "No daemon is running: `visiond run` processes what is pending.\n"
    assert counts_of(place) == {"PENDING": 1}


def test_a_replaced_version_is_not_retried_and_that_is_reported(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for content in (b"no picture", b"no picture either"):
        place.drop("broken.jpg", content)
        place.run_once()
    told = place.command("retry", "1", "2")
    assert (told.returncode, told.stdout) == (0, "1 image pending again\n")
    assert "1 image not queued: a newer version of the file is there" in told.stderr


def test_gpus_lists_the_gpus_and_plan_the_placement(place: Place) -> None:
    listed = json.loads(say(place, "gpus", "--json"))
    assert all(
        {"name", "total_bytes", "free_bytes", "used_bytes", "compute_capability", "processes"} <= gpu.keys()
        for gpu in listed
    )
    planned = json.loads(say(place, "plan", "--json"))
    assert [stage for segment in planned["segments"] for stage in segment["stages"]] == [
        "ocr",
        "yolo",
        "clip",
        "blip",
    ]
    assert planned["why"]


def test_check_lists_each_problem_with_its_fix_and_what_is_ok(tmp_path: Path) -> None:
    bad = Place(tmp_path)
    bad.inbox().rmdir()
    bad.configure({"binning": {"rules": "no_such_module:rule"}})
    told = bad.command("check", "--quick")
    assert told.returncode == os.EX_CONFIG
    assert f"mkdir -p {bad.inbox()}" in told.stdout
    assert "no_such_module" in told.stdout
    assert f"output.results: {bad.site.results} can be created." in told.stdout
    assert f"configuration: {bad.config}" in told.stdout
    as_json = bad.command("check", "--quick", "--json")
    assert as_json.returncode == os.EX_CONFIG
    errors = [finding["text"] for finding in json.loads(as_json.stdout) if finding["grade"] == "error"]
    assert (
        [line.removeprefix("error   ") for line in told.stdout.splitlines() if line.startswith("error")]
        == errors
        != []
    )
    # It created nothing.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.toml", "staging"]


@pytest.mark.parametrize("target", ["folder", "nowhere", ""], ids=["loop", "dangling", "file"])
@pytest.mark.parametrize(
    ("table", "key"),
    [
        *(("output", key) for key in ("results", "failed", "done", "bins_folder")),
        *(("state", "path"), ("upkeep", "backup_folder")),
    ],
)
def test_check_and_run_name_what_is_in_the_way_of_a_folder(
    tmp_path: Path, table: str, key: str, target: str
) -> None:
    folder = tmp_path / "folder"
    place = Place(tmp_path, {"inbox": [{"on_success": "move"}], "output": {"bins": "copy"}})
    place.configure({table: {key: str(folder)}})
    if target:
        folder.symlink_to(target)
    else:
        folder.touch()
    for asked in (place.command("check", "--quick"), place.run_once()):
        assert asked.returncode == os.EX_CONFIG
        assert f"{table}.{key}: {folder} is a " in asked.stdout + asked.stderr
        assert "Traceback" not in asked.stderr


def test_check_reports_a_refused_configuration_as_json_too(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.config.write_text("[pipeline]\nmax_atempts = 3\n")
    told = place.command("check", "--json")
    assert told.returncode == os.EX_CONFIG
    assert any("max_atempts" in finding["text"] for finding in json.loads(told.stdout))


def test_check_reports_a_port_in_use_unless_its_own_daemon_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        place = Place(tmp_path, {"http": {"listen": address}})
        for status, *command in ((os.EX_CONFIG, "check", "--quick"), (os.EX_IOERR, "run")):
            told = place.command(*command)
            assert told.returncode == status, "the other program may end, so systemd starts it again"
            assert (told.stdout + told.stderr).count(
                f"http.listen: cannot listen on {address}: Address already in use."
            ) == 1
    with Daemon(place):
        running = say(place, "check", "--quick")
    assert f"http.listen: {address} is in use by the daemon of this state folder." in running


def test_once_does_its_work_without_pages_where_another_daemon_has_their_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        place = Place(tmp_path, {"http": {"listen": address}})
        place.drop_many(range(3))
        run = place.run_once()
    assert run.returncode == 0
    assert f"http.listen: cannot listen on {address}: Address already in use" in run.stderr
    place.assert_kept(DONE=3)


def test_check_and_run_agree_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    for device, problem, *command in (
        ("cuda:99", "there is no cuda:99", "run", "--once"),
        ("cuda:99", "there is no cuda:99", "plan"),
        ("cuda:99", "there is no cuda:99", "check"),
        ("gpu0", '"gpu0" is not a device', "check"),
        ("cuda:x", '"cuda:x" is not a device', "check"),
    ):
        told = Place(tmp_path, {"pipeline": {"devices": [device]}}).command(*command)
        assert (told.returncode, problem in told.stdout + told.stderr) == (os.EX_CONFIG, True), (
            device,
            command,
        )
        assert "Traceback" not in told.stderr


def test_check_warns_of_a_configuration_that_every_user_can_change(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert "every user can change" not in say(place, "check", "--quick")
    place.config.chmod(0o666)
    tmp_path.chmod(0o777)
    told = say(place, "check", "--quick")
    for path in (place.config, tmp_path):
        assert f"chmod o-w {path}" in told.replace("\n", " ")
    tmp_path.chmod(0o1777)
    assert f"chmod o-w {tmp_path} " not in f"{say(place, 'check', '--quick')} "
    tmp_path.chmod(0o755)
    (links := tmp_path / "links").mkdir()
    (links / "daemon.toml").symlink_to(place.config)
    links.chmod(0o777)  # who can change the link decides as well
    told = place.command("check", "--quick", "--config", links / "daemon.toml").stdout
    assert f"chmod o-w {links}" in told.replace("\n", " ")


def test_times_beyond_any_calendar_are_shown_as_numbers(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.run_once().returncode == 0
    times = {"verify": 1.36e10, "backup": 1e20, "vacuum": -9e18}
    runs = [{"task": task, "tried_at": at, "succeeded_at": at} for task, at in times.items()]
    (tmp_path / "state" / "upkeep.json").write_text(json.dumps(runs))
    told = say(place, "status")
    assert all(moment in told for moment in ("2400-12-", "1e+20", "-9e+18"))


def test_check_reports_a_damaged_ledger(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(2))
    assert place.run_once().returncode == 0
    assert "ledger.sqlite is readable and has 2 versions of files." in say(place, "check", "--quick")
    place.site.ledger.write_bytes(b"no database" * 400)
    told = place.command("check", "--quick")
    assert told.returncode == os.EX_CONFIG
    assert "run `visiond repair`" in told.stdout


@pytest.mark.parametrize("command", ["check", "run", "plan"])
def test_every_wrong_option_of_a_stage_is_reported_before_any_worker_starts(
    tmp_path: Path, command: str
) -> None:
    options = {
        "ocr": {"backend": "", "options": {"txt_score": 0.5, "max_side": 5}},
        "yolo": {"backend": "", "options": {"conf": "high"}},
    }
    told = Place(tmp_path, {"stages": options}).command(command)
    assert told.returncode == os.EX_CONFIG
    said = told.stdout + told.stderr
    assert "\\n" not in said
    for problem in (
        'stages.ocr.options.txt_score: unknown key; did you mean "text_score"?',
        "stages.ocr.options.max_side: write a whole number from 32 to 4_096, for example 2000 (it is 5)",
        "stages.yolo.options.conf: write a number from 0 to 1, for example 0.25 (it is 'high')",
    ):
        assert said.replace('\\"', '"').count(problem) == 1
    assert "worker" not in told.stderr


def test_check_names_what_the_weights_of_each_stage_are_and_that_their_digests_hold(tmp_path: Path) -> None:
    settings = {
        "stages": {"yolo": {"backend": "ultralytics"}, "hash": {"backend": "phash"}},
        "pipeline": {"stages": ["yolo", "hash"]},
    }
    place = Place(tmp_path, settings)
    told = say(place, "check", "--quick")
    assert "models: yolo: backend ultralytics, float32, from the pack mini." in told
    assert "models: hash: backend phash, float64, without weights." in told
    assert "models: the digests of all files in use are as recorded." in told


def test_models_list_marks_what_is_damaged_and_lists_the_others(tmp_path: Path) -> None:
    place = Place(tmp_path, {"stages": {"ocr": {"backend": "", "model": "./own"}, "clip": {"backend": ""}}})
    for file in ("models/broken/manifest.json", "own/rec/rec.onnx"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{")
    shutil.copytree(MINI, tmp_path / "models" / "gone")
    (tmp_path / "models" / "gone" / "clip" / "model.safetensors").unlink()
    done = place.command("models", "list")
    assert done.returncode == 0
    marked = [line.split()[1] for line in done.stdout.splitlines() if "cannot be used: see below" in line]
    assert marked == [str(tmp_path / name) for name in ("models/broken", "models/gone", "own")]
    for told in (
        "broken/manifest.json is not the manifest",
        "gone/clip has no weights",
        "own/rec/rec.onnx is cut short",
    ):
        assert done.stderr.count(told) == 1
    listed = json.loads(place.command("models", "list", "--json").stdout)
    used = {pack["folder"]: pack["used_for"] for pack in listed}
    assert (used[str(tmp_path / "own")], used[str(MINI)]) == (["ocr"], ["clip"])
    assert [pack["folder"] for pack in listed if not pack["problem"]] == [str(MINI)]


def test_models_list_shows_which_weights_the_configuration_uses_wherever_they_are(tmp_path: Path) -> None:
    elsewhere = shutil.copytree(
        MINI, tmp_path / "elsewhere" / "mine", ignore=shutil.ignore_patterns("manifest.json")
    )
    stages = {"yolo": {"backend": "", "model": str(MINI)}, "clip": {"backend": ""}, "blip": {"backend": ""}}
    place = Place(tmp_path, {"models": {"pack": "elsewhere/mine"}, "stages": stages})
    listed = json.loads(say(place, "models", "list", "--json"))
    used = {(pack["name"], pack["folder"]): pack["used_for"] for pack in listed}
    assert used == {("mini", str(MINI)): ["yolo"], ("mine", str(elsewhere)): ["clip", "blip"]}
    assert min(pack["bytes"] for pack in listed) > 1 << 20
    assert "used for" in say(place, "models", "list")
    assert not (tmp_path / "models").exists(), "what is only listed is not recorded"


def test_models_list_names_a_configured_pack_that_is_not_there(tmp_path: Path) -> None:
    place = Place(tmp_path, {"models": {"pack": "standard"}, "stages": {"yolo": {"backend": ""}}})
    done = place.command("models", "list")
    assert (done.returncode, "mini" in done.stdout) == (0, True)
    assert 'the pack "standard" is not in' in done.stderr
    assert "`visiond models pull" in done.stderr


def test_a_warning_that_asks_a_question_ends_with_its_question_mark(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.run_once().returncode == 0
    place.configure({"lag": {"level": "info"}})
    assert 'did you mean "log"? This command leaves that part out' in place.command("status").stderr


def test_commands_that_only_read_work_without_a_configured_stage_and_warn_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(2))
    assert place.run_once().returncode == 0
    stages = ["ocr", "yolo", "clip", "blip", "quality"]
    segments = [{"stages": stages[:4], "devices": ["cpu"]}, {"stages": ["quality"], "devices": ["cpu"]}]
    place.configure(
        {
            "pipeline": {"stages": stages, "segment": segments},
            "stages": {"quality": {"options": {"clipped": 3}}},
        }
    )
    told = 'no stage "quality" is installed; available are ocr, yolo, clip, blip, classifier, hash. Install its plug-in'
    for command in ("status", "list", "show 00000.ppm", "export -", "verify", "backup copy.sqlite", "gpus"):
        done = place.command(*command.split())
        assert (done.returncode, done.stdout != "") == (0, True), (command, done.stderr)
        assert done.stderr.count(told) == done.stderr.count("Warning: ") == (command != "gpus"), (
            command,
            done.stderr,
        )
    for command in ("run --once", "check", "redo --all", "retry --all", "plan"):
        done = place.command(*command.split())
        assert (done.returncode, told in done.stdout + done.stderr) == (os.EX_CONFIG, True), (
            command,
            done.stderr,
        )
    place.assert_kept(DONE=2)


def test_samples_are_written_with_their_truth(place: Place, tmp_path: Path) -> None:
    assert (
        say(place, "samples", tmp_path / "new", "--count", "2", "--seed", "5")
        == f"2 images in {tmp_path / 'new'}\n"
    )
    truths = [json.loads(line) for line in (tmp_path / "new" / ".truth.jsonl").read_text().splitlines()]
    assert len(truths) == 2
    assert sorted(path.name for path in (tmp_path / "new").glob("[!.]*")) == sorted(
        truth["file"] for truth in truths
    )


def test_the_demo_reports_new_images_and_processes_none_twice(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")  # whose configuration the demo finds: fakes
    for new, done in (("4 new images", "4 done"), ("0 new images", "0 done")):
        told = place.command("demo", place.folder, "--count", "2")
        assert told.returncode == 0, told.stderr
        assert f"{new} in {place.inbox()}" in told.stdout
        assert f"{done}, 0 failed, 0 skipped" in told.stdout
        assert "bus.jpg" in told.stdout


@pytest.mark.parametrize("in_use", [False, True])
def test_the_demo_names_the_address_of_its_page_and_keeps_serving_it(tmp_path: Path, in_use: bool) -> None:
    port = free_port()
    place = Place(tmp_path / "demo", {"page": {"listen": f"127.0.0.1:{port}"}})
    said, command = tmp_path / "said", ["demo", str(place.folder), "--count", "1", "--keep"]
    taken = socket.create_server(("127.0.0.1", port)) if in_use else contextlib.nullcontext()
    with taken, said.open("wb") as output, Forked(command, tmp_path, os.environ, output, output) as demo:
        first = re.compile(r"^(http://\S+)\s", re.M)
        address = wait_for(lambda: first.search(said.read_text()), "the address", process=demo)[1]
        assert (address == f"http://127.0.0.1:{port}") != in_use
        with urllib.request.urlopen(address, timeout=PATIENCE) as page:
            assert page.read().count(b'<article class="card">') == 3
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 0


def test_training_without_its_libraries_names_what_to_install(place: Place, tmp_path: Path) -> None:
    # as if not installed
    (tmp_path / "sitecustomize.py").write_text('import sys; sys.modules["torch"] = None')
    assert "visiond train detector --base rf-detr-small --out my-detector" in say(place, "train", "--help")
    told = place.command("train", "mini", "--out", "pack", prefix=["env", f"PYTHONPATH={tmp_path}"])
    assert told.returncode == os.EX_UNAVAILABLE
    assert "torch" in told.stderr
    assert "pip install 'visiond[train,ultralytics]'" in told.stderr


def test_training_without_its_distribution_names_what_to_type(place: Place, tmp_path: Path) -> None:
    # as if not installed
    (tmp_path / "sitecustomize.py").write_text('import sys; sys.modules["visiond_mini"] = None')
    told = place.command("train", "mini", "--out", "pack", prefix=["env", f"PYTHONPATH={tmp_path}"])
    assert told.returncode == os.EX_UNAVAILABLE
    assert "type: pip install --no-deps ./minipack" in told.stderr
    assert "--blip-seconds" in say(place, "train", "mini", "--help")


def test_each_command_explains_itself_with_an_example() -> None:
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    commands = {
        f"{prefix}{command.name or command.callback.__name__}": inspect.cleandoc(
            command.callback.__doc__ or ""
        )
        for prefix, group in groups
        for command in (group.registered_commands if group else ())
        if command.callback
    }
    assert {
        "run",
        "status",
        "show",
        "retry",
        "redo",
        "export",
        "backup",
        "verify",
        "repair",
        "gpus",
        "plan",
        "check",
        "samples",
        "models list",
        "train mini",
    } <= commands.keys()
    assert [name for name, text in commands.items() if f"Examples:\n  visiond {name}" not in text] == []
    assert [line for text in commands.values() for line in text.splitlines()[1:] if len(line) > 76] == []
    assert all(
        "visiond" in str(group.typer_instance and group.typer_instance.info.help)
        for group in app.registered_groups
    )


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["status", "--jsno"], os.EX_USAGE, "--json"),
        (["export", "--ratio", "A=lots", "no.csv"], os.EX_USAGE, "write it like A=0.4"),
        (["export"], os.EX_USAGE, "For example: visiond export results.parquet"),
        (["export", "-f", "yolo"], os.EX_USAGE, "For example: visiond export --format yolo exported"),
        (["labels", "forget"], os.EX_USAGE, "For example: visiond labels forget"),
        (["export", "--bin", "Z", "no.csv"], os.EX_USAGE, "bins are A, B, C"),
        (["export", "no/such/folder.csv"], os.EX_CANTCREAT, "cannot be written: No such file"),
        (["export", "-f", "parquet", "-"], os.EX_USAGE, "name a file"),
        (["list", "--state", "lost"], os.EX_USAGE, "'pending', 'done', 'failed', 'skipped', 'gone'"),
        (["retry"], os.EX_USAGE, "not both"),
        (["retry", "--all", "broken.jpg"], os.EX_USAGE, "not both"),
        (["export", "all.json"], os.EX_USAGE, "does not end in any of .csv, .jsonl, .parquet, .lance"),
        (["backup", "-"], os.EX_USAGE, "name a file"),
        (["samples", "daemon.toml"], os.EX_CANTCREAT, "daemon.toml cannot be written: File exists"),
        (["demo", "daemon.toml"], os.EX_CANTCREAT, "daemon.toml/inbox cannot be written: Not a directory"),
        (["status", "--config", "no-such.toml"], os.EX_CONFIG, "no-such.toml cannot be read"),
        (["search", "color:red"], os.EX_USAGE, 'quote them: "color:red"'),
        (["page", "--listen", "9465"], os.EX_USAGE, "is not an address"),
    ],
    ids=[
        *(
            "an option",
            "a mix",
            "no file",
            "no data set",
            "no place",
            "a bin",
            "a file",
            "a pipe",
            "a state",
            "nothing to retry",
            "all and one",
            "an ending",
        ),
        *("a backup to a pipe", "samples", "a demo", "a configuration", "a search", "an address"),
    ],
)
def test_a_wrong_command_line_is_reported_with_its_fix_and_its_exit_status(
    place: Place, arguments: list[str], status: int, word: str
) -> None:
    done = place.command(*arguments)
    assert done.returncode == status
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_answers_in_a_folder_whose_path_is_longer_than_a_sockets_address(tmp_path: Path) -> None:
    place = Place(tmp_path, {"state": {"path": "long" * 30}})
    with Daemon(place):
        assert json.loads(say(place, "status", "--json"))["running"]


def test_without_a_ledger_status_reports_where_it_looked_and_how_to_name_another(tmp_path: Path) -> None:
    place = Place(tmp_path)
    fresh = place.command("status")
    assert fresh.returncode == os.EX_NOINPUT
    assert f"There is no ledger at {place.site.ledger} yet; `visiond run` creates it." in fresh.stderr
    assert "name its configuration with --config" in fresh.stderr


def test_a_printed_command_works_when_pasted_in_any_folder(tmp_path: Path) -> None:
    place = Place(tmp_path / "a daemon's [own]")
    place.drop_many(range(1))
    place.drop("broken.jpg", b"no picture")
    command = f"visiond {{}} --config {shlex.quote(str(place.config))}"
    assert f"`{command.format('run')}` creates it" in shell(command.format("status"), tmp_path).stderr
    run = shell(command.format("run --once"), tmp_path)
    assert run.returncode == 1, run.stderr
    ended = run.stdout
    assert f"`{command.format('list --status failed')}` lists the failed images with their reasons" in ended
    for hint in (ended, shell(command.format("retry 00000.ppm"), tmp_path).stderr):
        followed = shell(hint.split("`")[1], tmp_path)
        assert (followed.returncode, str(place.inbox()) in followed.stdout) == (0, True), hint
    place.site.ledger.unlink()
    lost = shell(command.format("status"), tmp_path).stderr
    assert f"run `{command.format('repair')}`" in lost
    assert shell(lost.split("`")[1], tmp_path).stdout == "sidecars: 2 restored\n"


def test_the_commands_that_the_demo_prints_work_when_pasted_in_any_folder(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")  # whose configuration the demo finds: fakes
    told = shell("visiond demo demo --count 1", tmp_path).stdout
    show, export = re.findall(r"visiond (?:show|export) .*", told)
    assert f"inbox  {place.inbox()}\n" in shell(show, Path("/")).stdout
    assert shell(export, Path("/")).stdout == f"3 images in {place.folder / 'results.csv'}\n"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As if it was pasted there: a real shell takes it apart, and `visiond` is forked from the tests' server."""
    split = subprocess.run(
        ["sh", "-c", f"visiond() {{ printf '%s\\0' \"$@\"; }}; {command}"],
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as output:
        return run_forked(split.stdout.split("\0")[:-1], folder, os.environ, Path(output, "told"), PATIENCE)


def test_check_and_status_say_how_a_new_sink_gets_what_is_done_already(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.command("run", "--once").returncode == 0
    place.configure({"output": {"sinks": ["jsonl"]}})

    def checked() -> str:
        return " ".join(place.command("check", "--quick").stdout.split())

    lack = "For 1 image that is DONE already, type `visiond redo --all`"
    assert lack in checked()
    assert f"new sink jsonl gets images that finish from now on. {lack}" in place.command("status").stdout
    assert place.command("redo", "--all").returncode == 0
    assert place.command("run", "--once").returncode == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    assert "redo" not in checked() + place.command("status").stdout


def test_check_names_a_sink_that_cannot_take_records(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    assert "sink jsonl: can take records" in place.command("check", "--quick").stdout
    (tmp_path / "results.jsonl").mkdir()
    checked = place.command("check", "--quick")
    assert f"sink jsonl: {tmp_path}/results.jsonl is not a file that can be read and written" in " ".join(
        checked.stdout.split()
    )
    assert checked.returncode == os.EX_CONFIG


def test_the_sink_jsonl_writes_nothing_to_a_file_of_somebody_else(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    file = tmp_path / "results.jsonl"
    file.write_text('{"mine": 1}\n')
    assert "nothing is written to it: move it away" in " ".join(
        place.command("check", "--quick").stdout.split()
    )
    place.drop_many(range(1))
    assert place.command("run", "--once").returncode == os.EX_IOERR
    assert file.read_text() == '{"mine": 1}\n'
    assert "nothing is written to it: move it away" in place.command("status").stdout

    file.rename(tmp_path / "mine")
    assert place.command("run", "--once").returncode == 0
    assert len(file.read_text().splitlines()) == 1


def test_a_sink_jsonl_that_is_new_warns_of_an_export_that_it_would_append_to(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(1))
    assert place.command("run", "--once").returncode == 0
    assert place.command("export", "results.jsonl").returncode == 0
    place.configure({"output": {"sinks": ["jsonl"]}})
    warning = f"sink jsonl appends to {tmp_path}/results.jsonl, which has lines already"
    assert warning in " ".join(place.command("check", "--quick").stdout.split())
    assert warning in place.command("run", "--once").stderr
    assert warning not in place.command("run", "--once").stderr  # it has begun


def test_status_shows_without_a_daemon_why_a_sink_is_behind(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    file = tmp_path / "results.jsonl"
    file.mkdir()
    place.drop_many(range(2))
    assert place.command("run", "--once").returncode == os.EX_IOERR
    why = f"sink jsonl: 2 records behind: {file} is not a file that can be read and written"
    on = "The next `visiond run` delivers the missing records, or logs why it cannot."
    status = place.command("status").stdout
    assert why in status
    assert on in status
    assert json.loads(place.command("status", "--json").stdout)["sinks"][0]["problem"] == why

    file.rmdir()  # what hindered it is gone, and nobody has tried since
    status = place.command("status").stdout
    assert on in status
    assert why not in status

    place.configure({"output": {"sinks": []}})
    status = place.command("status").stdout
    assert "it is no longer in output.sinks, so the next start forgets it" in status
    assert "jsonl (no longer configured)" in status
    assert on not in status
    [sink] = json.loads(place.command("status", "--json").stdout)["sinks"]
    assert (sink["name"], sink["behind"], sink["configured"]) == ("jsonl", 2, False)

    place.configure({"output": {"sinks": ["jsonl"]}})
    assert place.command("run", "--once").returncode == os.EX_OK
    status = place.command("status").stdout
    assert on not in status
    assert "jsonl" in status


def test_status_does_not_show_a_sink_that_has_everything_and_is_no_longer_configured(tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    place.drop_many(range(2))
    assert place.command("run", "--once").returncode == 0
    place.configure({"output": {"sinks": []}})
    assert "jsonl" not in place.command("status").stdout
    assert json.loads(place.command("status", "--json").stdout)["sinks"] == []


def test_a_current_folder_that_was_removed_is_named_and_no_bug(tmp_path: Path) -> None:
    place = Place(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    run = place.command("list", prefix=["sh", "-c", f'cd {gone}; rmdir {gone}; exec "$@"', "sh"])
    assert run.returncode == os.EX_USAGE
    assert "The current folder was removed" in run.stderr
