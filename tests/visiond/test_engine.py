"""The stages as a library: names and bytes in, rows out, whatever the images do to the workers."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import Config, parse
from daemon.core.errors import ModelsUnusable, NoWorkersLeft
from daemon.system.children import descendants
from daemon.workers import pool
from stages.contract import processes
from tests.daemon_process import DEFAULTS, PATIENCE, STAGES, caption_of, picture, wait_for
from visiond.engine import Annotator, NotLoaded

Open = Callable[..., Annotator]


def configure(folder: Path, **options: Any) -> Config:
    """A configuration with fake stages. options: of OCR's."""
    tables = {name: {"backend": "fake"} for name in STAGES} | {"ocr": {"backend": "fake", "options": options}}
    return parse({"pipeline": DEFAULTS["pipeline"], "stages": tables}, folder)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    held = []

    def open_annotator(**options: Any) -> Annotator:
        held.append(Annotator(configure(tmp_path, **options)))
        held[-1].load()
        return held[-1]

    yield open_annotator
    for annotator in held:
        annotator.close()


@pytest.fixture(scope="module")
def annotator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Annotator]:
    """One without faults, for the tests that leave its workers as they are."""
    with closing(Annotator(configure(tmp_path_factory.mktemp("annotator")))) as opened:
        opened.load()
        yield opened


def outcomes(rows: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(row["status"], row["reason"]) for row in rows]


def test_each_image_gets_the_row_of_its_own_bytes_in_the_order_of_the_call(
    annotator: Annotator,
) -> None:
    images = [(f"{number}.ppm", picture(number)) for number in range(300)]
    rows = annotator.annotate(images, "/photos")
    assert [row["path"] for row in rows] == [name for name, _ in images]
    assert [row["caption"] for row in rows] == [caption_of(data) for _, data in images]
    assert list(rows[0])[: len(annotator.rows.kinds)] == list(annotator.rows.kinds)
    assert (rows[0]["inbox"], rows[0]["location"]) == ("/photos", "/photos/0.ppm")
    assert {*outcomes(rows)} == {("DONE", None)}


def test_a_bad_image_is_a_row_with_its_reason(annotator: Annotator) -> None:
    bad: list[tuple[str, bytes | OSError]] = [("text.jpg", b"plain text"), ("notes", b"plain text")]
    bad.append(("gone.png", FileNotFoundError(2, "gone")))
    rows = annotator.annotate([*bad, (b"\xff.ppm", picture(1))])
    assert outcomes(rows) == [
        ("FAILED", "not-an-image"),
        ("SKIPPED", "not-an-image"),
        ("FAILED", "unreadable"),
        ("DONE", None),
    ]
    assert rows[2]["detail"] == "gone"
    assert rows[3]["path_base64"]


def test_an_image_that_kills_its_workers_is_a_row_and_costs_no_other_image(opened: Open) -> None:
    annotator = opened(fail={"deadly": "segfault"})
    images = [(f"{n}.ppm", picture(n, b"deadly" if n == 7 else b"")) for n in range(20)]
    rows = annotator.annotate(images)
    assert [row["path"] for row in rows if row["status"] != "DONE"] == ["7.ppm"]
    assert rows[7]["reason"] == "poison"
    assert outcomes(annotator.annotate(images[:3])) == [("DONE", None)] * 3


def test_an_error_that_may_pass_is_tried_again_as_often_as_configured(opened: Open) -> None:
    rows = opened(fail={"shaky": "transient"}).annotate([("a.ppm", picture(1, b"shaky"))])
    assert outcomes(rows) == [("FAILED", "stage")]


