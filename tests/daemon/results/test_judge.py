from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from daemon.core.jobs import Attempt, Content, Ending, Failure, JobStatus
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.results.judge import LONGEST_PAUSE_SECONDS, Judge, Selection
from stages.contract.base import Reason
from stages.contract.binning import Rule, Thresholds, load_rule
from stages.registry import fake
from stages.registry.registry import ORDER
from tests.makers import done, make_attempt, make_job, make_outputs

NOW, STEADY = 1e6, 2e6
DOCS = (Path(__file__).parents[3] / "docs" / "results.md").read_text().partition("### A rule of your own")[2]


def end(attempt: Attempt, **settings: Any) -> Ending:
    [ending] = Judge(Thresholds(), clock=lambda: NOW, steady=lambda: STEADY, **settings).endings([attempt])
    assert ending.job is attempt.job
    assert ending.at == NOW
    return ending


def answered(variant: int = 3, outputs: dict[str, Output] | None = None, **fields: Any) -> Attempt:
    return make_attempt(make_job(**fields), outputs or make_outputs(variant))


def stumbled(attempts: int = 0) -> Attempt:
    return Attempt(make_job(attempts=attempts), failure=Failure(Reason.STAGE, "it stumbled", transient=True))


def broken(path: bytes, reason: Reason) -> Attempt:
    return Attempt(make_job(path), failure=Failure(reason, "so it is"))


# With results


@pytest.mark.parametrize(("variant", "bin_name"), [(3, "A"), (6, "B"), (0, "C")])
def test_an_image_with_its_results_is_done_and_in_its_bin(variant: int, bin_name: str) -> None:
    ending = end(answered(variant, attempts=1))
    assert (ending.status, ending.bin, ending.attempts, ending.failure) == (JobStatus.DONE, bin_name, 2, None)
    criteria = msgspec.json.decode(ending.criteria)
    assert criteria["A"]["text_boxes"] == {"value": variant % 5, "threshold": 2, "passed": variant % 5 > 2}
    assert set(criteria) == {"A", "B", "C"}


def test_jobs_end_in_the_order_they_came() -> None:
    attempts = [answered(), Attempt(make_job(), gone=True), stumbled()]
    endings = Judge(Thresholds()).endings(attempts)
    assert [ending.job for ending in endings] == [attempt.job for attempt in attempts]
    assert [ending.status for ending in endings] == [JobStatus.DONE, JobStatus.GONE, JobStatus.PENDING]


