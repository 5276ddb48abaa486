"""HTTP of a real daemon: metrics, health while workers die, and refused requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from daemon.server.connections import MOST_HANDSHAKES
from tests.daemon_process import PATIENCE, Daemon, Gate, Place, make_certificate, wait_for
from tests.faults.load import HELLO, open_files, slow_clients


class Server:
    """A daemon's TCP port. certificate: of a daemon with HTTPS."""

    def __init__(self, daemon: Daemon, gate: Gate, certificate: Path | None = None) -> None:
        self.daemon = daemon
        self.gate = gate
        self._certificate = certificate

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        with contextlib.closing(self.daemon.dial(self._certificate)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def json(self, path: str) -> tuple[int, Any]:
        status, _, body = self.ask(path)
        return status, json.loads(body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"http": {"listen": "127.0.0.1:0", "names": ["photos.example.org:8443"]}}
    place = Place(tmp_path_factory.mktemp("http"), settings)
    place.drop_many(range(30))
    place.drop("broken.jpg", b"no picture")
    gate = Gate(place.folder, tickets=1)
    with Daemon(place, environment=gate.environment) as daemon:
        daemon.wait_idle(31)
        yield Server(daemon, gate)


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


def test_openmetrics_is_sent_to_clients_that_ask_for_it(server: Server) -> None:
    status, headers, body = server.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "visiond_images" for family in parse_openmetrics(body))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_no_series_has_the_creation_time_of_another(server: Server, kind: str) -> None:
    assert "_created" not in server.ask("/metrics", Accept=kind)[2]


def test_the_ready_event_names_the_address_of_http(server: Server, guarded: Server) -> None:
    assert server.daemon.wait_event("ready")["metrics"] == f"http://127.0.0.1:{server.daemon.port}"
    assert guarded.daemon.wait_event("ready")["metrics"] == f"https://0.0.0.0:{guarded.daemon.port}"


def test_status_shows_the_counts(server: Server) -> None:
    status, body = server.json("/api/status")
    assert status == 200
    assert (body["running"], body["done"], body["failed"], body["pending"]) == (True, 30, 1, 0)


def test_the_first_page_shows_the_state_and_links_to_existing_pages(server: Server) -> None:
    status, headers, page = server.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "30 done, 1 failed" in page
    links = re.findall(r'href="([^"]+)"', page)
    assert links
    assert [server.ask(f"/{link}")[0] for link in links] == [200] * len(links)


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/api/status"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_get_is_answered_over_tcp(server: Server, path: str, method: str) -> None:
    assert server.ask(path, method)[0] == 405


def test_requests_that_change_anything_do_not_exist_over_tcp(server: Server) -> None:
    (failed,) = server.daemon.place.rows("SELECT id FROM image WHERE status = 2")[0]
    assert server.ask("/put-back/FAILED", "POST", json.dumps([failed]))[0] == 404
    assert server.json("/api/status")[1]["failed"] == 1


def test_what_is_not_there_is_a_problem_as_json(server: Server) -> None:
    assert server.json("/api/nothing") == (404, {"problem": "There is no address /api/nothing."})


def test_the_control_socket_is_its_users_alone(server: Server) -> None:
    control = server.daemon.place.folder / "state" / "control.sock"
    assert stat.S_IMODE(control.stat().st_mode) == 0o600


def test_the_page_escapes_the_names_of_folders(tmp_path: Path) -> None:
    place = Place(
        tmp_path, {"http": {"listen": "127.0.0.1:0"}, "inbox": [{"path": "<script>alert(1)</script>"}]}
    )
    with Daemon(place) as daemon:
        shutil.rmtree(place.inbox().parent)
        daemon.wait_until(
            lambda status: "<script>" in str(status["obstacles"]), "a problem that names the folder"
        )
        with contextlib.closing(daemon.dial()) as connection:
            connection.request("GET", "/")
            page = connection.getresponse().read().decode()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in page


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""])
def test_another_hosts_name_is_refused_so_that_no_page_can_rebind_its_own_to_us(
    server: Server, host: str
) -> None:
    assert server.ask("/api/status", Host=host)[0] == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9464", "photos.example.org"])
