"""HTTP of a real daemon: what Prometheus reads, what health says while workers die, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.daemon_process import Daemon, Place, free_port, wait_for


class Server:
    """The TCP side of a daemon."""

    def __init__(self, daemon: Daemon, port: int) -> None:
        self.daemon = daemon
        self.port = port

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def json(self, path: str) -> tuple[int, Any]:
        status, _, body = self.ask(path)
        return status, json.loads(body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    place = Place(tmp_path_factory.mktemp("http"), {"http": {"listen": f"127.0.0.1:{port}"}})
    place.drop_many(range(30))
    place.drop("broken.jpg", b"no picture")
    with Daemon(place) as daemon:
        daemon.wait_idle(31)
        yield Server(daemon, port)


def test_prometheus_can_parse_the_metrics_and_they_count_what_happened(server: Server) -> None:
    status, headers, body = server.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in parse_text(body)}
    ended = {
        (s.labels["outcome"], s.labels["reason"]): s.value
        for s in families["visiond_images"].samples
        if s.name.endswith("total") and s.value
    }
    assert ended == {("done", ""): 30, ("failed", "not-an-image"): 1}
    assert all(name.startswith(("visiond_", "process_")) for name in families)
    assert all(family.documentation for family in families.values())
    # Label values come from closed sets: never a path, never an error's text.
    assert "broken" not in body
    assert ".ppm" not in body


def test_openmetrics_is_answered_to_who_asks_for_it(server: Server) -> None:
    status, headers, body = server.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "visiond_images" for family in parse_openmetrics(body))


def test_status_tells_the_counts(server: Server) -> None:
    status, body = server.json("/api/status")
    assert status == 200
    assert (body["running"], body["done"], body["failed"], body["pending"]) == (True, 30, 1, 0)


def test_the_first_page_tells_how_things_stand_and_links_to_pages_that_are_there(server: Server) -> None:
    status, headers, page = server.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "30 done, 1 failed" in page
    links = re.findall(r'href="([^"]+)"', page)
    assert links
    assert [server.ask(link)[0] for link in links] == [200] * len(links)


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/api/status"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_get_is_answered_over_tcp(server: Server, path: str, method: str) -> None:
    assert server.ask(path, method)[0] == 405


def test_what_changes_anything_is_not_there_over_tcp(server: Server) -> None:
    (failed,) = server.daemon.place.rows("SELECT id FROM image WHERE status = 2")[0]
    assert server.ask("/retry", "POST", json.dumps([failed]))[0] in (404, 405)
    assert server.json("/api/status")[1]["failed"] == 1


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""])
def test_another_hosts_name_is_refused_so_that_no_page_can_rebind_its_own_to_us(server: Server, host: str) -> None:
    assert server.ask("/api/status", Host=host)[0] == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9464"])
def test_our_own_names_are_answered(server: Server, host: str) -> None:
    assert server.ask("/api/status", Host=host)[0] == 200


def test_health_and_readiness_follow_the_death_and_the_return_of_a_worker(server: Server) -> None:
    daemon = server.daemon
    assert server.json("/healthz") == (200, {"status": "ok", "problems": []})
    assert server.json("/readyz") == (200, {"ready": True, "problems": []})
    (worker,) = daemon.workers()
    restarts = daemon.metric("visiond_worker_restarts_total", device="cpu", reason="died")
    os.kill(worker, signal.SIGKILL)
    ready = wait_for(lambda: (answer := server.json("/readyz"))[0] == 503 and answer[1], "its death to show")
    assert ready["problems"] == ["no worker of ocr+yolo+clip+blip is ready"]
    health = wait_for(lambda: "killed by SIGKILL" in (answer := server.ask("/healthz"))[2] and answer, "its cause")
    assert health[0] == 200  # another one is being started
    assert json.loads(health[2])["status"] == "degraded"
    daemon.wait_until(lambda status: status["workers"][0]["state"] == "ready", "its successor")
    assert server.json("/healthz") == (200, {"status": "ok", "problems": []})
    assert server.json("/readyz") == (200, {"ready": True, "problems": []})
    assert daemon.metric("visiond_worker_restarts_total", device="cpu", reason="died") == restarts + 1
