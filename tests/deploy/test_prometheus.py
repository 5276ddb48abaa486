"""A real Prometheus scrapes a real daemon with fake stages on a fake GPU, and answers every query of Grafana's boards."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import PATIENCE, Daemon, Place, free_port, picture, wait_for
from tests.deploy.prometheus import Prometheus, needs_prometheus, started
from tests.deploy.queries import Query, boards, queries
from tests.deploy.rules import Rule, rules

INBOX = "scans"
FAULTS = {"STUMBLE": "transient", "CRASH": "exit", "CROWD": "oom"}
CARD = """
import sys
if "run" in sys.orig_argv:
    import daemon.layout.layout, daemon.monitoring.machine
    from daemon.system.gpus import Gpu, Sensors
    def list_card():
        sensors = Sensors(40, 350.5, 1e6, 0, 0, frozenset({"power"}))
        return [Gpu(0, "GPU-fake", "card", 8 << 30, 5 << 30, 3 << 30, "9.0", 0.5, (), sensors=sensors)]
    daemon.layout.layout.list_gpus = daemon.monitoring.machine.list_gpus = list_card
"""
CHOSEN = {"$__rate_interval": "1h", "$__range": "1h", "$instance": ".*", "$gpu": "0", "$inbox": INBOX}

pytestmark = needs_prometheus


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a daemon with good images, bad images,
    and every fault of the fake stages."""
    folder = tmp_path_factory.mktemp("scraped")
    port = free_port()
    faulty = {"ocr": {"options": {"fail": FAULTS}}}
    settings = {
        "http": {"listen": f"127.0.0.1:{port}"},
        "page": {"listen": "127.0.0.1:0"},
        "stages": faulty,
        "output": {"sinks": ["jsonl"]},
    }
    settings["inbox"] = [{"name": INBOX, "settle_seconds": 0.1}]
    place = Place(folder, settings)
    (folder / "sitecustomize.py").write_text(CARD)
    with (
        Daemon(place, environment={"PYTHONPATH": str(folder)}) as daemon,
        started(folder, port) as prometheus,
    ):
        place.drop_many(range(20), INBOX)
        place.drop("notes.txt", b"no image", INBOX)
        for fault in FAULTS:
            place.drop(f"{fault}.ppm", picture(100, fault.encode()), INBOX)
        daemon.wait_idle(24)
        place.drop("copy.ppm", picture(0), INBOX)
        prometheus.wait_for('sum(visiond_images_total{outcome="done"})', 21)
        place.drop_many(range(20, 40), INBOX)  # what has a rate has two scrapes by then
        prometheus.wait_for('sum(visiond_images_total{outcome="done"})', 41)
        yield prometheus


def filled(query: Query) -> str:
    """As Grafana sends it when something is chosen in each menu, over a longer time than these tests take."""
    text = query.text
    for variable, value in CHOSEN.items():
        text = text.replace(variable, value)
    assert "$" not in text
    return text


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.name)
def test_a_query_is_understood_and_answered(query: Query, prometheus: Prometheus) -> None:
    text = filled(query)
    # A scrape may have been too late for this one.
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


def test_an_alert_leads_to_the_documentation_that_prometheus_serves(tmp_path: Path) -> None:
    (tmp_path / "alerts.html").write_text("What to do")
    nobody = free_port()
    with started(tmp_path, nobody, interval_seconds=0.2, factor=240) as prometheus:
        (alert,) = wait_for(prometheus.alerts, "an alert: the daemon is down")
        with urllib.request.urlopen(alert["annotations"]["runbook_url"], timeout=PATIENCE) as answer:
            assert answer.read() == b"What to do"


def test_throughput_is_seen(prometheus: Prometheus) -> None:
    (done,) = [query for query in queries() if (query.board, query.panel) == ("visiond", "Done")]
    wait_for(lambda: prometheus.value(filled(done)) > 0, "images done")


def test_the_menus_find_the_daemon_its_gpu_and_its_inbox(prometheus: Prometheus) -> None:
    (build,) = wait_for(lambda: prometheus.ask("visiond_build_info"), "the daemon's series")
    assert build["metric"]["job"] == "visiond"
    chosen = {
        menu["name"]: menu["definition"]
        for board in boards().values()
        for menu in board["templating"]["list"]
        if menu["name"] in ("gpu", "inbox")
    }
    for name, definition in chosen.items():
        asked = re.fullmatch(rf"label_values\((\w+)\{{.*\}}, {name}\)", definition)
        assert asked
        assert {series["metric"][name] for series in prometheus.ask(asked[1])} == {CHOSEN[f"${name}"]}


def test_what_an_inbox_and_a_device_did_is_what_the_daemon_did(prometheus: Prometheus) -> None:
    for own, all_of_it in (
        ('visiond_inbox_images_total{inbox="scans"}', "visiond_images_total"),
        ('visiond_inbox_bins_total{inbox="scans"}', "visiond_bins_total"),
        ('visiond_device_stage_images_total{device="cuda:0"}', "visiond_stage_images_total"),
        ('visiond_device_batch_images_total{device="cuda:0"}', "visiond_batch_images_sum"),
    ):
        wait_for(
            lambda own=own, whole=all_of_it: prometheus.value(own) == prometheus.value(whole) > 20,
            f"{own} as {all_of_it}",
        )
    images = prometheus.value("visiond_inbox_first_results_total")
    for total in ("visiond_inbox_wait_seconds_total", "visiond_inbox_image_seconds_total"):
        assert 0 < prometheus.value(total) < images * PATIENCE