def test_our_own_names_are_answered(server: Server, host: str) -> None:
    assert server.ask("/api/status", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "//etc/passwd", "/../../etc/passwd", "/api/..%2f..%2fetc/passwd", "/api/00000.ppm"],
)
def test_no_path_of_a_request_is_ever_opened(server: Server, path: str) -> None:
    assert server.ask(path)[0] == 404


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /metrics HTTP/1.1", "Accept: application/openmetrics-text; version=x", 406),
        ("GET / HTTP/1.1", "Upgrade: websocket\r\nConnection: Upgrade, close", 200),
        ("\x16\x03\x01", "", 400),
        ("GET / HTTP/1.1", "Transfer-Encoding: chunked\r\n\r\nzz", 400),
    ],
    ids=["a version that is no number", "a protocol that is not spoken", "TLS", "a chunk of no length"],
)
def test_invalid_settings_are_refused_and_leave_the_log_unchanged(
    server: Server, request_line: str, headers: str, status: int
) -> None:
    before = log_without_upkeep(server)
    with socket.create_connection(("127.0.0.1", server.daemon.port), timeout=PATIENCE) as client:
        client.sendall(
            f"{request_line}\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n\r\n".encode()
        )
        assert client.recv(12) == f"HTTP/1.1 {status}".encode()
    assert server.json("/api/status")[0] == 200
    assert log_without_upkeep(server) == before


def log_without_upkeep(server: Server) -> list[str]:
    """At night there is some."""
    return [line for line in server.daemon.log_text().splitlines() if '"upkeep done"' not in line]


def test_health_and_readiness_follow_the_death_and_the_return_of_a_worker(server: Server) -> None:
    daemon = server.daemon
    assert server.json("/healthz") == (200, {"status": "ok", "problems": []})
    assert server.json("/readyz") == (200, {"ready": True, "problems": []})
    (worker,) = daemon.workers()
    restarts = daemon.metric("visiond_worker_restarts_total", device="cpu", reason="died")
    os.kill(worker, signal.SIGKILL)
    ready = wait_for(lambda: (answer := server.json("/readyz"))[0] == 503 and answer[1], "its death to show")
    assert ready["problems"] == ["no worker of ocr+yolo+clip+blip is ready"]
    health = wait_for(
        lambda: "killed by SIGKILL" in (answer := server.ask("/healthz"))[2] and answer, "its cause"
    )
    assert health[0] == 200  # another one is being started
    assert json.loads(health[2])["status"] == "degraded"
    server.gate.let_in()
    daemon.wait_until(lambda status: status["workers"][0]["state"] == "ready", "its successor")
    assert server.json("/healthz") == (200, {"status": "ok", "problems": []})
    assert server.json("/readyz") == (200, {"ready": True, "problems": []})
    assert daemon.metric("visiond_worker_restarts_total", device="cpu", reason="died") == restarts + 1


