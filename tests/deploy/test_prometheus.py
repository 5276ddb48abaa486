"""A real Prometheus scrapes a real daemon with fake stages, and answers every query of the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import PATIENCE, Daemon, Place, free_port, picture, wait_for
from tests.deploy.queries import FOLDER, Query, queries

CONFIG = FOLDER.parent / "prometheus" / "prometheus.yml"
PROMETHEUS = shutil.which("prometheus") or ""
FAULTS = {"STUMBLE": "transient", "CRASH": "exit", "CROWD": "oom"}
NEEDS_A_GPU = {"GPU memory", "GPU utilization"}

pytestmark = pytest.mark.skipif(
    not PROMETHEUS, reason="there is no prometheus on this machine (Debian: apt install prometheus)"
)


class Prometheus:
    """A running Prometheus, queried over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE):
                return True
        except urllib.error.HTTPError as error:  # 503
            error.close()
        except urllib.error.URLError:  # it does not listen yet
            pass
        return False

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that answer a query. Raises AssertionError for an invalid query."""
        question = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query?{question}", timeout=PATIENCE) as answer:
                samples: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return samples
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None

    def value(self, query: str) -> float:
        """The sum of the answer's numbers; 0 when there is none."""
        return sum(float(sample["value"][1]) for sample in self.ask(query))

    def wait_for(self, query: str, least: float) -> None:
        wait_for(lambda: self.value(query) >= least, f"{query} ≥ {least:g}")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a daemon with good images, bad images,
    and every fault of the fake stages."""
    folder = tmp_path_factory.mktemp("scraped")
    port, own_port = free_port(), free_port()
    faulty = {"ocr": {"options": {"fail": FAULTS}}}
    place = Place(folder, {"http": {"listen": f"127.0.0.1:{port}"}, "stages": faulty})
    with Daemon(place) as daemon, started(folder, port, own_port) as prometheus:
        place.drop_many(range(20))
        place.drop("notes.txt", b"no image")
        for fault in FAULTS:
            place.drop(f"{fault}.ppm", picture(100, fault.encode()))
        daemon.wait_idle(24)
        place.drop("copy.ppm", picture(0))
        prometheus.wait_for('sum(visiond_images_total{outcome="done"})', 21)
        place.drop_many(range(20, 40))  # what has a rate has two scrapes by then
        prometheus.wait_for('sum(visiond_images_total{outcome="done"})', 41)
        yield prometheus


@contextlib.contextmanager
def started(folder: Path, port: int, own_port: int) -> Iterator[Prometheus]:
    """Prometheus with the configuration of this project, except for the port and shorter intervals."""
    config = folder / "prometheus.yml"
    config.write_text(
        CONFIG.read_text().replace(":9464", f":{port}").replace("15s", "1s").replace("10s", "1s")
    )
    assert f'"127.0.0.1:{port}"' in config.read_text()
    options = {
        "config.file": config,
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": f"127.0.0.1:{own_port}",
    }
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())], stdout=log, stderr=log
        )
        prometheus = Prometheus(own_port)
        try:
            wait_for(prometheus.is_ready, "Prometheus")
            yield prometheus
        finally:
            process.terminate()
            process.wait(PATIENCE)


def filled(query: Query) -> str:
    """As Grafana sends it, over a longer time than these tests take."""
    return query.text.replace("$__rate_interval", "1h").replace("$instance", ".*")


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query.panel}: {query.legend}")
def test_a_query_is_understood_and_answered(query: Query, prometheus: Prometheus) -> None:
    text = filled(query)
    if query.panel in NEEDS_A_GPU:
        prometheus.ask(text)
    else:  # a scrape may have been too late for this one
        wait_for(lambda: prometheus.ask(text), f"an answer to {text}")


def test_a_worker_that_dies_once_and_an_image_that_fails_once_are_an_increase(tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"http": {"listen": f"127.0.0.1:{port}"}})
    with Daemon(place) as daemon, started(tmp_path, port, free_port()) as prometheus:
        wait_for(lambda: prometheus.ask("visiond_build_info"), "a scrape")  # earlier events are not visible
        (worker,) = daemon.workers()
        os.kill(worker, signal.SIGKILL)
        place.drop("broken.png", b"no image")
        for counter in (
            'visiond_worker_restarts_total{reason="died"}',
            'visiond_images_total{outcome="failed"}',
        ):
            prometheus.wait_for(f"sum({counter})", 1)
            wait_for(
                lambda counter=counter: prometheus.value(f"increase({counter}[1h])") > 0,
                f"an increase of {counter}",
            )
            assert prometheus.value(f"sum({counter})") == 1


def test_throughput_is_seen(prometheus: Prometheus) -> None:
    (done,) = [query for query in queries() if query.panel == "Done"]
    wait_for(lambda: prometheus.value(filled(done)) > 0, "images done")


def test_the_menu_of_machines_finds_the_daemon(prometheus: Prometheus) -> None:
    (build,) = wait_for(lambda: prometheus.ask("visiond_build_info"), "the daemon's series")
    assert build["metric"]["job"] == "visiond"
