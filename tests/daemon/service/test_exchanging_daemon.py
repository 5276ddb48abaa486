"""A real daemon that exchanges models while it works, is stopped meanwhile, or gets models that do not load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.contract.invented import VARIANTS
from stages.registry import fake
from tests.daemon_process import Daemon, Place, picture, wait_for, with_pauses
from tests.faults.stations import stations_of


def bytes_of(number: int) -> bytes:
    """Every fifth image has the bytes of an earlier one."""
    return picture(number if number % 5 else number // 2)


def open_place(folder: Path, stations: int) -> Place:
    options = {"latency_per_image_seconds": 0.005}
    pipeline = {"stations": stations, "workers_per_device": stations}
    return Place(folder, {"pipeline": pipeline, "stages": {"yolo": {"options": options}}})


def want(place: Place, salt: int, **options: Any) -> None:
    """Another model for yolo: its answers depend on the salt."""
    place.configure({"stages": {"yolo": {"options": {"salt": salt, **options}}}})


def drop(place: Place, numbers: range) -> None:
    for number in numbers:
        place.drop(f"{number:05d}.ppm", bytes_of(number))


def makers(place: Place) -> list[str]:
    """The fingerprints of yolo's models, the first one first."""
    return [row[0] for row in place.rows("SELECT fingerprint FROM model WHERE stage = 'yolo' ORDER BY id")]


def answered_by_others(place: Place, images: int) -> list[int]:
    """Images whose sidecar names another model than the one that gave its answer."""
    salts, wrong = {fingerprint: salt for salt, fingerprint in enumerate(makers(place))}, []
    for number in range(images):
        document = place.sidecar(f"{number:05d}.ppm")
        variant = (zlib.crc32(bytes_of(number)) + salts[document["models"]["yolo"]]) % VARIANTS
        answer = json.loads(msgspec.json.encode(fake.answer("yolo", variant, 8, 8, frozenset())))
        if document["objects"] != answer:
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("losses", [False, True], ids=["whole", "losses"])
def test_an_exchange_under_load_loses_nothing_and_names_the_models_that_answered(
    tmp_path: Path, losses: bool
) -> None:
    place = open_place(tmp_path, 2)
    drop(place, range(images := 100))
    with Daemon(place, **with_pauses({"daemon.workers.lane.QUEUE_IMAGES": 16})) as daemon:
        daemon.wait_until(lambda s: s["ended_in_this_run"] > 20, "progress")
        # Chosen now, because an exchange ends the first station's process before it starts another one.
        victims = [daemon.workers()[0], stations_of(place)[1]]  # a worker, and the station of the other one
        want(place, 1)
        assert (
            "Models are being exchanged, because of: stages.yolo.options." in place.command("reload").stdout
        )
        for victim in victims if losses else []:
            with contextlib.suppress(ProcessLookupError):  # the worker, if its station has ended already
                os.kill(victim, signal.SIGKILL)
        while (status := daemon.status())["exchange"]["outcome"] == "running":
            if status["pending"] < 60:  # so that no station is without work
                drop(place, range(images, images := images + 30))
            assert losses or any(worker["state"] == "ready" for worker in status["workers"])
        drop(place, range(images, images := images + 20))
        daemon.wait_idle(images)
        assert status["exchange"]["outcome"] == "done"
        assert daemon.metric("visiond_exchanges_total", outcome="done") == 1
        assert daemon.stop() == 0
    place.assert_kept(DONE=images)
    assert json.loads(place.command("verify", "--json").stdout)["counts"] == {"whole": images}
    assert answered_by_others(place, images) == []
    made = [place.sidecar(f"{number:05d}.ppm")["models"]["yolo"] for number in range(images)]
    assert sorted(set(made)) == sorted(makers(place))
    assert set(made[-20:]) == {makers(place)[1]}


@pytest.mark.parametrize("stations", [1, 2])
def test_models_that_do_not_load_leave_the_daemon_with_those_that_it_had(
    tmp_path: Path, stations: int
) -> None:
    place = open_place(tmp_path, stations)
    with Daemon(place) as daemon:
        want(place, 1, unusable="it has no layer called head")
        place.command("reload")
        drop(place, range(60))
        line = daemon.wait_event("the new models do not load; the stations go back to those that they had")
        assert line["why"].endswith("it has no layer called head")  # perhaps with the name of the segment
        daemon.wait_idle(60)
        status = daemon.wait_until(lambda s: s["exchange"]["outcome"] != "running", "the way back")
        assert status["exchange"]["outcome"] == "undone"
        assert "the daemon works with those that it had: " in place.command("status").stdout
        if stations == 1:
            want(place, 1, unusable="")
            place.command("reload")
            daemon.wait_until(lambda s: s["exchange"]["outcome"] == "done", "the exchange")
        assert daemon.stop() == 0
    place.assert_kept(DONE=60)


def test_models_that_are_not_there_change_nothing(tmp_path: Path) -> None:
    place = open_place(tmp_path, 1)
    with Daemon(place) as daemon:
        workers = daemon.workers()
        place.configure(
            {"stages": {"yolo": {"backend": "", "model": "./nothing"}}, "log": {"level": "debug"}}
        )
        refused = place.command("reload")
        assert (refused.returncode, "nothing" in refused.stderr) == (os.EX_CONFIG, True)
        status = daemon.status()
        assert status["exchange"]["outcome"] == "refused"
        assert "nothing" in status["exchange"]["problem"]
        assert daemon.workers() == workers
        assert not list(daemon.events("configuration reloaded"))
        assert daemon.stop() == 0


@pytest.mark.parametrize(("stations", "stop"), [(1, "SIGTERM"), (2, "SIGTERM"), (1, "SIGKILL")])
def test_a_stop_in_the_middle_of_an_exchange_loses_nothing(tmp_path: Path, stations: int, stop: str) -> None:
    place = open_place(tmp_path, stations)
    drop(place, range(200))
    with Daemon(place) as daemon:
        daemon.wait_until(lambda s: s["ended_in_this_run"] > 20, "progress")
        want(place, 1, load_seconds=600)
        place.command("reload")
        loading = {"loading"} if stations == 1 else {"loading", "ready"}
        daemon.wait_until(lambda s: {w["state"] for w in s["workers"]} == loading, "a station that loads")
        daemon.signal(signal.Signals[stop])
        assert daemon.wait_end() == (0 if stop == "SIGTERM" else -signal.SIGKILL)
    if stop == "SIGTERM":  # after the other, the next start publishes what is only in the ledger
        assert place.judge(finished=False).problems == []
    want(place, 1, load_seconds=0)
    assert place.run_once().returncode == 0
    place.assert_kept(DONE=200)
    assert answered_by_others(place, 200) == []


def test_a_reload_takes_an_exchange_back_whose_models_are_still_loading(tmp_path: Path) -> None:
    place = open_place(tmp_path, 2)
    with Daemon(place) as daemon:
        want(place, 1, load_seconds=600)
        place.command("reload")
        daemon.wait_until(lambda s: {"loading"} <= {w["state"] for w in s["workers"]}, "a station that loads")
        want(place, 0, load_seconds=0)
        drop(place, range(30))
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: len(list(daemon.events("configuration reloaded"))) == 2, "the second reload")
        daemon.wait_until(lambda s: s["exchange"]["outcome"] == "done", "the first models again")
        daemon.wait_idle(30)
        assert daemon.stop() == 0
    place.assert_kept(DONE=30)
    assert answered_by_others(place, 30) == []
