"""A program that uploads images to a daemon and asks for results, over real sockets."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, NamedTuple

from daemon.config.state import PAGE_TOKEN
from tests.daemon_process import Place, command_of, free_port, wait_for

BOUNDARY = "between-two-files"


def open_place(folder: Path, settings: Mapping[str, Any] | None = None) -> Place:
    """With one inbox that takes uploads, if the settings name none."""
    inbox = {"inbox": [{"settle_seconds": 0.1, "uploads": True}]}
    given = dict(settings or {})
    page = {"listen": f"127.0.0.1:{free_port()}"} | given.pop("page", {})
    return Place(folder, inbox | given | {"page": page})


class Answer(NamedTuple):
    status: int
    content: Any  # as JSON
    headers: HTTPMessage

    @property
    def image(self) -> dict[str, Any]:
        """The only one that was uploaded."""
        assert self.status in (200, 202), self.content
        [image] = self.content["images"]
        return dict(image)


class Client:
    def __init__(self, place: Place) -> None:
        self.port = int(place.settings["page"]["listen"].rpartition(":")[2])
        file = place.folder / "state" / PAGE_TOKEN
        wait_for(file.exists, "the token")
        self.token = {"Authorization": f"Bearer {file.read_text().strip()}"}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Answer:
        """headers: instead of the token."""
        with closing(self.connect()) as connection:
            named = self.token if headers is None else headers
            connection.request(method, path, body, dict(named), **options)
            return read_answer(connection)

    def get(self, path: str) -> Any:
        status, content, _ = self.ask("GET", path)
        assert status == 200, content
        return content

    def post(self, body: Any, query: str = "", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", f"/api/images?{query}", body, self.token | named)

    def post_form(self, files: Mapping[str, bytes], query: str = "") -> Answer:
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        return self.post(form_of(files), query, Content_Type=kind)


def read_answer(connection: http.client.HTTPConnection) -> Answer:
    answer = connection.getresponse()
    content = answer.read()
    assert answer.headers["content-type"] == "application/json", content
    return Answer(answer.status, json.loads(content), answer.headers)


def form_of(files: Mapping[str, bytes]) -> bytes:
    """A form with these files by their names, and a field that is no file."""
    field = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="album"\r\n\r\nsummer\r\n'.encode()
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        + data
        for name, data in files.items()
    ]
    return field + b"".join(part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def list_hidden(place: Place, inbox: str = "") -> list[str]:
    """Unfinished uploads."""
    return sorted(path.name for path in (place.inbox(inbox) / ".visiond-uploads").glob("*"))


def page_process(daemon: int) -> int:
    """Its process id; 0 if there is none."""
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    for child in children:
        if b"daemon.server.page.process" in command_of(int(child)):
            return int(child)
    return 0