def test_no_more_bytes_are_taken_from_an_iterator_than_there_is_room_for(opened: Open) -> None:
    annotator = opened(latency_per_image_seconds=0.002)
    most = annotator.config.pipeline.slab_bytes
    calls = annotator._check()
    held = []

    def images() -> Iterator[tuple[str, bytes]]:
        for number in range(40):
            held.append(calls._held_bytes)
            yield f"{number}.ppm", picture(number, bytes(most // 8))

    assert len(annotator.annotate(images())) == 40
    assert most // 2 < max(held) <= most
    assert calls._held_bytes == 0


def test_a_call_whose_iterator_fails_leaves_nothing_behind(annotator: Annotator) -> None:
    def images() -> Iterator[tuple[str, bytes]]:
        yield "a.ppm", picture(1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        annotator.annotate(images())
    assert annotator._check()._held_bytes == 0
    assert outcomes(annotator.annotate([("b.ppm", picture(2))])) == [("DONE", None)]


@pytest.mark.parametrize("is_full", [False, True], ids=["for the last image", "for room"])
def test_a_stop_ends_a_call_that_waits_for_a_stage_that_hangs(opened: Open, is_full: bool) -> None:
    """Nothing wakes the call, as after a signal."""
    annotator = opened(fail={"hangs": "hang"})
    most = annotator.config.pipeline.slab_bytes
    calls, stops = annotator._check(), list[bool]()

    def images() -> Iterator[tuple[str, bytes]]:
        yield "0.ppm", picture(0)
        wait_for(lambda: not calls._places, "the first image")
        for number in range(1, 6 if is_full else 2):
            yield f"{number}.ppm", picture(number, b"hangs" + bytes(most // 4 if is_full else 0))

    def stop() -> None:
        wait_for(lambda: calls._held_bytes > (most / 2 if is_full else 0), "the call to wait")
        stops.append(True)

    threading.Thread(target=stop).start()
    assert [place for place, _ in annotator.collect(images(), {}, lambda: stops)] == [0]
    assert calls._held_bytes == 0


def test_an_image_is_answered_as_soon_as_it_has_ended(opened: Open) -> None:
    """Also while the caller has images left, and while others hang."""
    annotator = opened(fail={"hangs": "hang"})
    calls, answered = annotator._check(), list[int]()

    def images() -> Iterator[tuple[str, bytes]]:
        yield "0.ppm", picture(0)
        wait_for(lambda: not calls._places, "the first image")
        yield "1.ppm", picture(1)
        assert answered == [0]
        wait_for(lambda: not calls._places, "the second image")
        yield "2.ppm", picture(2, b"hangs")

    for place, record in annotator.collect(images(), {}, lambda: 1 in answered):
        assert record.digest == hashlib.sha256(picture(place)).digest()
        answered.append(place)
    assert answered == [0, 1]


def test_workers_that_are_lost_while_a_caller_is_busy_end_its_call_with_their_error(opened: Open) -> None:
    annotator = opened()
    calls = annotator._check()

    def images() -> Iterator[tuple[str, bytes]]:
        yield "0.ppm", picture(0)
        wait_for(lambda: not calls._places, "the first image")
        calls.fail(NoWorkersLeft())
        yield from ((f"{number}.ppm", picture(number)) for number in range(1, 4))

    with pytest.raises(NoWorkersLeft):
        list(annotator.collect(images(), {}, bool))


def test_threads_share_an_annotator(annotator: Annotator) -> None:
    found = {}

    def work(thread: int) -> None:
        images = [(f"{n}.ppm", picture(n)) for n in range(thread * 100, thread * 100 + 100)]
        rows = annotator.annotate(images)
        found[thread] = [row["caption"] for row in rows] == [caption_of(data) for _, data in images]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == dict.fromkeys(range(4), True)


def test_models_that_cannot_be_built_are_reported_by_load(tmp_path: Path) -> None:
    with pytest.raises(ModelsUnusable, match="no such weights"):
        Annotator(configure(tmp_path, unusable="no such weights")).load()


def test_a_call_ends_with_the_error_when_no_worker_is_left(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BACKOFF_SECONDS": 0.001, "QUICK_DEATHS": 2, "LONE_DEATHS": 2}.items():
        monkeypatch.setattr(pool, name, value)
    with pytest.raises(NoWorkersLeft):
        opened(fail={"P6": "exit"}).annotate([(f"{n}.ppm", picture(n)) for n in range(20)])


def test_it_can_be_used_only_while_it_is_loaded_and_in_its_own_process(opened: Open) -> None:
    annotator = opened()
    copy = pickle.loads(pickle.dumps(annotator))
    with pytest.raises(NotLoaded, match="no workers"):
        copy.annotate([])
    annotator._process = 1
    with pytest.raises(NotLoaded, match="another process"):
        annotator.annotate([])
    annotator._process = os.getpid()
    annotator.close()
    with pytest.raises(NotLoaded):
        annotator.annotate([("a.ppm", picture(1))])
    annotator.load()
    assert outcomes(annotator.annotate([("a.ppm", picture(1))])) == [("DONE", None)]


HOLDER = """
import sys, threading
from daemon.config.loading import Config
from visiond.engine import Annotator

def load():
    Annotator(Config.model_validate_json(sys.argv[1])).load()
    print("loaded", flush=True)

threading.Thread(target=load).start()  # which ends at once: the workers must not end with it
sys.stdin.read()
"""


def test_its_workers_live_as_long_as_the_process_that_holds_it(tmp_path: Path) -> None:
    config = configure(tmp_path).model_dump_json()
    holder = subprocess.Popen(
        processes.python("-c", HOLDER, config),
        env=processes.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout
    with holder:
        assert holder.stdout.readline() == b"loaded\n"
        workers = list(descendants(holder.pid))
        assert workers
        assert all(map(is_alive, workers))
        holder.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, workers)), "the workers to end")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