def test_a_rule_of_the_users_chooses_the_bin_and_the_criteria_stay() -> None:
    shown: list[dict[str, Any]] = []
    ending = end(answered(path=b"in/\xff.jpg"), rule=lambda record: shown.append(record) or "Receipts-2")
    assert (ending.status, ending.bin) == (JobStatus.DONE, "Receipts-2")
    assert msgspec.json.decode(ending.criteria)["A"]["text_boxes"]["passed"] is True
    [record] = shown
    assert (record["path"], record["width"], record["height"]) == ("in/\udcff.jpg", 640, 480)
    assert record["ocr"]["count"] == 3
    assert record["blip"]["text"] == "a picture of 3 things"
    assert record["bin"]["name"] == "A"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Rule]:
    """Write a module of the user from this text, and load a rule from it as a configuration names it."""

    def write(text: str, name: str) -> Rule:
        (tmp_path / "users_rules.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "users_rules", raising=False)
        rule: Callable[[dict[str, Any]], str] = load_rule(f"users_rules:{name}")
        return rule

    return write


def test_the_docs_rule_sorts_as_the_docs_say(load: Callable[[str, str], Rule]) -> None:
    [(text, table)] = re.findall(r"```python\n(.*?)```\n\n```toml\n(.*?)```", DOCS, re.DOTALL)
    rule = load(text, tomllib.loads(table)["binning"]["rules"].partition(":")[2])
    answer = fake.answer("ocr", 1, 640, 480, frozenset())
    a_street = Output(b'{"text":"a street","similarity":0.5}', 0.0)
    a_total = Output(msgspec.json.encode(answer).replace(b"line 1.0", b"TOTAL: 12.90"), 0.0)
    empty = make_outputs(0)
    street, receipt = answered(outputs=empty | {"blip": a_street}), answered(outputs=empty | {"ocr": a_total})
    sign = answered(outputs=make_outputs(5) | {"yolo": empty["yolo"]}, path=b"old/signs/a.jpg")
    assert [end(each, rule=rule).bin for each in (receipt, answered(3), sign, street, answered(0))] == [
        "receipts",
        "pets",
        "signs",
        "streets",
        "C",
    ]
    assert end(answered(outputs=make_outputs(0, ["yolo", "clip", "blip"])), rule=rule).bin == "C"


@pytest.mark.anyio
async def test_a_rule_is_shown_what_the_sidecar_will_have_under_its_names(
    ledger: Ledger, inbox: Path
) -> None:
    shown: list[dict[str, Any]] = []
    ending = done(make_job(b"in/a.jpg"))
    attempt = Attempt(ending.job, ending.content)
    end(attempt, rule=lambda record: shown.append(record) or "A", inboxes={1: os.fsencode(inbox)})
    sidecar = msgspec.json.decode(ledger.record_of(ending).sidecar)
    [record] = shown
    assert {key: record[key] for key in ("id", "source", "ocr", "objects", "clip", "caption", "timings")} == {
        key: sidecar[key] for key in ("id", "source", "ocr", "objects", "clip", "caption", "timings")
    }
    assert (record["yolo"], record["blip"]) == (record["objects"], record["caption"])


def test_the_docs_name_every_key_of_the_record() -> None:
    shown: list[dict[str, Any]] = []
    end(answered(), rule=lambda record: shown.append(record) or "A")
    documented = {
        name
        for keys in re.findall(r"^\| (`.*?) \|", DOCS, re.MULTILINE)
        for name in re.findall("`(.*?)`", keys)
    }
    assert documented >= shown[0].keys()


RULES = """
def pick(record):
    return read(record)

def read(record):
    return record["faces"]["count"]

def divide(record):
    return int("x")
"""


def test_a_rule_that_raises_fails_the_image_for_good_and_says_how_and_where(
    load: Callable[[str, str], Rule],
) -> None:
    ending = end(answered(), rule=load(RULES, "pick"))
    known = "bin, blip, caption, clip, height, id, objects, ocr, path, source, timings, width, yolo"
    assert ending.status is JobStatus.FAILED
    assert ending.failure == Failure(
        Reason.RULE, f"KeyError: 'faces' (users_rules.py, line 6); the record has {known}"
    )
    assert end(answered(), rule=load(RULES, "divide")).failure == Failure(
        Reason.RULE, "ValueError: invalid literal for int() with base 10: 'x' (users_rules.py, line 9)"
    )


def test_each_kind_of_error_of_a_rule_is_logged_once_with_its_traceback(
    load: Callable[[str, str], Rule],
) -> None:
    rules = [load(RULES, name) for name in ("pick", "divide")]
    judge = Judge(Thresholds(), rule=lambda record: rules[record["bin"]["name"] == "C"](record))
    with structlog.testing.capture_logs() as logged:
        judge.endings([answered(variant) for variant in (3, 3, 0, 0)])
    assert [type(entry["exc_info"]) for entry in logged] == [KeyError, ValueError]


def test_a_result_that_a_rule_cannot_be_shown_is_not_the_rules_fault() -> None:
    attempt = answered(outputs=make_outputs() | {"clip": Output(b"{", 0.0)})
    ending = end(attempt, rule=lambda _: "A")
    assert ending.failure is not None
    assert ending.failure.reason is Reason.STAGE


@pytest.mark.parametrize("name", [None, 3, "", "../up", "a/b", ".hidden", "x" * 65, "ä", "A\n"])
def test_a_rule_that_returns_no_plain_name_fails_the_image(name: Any) -> None:
    ending = end(answered(), rule=lambda _: name)
    assert ending.status is JobStatus.FAILED
    assert ending.failure is not None
    assert ending.failure.reason is Reason.RULE
    assert repr(name) in ending.failure.detail


# Without


def test_a_file_that_changed_is_gone_and_not_tried() -> None:
    ending = end(Attempt(make_job(attempts=1), gone=True))
    assert (ending.status, ending.attempts, ending.failure) == (JobStatus.GONE, 1, None)


def test_an_error_that_stays_fails_at_once() -> None:
    ending = end(broken(b"a.jpg", Reason.PIXELS))
    assert (ending.status, ending.attempts) == (JobStatus.FAILED, 1)
    assert ending.failure == Failure(Reason.PIXELS, "so it is")


def test_an_error_that_may_pass_is_tried_again_each_time_twice_as_late() -> None:
    endings = [end(stumbled(attempts), max_attempts=9, retry_seconds=5.0) for attempts in range(4)]
    assert {ending.status for ending in endings} == {JobStatus.PENDING}
    assert [ending.not_before - STEADY for ending in endings] == [5.0, 10.0, 20.0, 40.0]
    assert [ending.attempts for ending in endings] == [1, 2, 3, 4]


def test_the_pause_has_a_bound() -> None:
    assert end(stumbled(attempts=40), max_attempts=100).not_before == STEADY + LONGEST_PAUSE_SECONDS


def test_an_image_whose_inbox_is_away_is_tried_until_it_can_be_read() -> None:
    why = Failure(Reason.UNREADABLE, "Connection timed out", transient=True, away=True)
    away = Attempt(make_job(attempts=2), failure=why)
    ending = end(away, max_attempts=3, retry_seconds=5.0)
    assert (ending.status, ending.attempts, ending.not_before) == (JobStatus.PENDING, 2, STEADY + 5.0)


def test_after_the_last_attempt_the_image_fails() -> None:
    ending = end(stumbled(attempts=2), max_attempts=3)
    assert (ending.status, ending.attempts, ending.not_before) == (JobStatus.FAILED, 3, 0.0)
    assert end(stumbled(), max_attempts=1).status is JobStatus.FAILED


@pytest.mark.parametrize(
    ("path", "reason", "status"),
    [
        (b"readme.txt", Reason.NOT_AN_IMAGE, JobStatus.SKIPPED),
        (b"folder.jpg/no suffix", Reason.NOT_AN_IMAGE, JobStatus.SKIPPED),
        (b".jpg", Reason.NOT_AN_IMAGE, JobStatus.SKIPPED),
        (b"batch.ready", Reason.EMPTY, JobStatus.SKIPPED),
        (b"archive.zip", Reason.BYTES, JobStatus.SKIPPED),
        (b"scan.JPG", Reason.NOT_AN_IMAGE, JobStatus.FAILED),
        (b"\xff.webp", Reason.NOT_AN_IMAGE, JobStatus.FAILED),
        (b"readme.txt", Reason.TRUNCATED, JobStatus.FAILED),
        (b"drawing.svg", Reason.FORMAT, JobStatus.FAILED),
    ],
)
def test_only_a_file_that_is_not_an_image_and_not_named_as_one_is_skipped(
    path: bytes, reason: Reason, status: JobStatus
) -> None:
    assert end(broken(path, reason)).status is status


def test_a_result_that_cannot_be_read_fails_its_image_alone() -> None:
    bad = Output(b'{"lines":[],"count":0,"area_ratio":null}', 0.0)
    ending = end(answered(outputs=make_outputs() | {"ocr": bad}))
    assert (ending.status, ending.failure and ending.failure.reason) == (JobStatus.FAILED, Reason.STAGE)


def test_a_failure_counts_more_than_results() -> None:
    attempt = answered()
    attempt.failure = Failure(Reason.MEMORY, "too large for the GPU")
    assert end(attempt).status is JobStatus.FAILED


# Cascade


def cascade(stages: list[str], variant: int, *, on: bool = True) -> bool:
    content = Content(outputs=make_outputs(variant, stages))
    return Judge(Thresholds(), cascade=ORDER if on else ()).is_decided(content)


def test_in_a_cascade_the_first_bin_that_passes_decides() -> None:
    assert cascade(["ocr"], 3)
    assert cascade(["ocr", "yolo"], 6)
    assert not cascade(["ocr"], 6)
    assert not cascade(["ocr", "yolo"], 0)
    assert not cascade([], 3)


def test_b_decides_nothing_while_a_may_still_come() -> None:
    assert not cascade(["yolo"], 6)  # as when only the text model has changed
    judge = Judge(Thresholds(), cascade=["yolo", "clip"])
    assert judge.is_decided(Content(outputs=make_outputs(6, ["yolo"])))


def test_in_full_mode_nothing_is_decided_early() -> None:
    assert not cascade(["ocr"], 3, on=False)


def test_an_image_that_skipped_stages_says_so_in_its_criteria() -> None:
    ending = end(answered(outputs=make_outputs(3, ["ocr"])), cascade=ORDER)
    assert ending.bin == "A"
    assert msgspec.json.decode(ending.criteria)["C"]["clip_similarity"] == {
        "value": None,
        "threshold": 0.25,
        "passed": None,
    }


# Second looks


def looks_of(selection: Selection, variant: int = 3, digest: bytes = b"\1" * 32) -> tuple[str, ...]:
    attempt = Attempt(make_job(), Content(digest, outputs=make_outputs(variant)))
    return end(attempt, looks=[selection]).looks


@pytest.mark.parametrize(("variant", "names"), [(3, ("pages",)), (6, ()), (0, ())])
def test_a_second_look_is_for_the_images_of_its_bin(variant: int, names: tuple[str, ...]) -> None:
    assert looks_of(Selection("pages", "A"), variant) == names


def test_a_function_chooses_the_images_by_their_record() -> None:
    seen = []

    def choose(record: dict[str, Any]) -> bool:
        seen.append(record["bin"]["name"])
        return bool(record["objects"]["count"])

    assert looks_of(Selection("more", "", choose)) == ("more",)
    assert seen == ["A"]


def test_an_error_in_the_function_costs_only_the_second_look() -> None:
    def choose(record: dict[str, Any]) -> bool:
        raise KeyError("texts")

    with structlog.testing.capture_logs() as logs:
        ending = end(answered(), looks=[Selection("more", "", choose)])
    assert (ending.status, ending.looks) == (JobStatus.DONE, ())
    assert [log["look"] for log in logs] == ["more"]


def test_a_share_is_of_the_digests() -> None:
    chosen = [bool(looks_of(Selection("pages", "A", share=0.25), digest=bytes([n] * 32))) for n in range(256)]
    assert chosen == [True] * 64 + [False] * 192
    assert looks_of(Selection("pages", "A", share=1.0), digest=b"\xff" * 32) == ("pages",)
    assert looks_of(Selection("pages", "A", share=0.0), digest=b"\0" * 32) == ()


def test_an_image_that_failed_gets_none() -> None:
    assert end(broken(b"a.jpg", Reason.HEADER), looks=[Selection("pages", "A")]).looks == ()
