"""Second looks in real daemons with fake stages: another model for the images of a bin."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import SLACK_SECONDS, Daemon, Place, picture, seeded, wait_for

PAGES: dict[str, Any] = {
    "name": "pages",
    "when": "A",
    "stage": "ocr",
    "backend": "fake",
    "options": {"salt": 7},
}
IMAGES = 60

MakePlace = Callable[..., Place]


@pytest.fixture
def make_place(tmp_path: Path) -> MakePlace:
    def make(*looks: dict[str, Any], **settings: Any) -> Place:
        tables = [
            {**PAGES, **look, "options": {**PAGES["options"], **look.get("options", {})}} for look in looks
        ]
        place = Place(tmp_path, {"second_look": tables or [PAGES], **settings})
        place.drop_many(range(IMAGES))
        return place

    return make


def sidecars(place: Place) -> dict[str, dict[str, Any]]:
    files = sorted(place.site.results.glob("*.json"))
    return {file.name.removesuffix(".json"): json.loads(file.read_bytes()) for file in files}


def looked(place: Place, name: str = "pages") -> set[str]:
    return {path for path, document in sidecars(place).items() if name in document.get("second_looks", {})}


def of_bin(place: Place, name: str) -> set[str]:
    return {path for path, document in sidecars(place).items() if document["bin"]["name"] == name}


def set_options(place: Place, **options: Any) -> None:
    place.configure({"second_look": [PAGES | {"options": {"salt": 7, **options}}]})


def test_the_images_of_the_bin_get_another_answer_beside_the_first(make_place: MakePlace) -> None:
    place = make_place()
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=IMAGES)
    assert looked(place) == of_bin(place, "A") != set()
    document = sidecars(place)[min(looked(place))]
    look = document["second_looks"]["pages"]
    assert (look["stage"], look["model"] != document["models"]["ocr"]) == ("ocr", True)
    assert look["result"].keys() == document["ocr"].keys()
    assert look["result"] != document["ocr"]


def test_first_looks_do_not_wait_for_second_ones(make_place: MakePlace) -> None:
    place = make_place({"when": "C", "options": {"latency_per_image_seconds": 600.0}})
    with Daemon(place) as daemon:
        wait_for(lambda: len(sidecars(place)) == IMAGES, "all first looks")
        wait_for(lambda: daemon.status()["second_looks"][0]["waiting"], "looks that wait")
        daemon.kill()
    place.assert_kept(DONE=IMAGES)


def test_a_kill_loses_neither_answer(make_place: MakePlace) -> None:
    place, random = make_place({"options": {"latency_per_image_seconds": 0.02}}), seeded()
    for _ in range(4):
        wanted = min(len(looked(place)) + random.randrange(1, 4), len(of_bin(place, "A")) or IMAGES)
        with Daemon(place) as daemon:
            wait_for(lambda n=wanted: len(looked(place)) >= n, "some second looks")
            daemon.kill()
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=IMAGES)
    assert looked(place) == of_bin(place, "A")


def test_an_image_that_kills_the_worker_keeps_its_first_result(make_place: MakePlace) -> None:
    place = make_place({"when": "C", "options": {"fail": {"deadly": "exit"}}})
    numbers = range(1000, 1050)
    for number in numbers:
        place.drop(f"{number}.ppm", picture(number, b"deadly" if number == numbers[0] else b""))
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=IMAGES + len(numbers))
    assert looked(place) == of_bin(place, "C")
    failed = [d for d in sidecars(place).values() if "reason" in d.get("second_looks", {}).get("pages", {})]
    deadly = sidecars(place)["1000.ppm"]
    assert failed == ([deadly] if deadly["bin"]["name"] == "C" else [])


def test_an_answer_that_is_known_is_used_again(make_place: MakePlace) -> None:
    place = make_place()
    assert place.run_once().returncode == 0
    first = sidecars(place)
    set_options(place, fail={"P6": "error"})  # every image, if the model ran
    assert place.command("redo", "--all").returncode == 0
    assert place.run_once().returncode == 0
    assert {path: d.get("second_looks") for path, d in sidecars(place).items()} == {
        path: d.get("second_looks") for path, d in first.items()
    }


def test_an_error_is_tried_again_and_then_named_in_the_sidecar(make_place: MakePlace) -> None:
    place = make_place({"options": {"fail": {"P6": "transient"}}}, pipeline={"max_attempts": 2})
    assert place.run_once().returncode == 0
    looks = [sidecars(place)[path]["second_looks"]["pages"] for path in looked(place)]
    assert looks
    assert {(look["reason"], look["result"]) for look in looks} == {("stage", None)}
    place.assert_kept(DONE=IMAGES)


def test_several_looks_at_one_image_are_all_kept(make_place: MakePlace) -> None:
    same = [
        {"name": "objects", "stage": "yolo"},
        {"name": "third", "stage": "clip"},
        {"name": "fourth", "stage": "blip"},
    ]
    place = make_place({}, *same, {"name": "rest", "when": "C"})
    place.drop_many(range(IMAGES, 300))
    assert place.run_once().returncode == 0
    for name in ("pages", "objects", "third", "fourth"):
        assert looked(place, name) == of_bin(place, "A")
    assert looked(place, "rest") == of_bin(place, "C")
    place.assert_kept(DONE=300)
    assert place.command("verify").returncode == 0


def test_images_that_were_moved_get_it_where_they_are(make_place: MakePlace) -> None:
    place = make_place(inbox=[{"on_success": "move", "settle_seconds": 0.1}])
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=IMAGES)
    assert looked(place) == of_bin(place, "A") != set()


def test_a_new_version_of_a_file_keeps_its_own_sidecar(make_place: MakePlace) -> None:
    place = make_place({"options": {"latency_per_image_seconds": 0.2}})
    with Daemon(place) as daemon:
        wait_for(lambda: len(sidecars(place)) == IMAGES, "all first looks")
        for number in range(IMAGES):
            place.drop(f"{number:05d}.ppm", picture(number, b"new"))
        daemon.wait_idle(2 * IMAGES, 60)
        daemon.kill()
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=2 * IMAGES)
    assert looked(place) == of_bin(place, "A")


def test_a_ledger_that_is_made_again_from_sidecars_has_the_looks(make_place: MakePlace) -> None:
    place = make_place()
    assert place.run_once().returncode == 0
    before = sidecars(place)
    for file in place.site.ledger.parent.glob("ledger.sqlite*"):
        file.unlink()
    assert place.command("repair").returncode == 0
    assert place.command("verify").returncode == 0
    number = min(looked(place))
    assert json.loads(place.command("show", number, "--json").stdout) == before[number]


def test_a_damaged_look_is_found_and_restored_from_its_sidecar(make_place: MakePlace) -> None:
    place = make_place()
    assert place.run_once().returncode == 0
    before = sidecars(place)
    with contextlib.closing(sqlite3.connect(place.site.ledger, isolation_level=None)) as connection:
        connection.execute("UPDATE look SET detail = 'x' WHERE image = (SELECT MIN(image) FROM look)")
    assert place.command("verify").returncode != 0
    assert place.command("repair").returncode == 0
    assert place.run_once().returncode == 0
    assert place.command("verify").returncode == 0
    assert sidecars(place) == before


def test_a_users_function_chooses_the_images(make_place: MakePlace) -> None:
    place = make_place({"when": "chooser:choose"})
    (place.folder / "chooser.py").write_text(
        "def choose(record):\n    return record['objects']['count'] > 3 and record['bin']['name'] != 'A'\n"
    )
    assert place.run_once(modules=place.folder).returncode == 0
    wanted = {
        path for path, d in sidecars(place).items() if d["objects"]["count"] > 3 and d["bin"]["name"] != "A"
    }
    assert looked(place) == wanted != set()


def test_status_and_show_have_them(make_place: MakePlace) -> None:
    place = make_place()
    assert place.run_once().returncode == 0
    [look] = json.loads(place.command("status", "--json").stdout)["second_looks"]
    assert (look["name"], look["stage"], look["waiting"], look["done"]) == (
        "pages",
        "ocr",
        0,
        len(looked(place)),
    )
    assert "second look pages: ocr by fake (float32, " in place.command("show", min(looked(place))).stdout
    assert "pages" in place.command("status").stdout


def test_images_from_before_get_it_by_redo_stale(make_place: MakePlace) -> None:
    place = make_place()
    place.configure({"second_look": []})
    assert place.run_once().returncode == 0
    place.configure({"second_look": [PAGES]})
    stale = place.command("redo", "--stale")
    assert f"{len(of_bin(place, 'A'))} image" in stale.stdout
    assert place.run_once().returncode == 0
    assert looked(place) == of_bin(place, "A") != set()
    assert place.command("redo", "--stale").stdout.startswith("0 images")
    set_options(place, salt=8)  # another model
    assert f"{len(of_bin(place, 'A'))} image" in place.command("redo", "--stale").stdout


def test_a_look_without_workers_stops_alone_and_the_run_says_so(make_place: MakePlace) -> None:
    place = make_place({"when": "C", "batch_size": 1, "options": {"fail": {"P6": "lost"}}})
    run = place.run_once()
    assert (run.returncode != 0, "No worker is left for second look pages" in run.stderr) == (True, True)
    place.assert_kept(DONE=IMAGES)


def test_a_look_whose_model_cannot_be_used_stops_alone(make_place: MakePlace) -> None:
    place = make_place({"options": {"unusable": "it has no weights"}})
    run = place.run_once()
    assert (run.returncode != 0, "it has no weights" in run.stderr) == (True, True)
    place.assert_kept(DONE=IMAGES)
    set_options(place)
    assert place.run_once().returncode == 0
    assert looked(place) == of_bin(place, "A")


def test_a_stop_does_not_wait_for_second_looks(make_place: MakePlace) -> None:
    place = make_place({"when": "C", "options": {"latency_per_image_seconds": 600.0}})
    with Daemon(place) as daemon:
        wait_for(lambda: len(sidecars(place)) == IMAGES, "all first looks")
        wait_for(lambda: daemon.status()["second_looks"][0]["in_flight"], "a look at work")
        started = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started < 15 + SLACK_SECONDS  # drain_seconds are 30
    place.assert_kept(DONE=IMAGES)


def test_looks_wait_while_their_inbox_is_away(make_place: MakePlace) -> None:
    place = make_place({"images_per_second": 0.5})
    inbox, away = place.inbox(), place.folder / "away"
    with Daemon(place):
        wait_for(lambda: len(sidecars(place)) == IMAGES, "all first looks")
        inbox.rename(away)
        inbox.mkdir()  # as a mount point
        wait_for(
            lambda: place.rows("SELECT 1 FROM look WHERE detail LIKE '%not the folder%'"),
            "a look that waits",
        )
    inbox.rmdir()
    away.rename(inbox)
    set_options(place)
    assert place.run_once().returncode == 0
    assert looked(place) == of_bin(place, "A") != set()


def test_bins_that_a_user_has_emptied_stay_empty(make_place: MakePlace) -> None:
    place = make_place({"when": "C", "images_per_second": 1.0}, output={"bins": "link"})
    folder = place.site.bins / "C"
    with Daemon(place):
        wait_for(lambda: len(sidecars(place)) == IMAGES, "all first looks")
        first = looked(place)
        for link in folder.iterdir():
            link.unlink()
        wait_for(lambda: len(looked(place)) > len(first) + 1, "two more looks")
        assert {link.name for link in folder.iterdir()} <= first


def test_a_limit_is_also_one_of_second_looks(make_place: MakePlace) -> None:
    place = make_place({"when": "C"})
    place.configure({"second_look": []})
    assert place.command("run", "--once", "--limit", "50").returncode == 0
    place.configure({"second_look": [PAGES | {"when": "C"}]})
    assert place.command("redo", "--stale").returncode == 0
    assert place.command("run", "--once", "--limit", "5").returncode == 0
    assert len(looked(place)) <= 5
