"""HTTP connections over real sockets: clients that send a request get an answer, others are disconnected."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import SocketStream

from daemon.config.sections import Http
from daemon.server import connections
from daemon.server.app import load_certificate, running
from daemon.server.connections import Server
from tests.daemon_process import PATIENCE, make_certificate, until

pytestmark = pytest.mark.anyio

NEVER = 3600  # seconds: with the default limits no connection is closed in a test, nor by uvicorn
STOPS = 6  # one in three happens at the moment that counts
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def answer(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def read_and_answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await answer(scope, receive, send)


@contextlib.asynccontextmanager
async def served(app: Any = answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app, listener, tls)
        server.config.timeout_keep_alive = NEVER
        async with running(server):
            yield int(listener.getsockname()[1])


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUEST_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(connections, name, float(NEVER))


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext | None:
    return load_certificate(
        Http(**{name: str(tmp_path / file) for name, file in make_certificate(tmp_path).items()})
    )


async def is_closed(client: SocketStream) -> bool:
    try:
        with anyio.fail_after(PATIENCE):
            await client.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True
    return False


async def test_half_a_request_is_waited_for_only_so_long_and_so_is_the_next_one_on_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as other:
        for seconds in (float(NEVER), 0.3):
            monkeypatch.setattr(connections, "REQUEST_SECONDS", seconds)  # from the end of its answer
            await other.send(REQUEST)
            assert (await other.receive()).startswith(b"HTTP/1.1 204")
        assert await is_closed(other)
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(REQUEST[:-2])
            assert await is_closed(client)


async def test_a_body_may_take_longer_if_enough_of_it_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.4)
    head = REQUEST[:-2] + b"Content-Length: 1000000\r\n\r\n"
    async with served(read_and_answer) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as slow:
            await slow.send(head)
            with anyio.move_on_after(0.2):
                await slow.receive()
            await slow.send(b"some")
            assert await is_closed(slow)
        async with await anyio.connect_tcp("127.0.0.1", port) as steady:
            await steady.send(head)
            for _ in range(10):
                with anyio.move_on_after(0.1):
                    await steady.receive()
                await steady.send(bytes(100_000))
            assert (await steady.receive()).startswith(b"HTTP/1.1 204")


async def test_what_came_while_the_machine_stood_still_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(connections, "LATE_SECONDS", 0.1)
    stop = f"echo >&2; read go; kill -STOP {os.getpid()}; sleep 0.6; printf '{REQUEST.decode()}'; kill -CONT {os.getpid()}"
    async with served() as port:
        for _ in range(STOPS):
            # The shell is there before the connection: to start it may take longer than a client has.
            with socket.socket() as client:
                client.settimeout(PATIENCE)
                async with await anyio.open_process(["sh", "-c", stop], stdout=client.fileno()) as shell:
                    assert shell.stderr
                    assert shell.stdin
                    await shell.stderr.receive()
                    client.connect(("127.0.0.1", port))
                    await until(lambda: len(connections.Connection.waiting) == 1)
                    await shell.stdin.send(b"\n")
                assert (await to_thread.run_sync(client.recv, 100)).startswith(b"HTTP/1.1 204")


async def test_after_a_request_of_two_lengths_the_connection_is_closed() -> None:
    """Something before the server may take what follows for another request."""
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(REQUEST[:-2] + lengths)
        assert (await client.receive()).startswith(b"HTTP/1.1 204")
        assert await is_closed(client)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", REQUEST[:-2] + b"A: " + b"a" * (17 << 10)],
    ids=["without a host", "with a header that does not end"],
)
async def test_a_request_that_breaks_the_rules_is_refused(sent: bytes) -> None:
    async with served() as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(sent)
        assert (await client.receive()).startswith(b"HTTP/1.1 400")


async def test_what_follows_a_body_is_no_header_of_its_request() -> None:
    """Something before the server has not looked at it."""
    seen: list[bytes] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        await read_and_answer(scope, receive, send)
        seen.extend(name for name, _ in scope["headers"])

    body = b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    async with served(note) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(REQUEST[:-2] + body)
        assert (await client.receive()).startswith(b"HTTP/1.1 204")
    assert seen == [b"host", b"transfer-encoding"]


async def test_a_handshake_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext | None
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.3)
    async with served(tls=tls) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        assert await is_closed(client)


async def test_the_handshake_that_takes_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext | None
) -> None:
    monkeypatch.setattr(connections, "MOST_HANDSHAKES", 1)
    async with served(tls=tls) as port, await anyio.connect_tcp("127.0.0.1", port) as silent:
        async with await anyio.connect_tcp(
            "127.0.0.1", port, ssl_context=trusting(), tls_standard_compatible=False
        ) as client:
            assert await is_closed(silent)
            await client.send(REQUEST)
            assert (await client.receive()).startswith(b"HTTP/1.1 204")


async def test_the_client_that_waited_longest_is_disconnected_for_one_that_sends_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MOST_WAITING", 2)
    async with served() as port, contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(3):
            clients.append(await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)))
            await clients[-1].send(REQUEST[:-2])
        assert await is_closed(clients[0])
        for client in clients[1:]:
            await client.send(REQUEST[-2:])
            assert (await client.receive()).startswith(b"HTTP/1.1 204")


async def test_clients_of_the_network_take_no_place_of_one_of_the_control_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connections, "MOST_WAITING", 2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        async with (
            running(Server(answer, listener)),
            served() as port,
            contextlib.AsyncExitStack() as stack,
            await anyio.connect_unix(tmp_path / "control") as local,
        ):
            await local.send(REQUEST[:-2])
            clients = []
            for _ in range(3):
                clients.append(await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)))
                await clients[-1].send(REQUEST[:-2])
            assert await is_closed(clients[0])
            await local.send(REQUEST[-2:])
            assert (await local.receive()).startswith(b"HTTP/1.1 204")


async def test_if_descriptors_are_few_the_client_that_waited_longest_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each client has one that the work needs.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3, 3))
    async with served() as port, contextlib.AsyncExitStack() as stack:
        clients = list[SocketStream]()
        for _ in range(connections.LEAST_CONNECTIONS + 1):
            await until(lambda: len(connections.Connection.waiting) == len(clients))
            clients.append(await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)))
            await clients[-1].send(REQUEST[:-2])
        assert await is_closed(clients[0])
        await clients[-1].send(REQUEST[-2:])
        assert (await clients[-1].receive()).startswith(b"HTTP/1.1 204")
