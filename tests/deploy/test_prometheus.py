"""A real Prometheus scrapes a real daemon with fake stages, and answers every query of the dashboard."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import Daemon, Place, free_port, picture, wait_for
from tests.deploy.prometheus import Prometheus, needs_prometheus, started
from tests.deploy.queries import Query, queries
from tests.deploy.rules import Rule, rules

FAULTS = {"STUMBLE": "transient", "CRASH": "exit", "CROWD": "oom"}
NEEDS_A_GPU = {"GPU memory", "GPU utilization"}

pytestmark = needs_prometheus


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a daemon with good images, bad images,
    and every fault of the fake stages."""
    folder = tmp_path_factory.mktemp("scraped")
    port = free_port()
    faulty = {"ocr": {"options": {"fail": FAULTS}}}
    settings = {"http": {"listen": f"127.0.0.1:{port}"}, "stages": faulty, "output": {"sinks": ["jsonl"]}}
    place = Place(folder, settings)
    with Daemon(place) as daemon, started(folder, port) as prometheus:
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


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: rule.name)
def test_a_rule_asks_for_series_and_labels_that_a_scrape_has(rule: Rule, prometheus: Prometheus) -> None:
    for selector in rule.selectors:
        found = wait_for(lambda selector=selector: prometheus.ask(selector), f"series of {selector}")
        labels = found[0]["metric"].keys()
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule.document.get("annotations", ""))))
        assert rule.grouped <= labels
        assert shown <= (rule.grouped or labels)


def test_a_worker_that_dies_once_and_an_image_that_fails_once_are_an_increase(tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"http": {"listen": f"127.0.0.1:{port}"}})
    with Daemon(place) as daemon, started(tmp_path, port) as prometheus:
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
