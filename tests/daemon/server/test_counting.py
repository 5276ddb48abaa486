"""The requests of the page's process are counted, and in the daemon's metrics."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from daemon.monitoring.samples import Sample, read_samples
from daemon.monitoring.series import STATUSES, PageKind, Series
from daemon.server import counting as module
from daemon.server.counting import Counting
from tests.daemon.server.client import Client, open_place
from tests.daemon_process import Daemon, picture, wait_for

REQUESTS = [
    ("page", "2xx", "GET", "/"),
    ("page", "2xx", "GET", "/state"),
    ("page", "2xx", "GET", "/images/1"),
    ("page", "2xx", "GET", "/?by=words&cursor=7"),  # the next images of a list
    ("page", "4xx", "GET", "/images/7"),
    ("page", "4xx", "POST", "/state"),
    ("live", "2xx", "GET", "/live"),
    ("search", "2xx", "GET", "/?q=sea"),
    ("search", "2xx", "GET", "/?bin=A"),
    ("search", "2xx", "GET", "/?after=2026-11-23"),
    ("search", "2xx", "GET", "/api/search?q=sea"),
    ("search", "4xx", "GET", "/api/search?limit=none"),
    ("picture", "2xx", "GET", "/pictures/1/0/small"),
    ("file", "2xx", "GET", "/images/1/original"),
    ("file", "2xx", "GET", "/images/1/result.json"),
    ("file", "2xx", "GET", "/images/results.csv?id=1"),
    ("file", "2xx", "GET", "/static/page.css"),
    ("api", "2xx", "GET", "/api/status"),
    ("api", "2xx", "GET", "/api/images"),
    ("api", "2xx", "GET", "/events"),
    ("upload", "4xx", "POST", "/api/images"),
    ("other", "4xx", "GET", "/none/such"),
]


def test_each_request_counts_once_by_what_it_asks_for_and_its_time_too(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    with Daemon(place) as daemon:

        def count(kind: str, status: str) -> float:
            return daemon.metric("visiond_page_requests_total", kind=kind, status=status)

        def time_of(kind: str, part: str = "count") -> float:
            return daemon.metric(f"visiond_page_request_duration_seconds_{part}", kind=kind)

        client = Client(place)
        assert count("search", "2xx") == time_of("search") == 0, "there is a series before the first request"
        place.drop("a.ppm", picture(1))
        daemon.wait_idle(1)
        for _, status, method, path in REQUESTS:
            assert request(client, method, path) // 100 == int(status[0]), path
        assert request(client, "POST", "/api/images", token="wrong-token") == 401
        wait_for(lambda: count("other", "4xx") == 2, "the report of the page")
        wanted = [(kind, status) for kind, status, *_ in REQUESTS] + [("other", "4xx")]
        for kind in PageKind:
            assert {status: count(kind, status) for status in STATUSES} == {
                status: wanted.count((kind, status)) for status in STATUSES
            }, kind
            assert time_of(kind) == sum(kind == one for one, _ in wanted)
        # A timer of the event loop has milliseconds, and may be one of them early.
        assert 0.49 < time_of("other", "sum") < 60, "a wrong token waits for its answer"
        assert daemon.stop() == 0


def request(client: Client, method: str, path: str, token: str = "") -> int:
    """The status; of the answer only the beginning is read, as events never end."""
    headers = {"Authorization": f"Bearer {token}"} if token else client.token
    with closing(client.connect()) as connection:
        connection.request(method, path, b"no image" if method == "POST" else None, headers)
        answer: http.client.HTTPResponse = connection.getresponse()
        return answer.status


@pytest.fixture
def counting() -> Counting:
    return Counting()


def served(counting: Counting, answer: Any) -> TestClient:
    application = Starlette(routes=[Route("/", answer)], middleware=[Middleware(counting.count)])
    return TestClient(application, raise_server_exceptions=False)


def value(counting: Counting, name: str, **labels: str) -> float:
    return counting.metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_request_that_meets_a_bug_counts_as_one_that_is_not_answered(counting: Counting) -> None:
    async def answer(_request: Request) -> Response:
        raise ZeroDivisionError

    assert served(counting, answer).get("/").status_code == 500
    assert value(counting, "visiond_page_requests_total", kind="page", status="5xx") == 1
    assert value(counting, "visiond_page_request_duration_seconds_count", kind="page") == 1


def test_an_answer_counts_when_it_begins_as_some_never_end(counting: Counting) -> None:
    seen: list[float] = []

    async def stream() -> Any:
        seen.append(value(counting, "visiond_page_requests_total", kind="page", status="2xx"))
        await anyio.sleep(0.01)
        yield b""

    async def answer(_request: Request) -> Response:
        return StreamingResponse(stream())

    served(counting, answer).get("/")
    assert seen == [1]


def test_a_report_fits_into_a_line_as_long_as_asyncio_reads() -> None:
    metrics = Series()
    for kind in PageKind:
        metrics.page_seconds.labels(kind).observe(1 / 3)
    assert len(msgspec.json.encode(read_samples(metrics.of_page()))) < 1 << 15


@pytest.mark.anyio
async def test_nothing_is_read_for_a_report_until_a_request_has_come(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_request: Request) -> Response:
        return Response()

    reports: list[list[Sample]] = []

    def read(collectors: Iterable[Any]) -> list[Sample]:
        reports.append(read_samples(collectors))
        return reports[-1]

    monkeypatch.setattr(module, "read_samples", read)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as lines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counting.report, theirs)
            await anyio.wait_all_tasks_blocked()
            assert not reports
            transport = httpx.ASGITransport(served(counting, answer).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
                await client.get("/")
            line = await anyio.to_thread.run_sync(lines.readline, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()
    assert [msgspec.json.decode(line, type=list[Sample])] == reports