# Open to others: with a token, by HTTPS

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A daemon with a token and HTTPS, with a self-signed certificate."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "token").chmod(0o640)
    pages = {"listen": "0.0.0.0:0", "token_file": "token"} | make_certificate(folder)
    gate = Gate(folder, tickets=1)
    with Daemon(Place(folder, {"http": pages}), environment=gate.environment) as daemon:
        yield Server(daemon, gate, folder / "certificate.pem")


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/api/status", "/nothing"])
@pytest.mark.parametrize(
    "given", ["", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xff", "Bearer"]
)
def test_without_the_token_no_page_is_shown(guarded: Server, path: str, given: str) -> None:
    """The answer says where it is and how to send it, and a wrong one is told from none."""
    status, headers, body = guarded.ask(path, **({"Authorization": given} if given else {}))
    is_wrong = given.startswith("Bearer ")
    assert (status, headers["www-authenticate"]) == (
        401,
        'Bearer error="invalid_token"' if is_wrong else "Bearer",
    )
    problem = json.loads(body)["problem"] if path.startswith("/api/") else body.rstrip()
    beginning = "That is not the token" if is_wrong else "This needs the token"
    place = "in the file that [http] token_file in daemon.toml names"
    assert problem == f"{beginning}. It is {place}. Send: Authorization: Bearer TOKEN"


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/nowhere"])
def test_every_answer_forbids_browsers_to_interpret_it_and_names_no_server(
    guarded: Server, path: str
) -> None:
    for token in (TOKEN, "another"):
        _, headers, _ = guarded.ask(path, Authorization=f"Bearer {token}")
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "'self'" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token_every_page_is_shown(guarded: Server, scheme: str) -> None:
    status, _, body = guarded.ask("/metrics", Authorization=f"{scheme} {TOKEN}")
    assert status == 200
    assert "visiond_images_pending" in body


def test_the_commands_need_no_token_and_the_token_is_in_no_process_list(guarded: Server) -> None:
    assert guarded.daemon.status()["running"]
    for pid in guarded.daemon.place.processes():
        for file in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()
    assert TOKEN not in guarded.daemon.log_text()


def test_clients_that_never_finish_their_handshake_use_up_no_descriptors_and_delay_nobody(
    guarded: Server,
) -> None:
    before = open_files(guarded.daemon)
    with slow_clients(guarded.daemon.port, 300, HELLO):
        assert guarded.ask("/healthz", Authorization=f"Bearer {TOKEN}")[0] == 200
        # It notices a closed one a little later.
        assert open_files(guarded.daemon) - before <= MOST_HANDSHAKES + 50


def test_a_server_with_https_answers_no_plain_http(guarded: Server) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        Server(guarded.daemon, guarded.gate).ask("/healthz", Authorization=f"Bearer {TOKEN}")


def test_an_address_that_others_reach_without_token_or_https_is_warned_of(tmp_path: Path) -> None:
    place = Place(tmp_path, {"http": {"listen": "0.0.0.0:0"}})
    with Daemon(place) as daemon:
        daemon.wait_event("ready")  # a thread writes the log, in order
        said = [entry["risk"] for entry in daemon.events("HTTP is open to the network")]
    assert ["token_file" in said[0], "tls_certificate" in said[1]] == [True, True]
    checked = place.command("check", "--quick").stdout
    assert all(risk in checked for risk in said)


@pytest.mark.parametrize(
    ("settings", "mode", "word"),
    [
        ({"token_file": "none"}, 0o600, "cannot be read"),
        ({"token_file": "token"}, 0o644, "every user can read"),
        ({"token_file": "empty"}, 0o600, "is empty"),
        ({"token_file": "quoted"}, 0o600, "quotes around"),
        ({"token_file": "fifo"}, 0o600, "is not a file"),
        ({"tls_certificate": "token"}, 0o600, "http.tls_certificate"),
        ({"tls_certificate": "none"}, 0o600, "http.tls_certificate"),
        ({"tls_key": "token"}, 0o600, "set http.tls_certificate"),
        ({"tls_certificate": "certificate.pem", "tls_key": "token"}, 0o644, "every user can read"),
        ({"tls_certificate": "token"}, 0o644, "every user can read"),
    ],
)
def test_a_token_or_certificate_that_is_of_no_use_is_refused(
    tmp_path: Path, settings: dict[str, str], mode: int, word: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, content in (("token", TOKEN), ("empty", "\n"), ("quoted", f"'{TOKEN}'\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    place = Place(tmp_path, {"http": {"listen": "127.0.0.1:0"} | settings})
    for command in (("run", "--once"), ("check", "--quick")):
        refused = place.command(*command)
        assert refused.returncode == os.EX_CONFIG
        assert word in refused.stdout + refused.stderr
