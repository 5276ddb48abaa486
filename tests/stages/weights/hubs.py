"""A model hub of folders on the disk, as a fake and over HTTP."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stages.weights.hub import Listing


class FolderHub:
    """Repositories as folders on the disk. licenses: by repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloads: list[str] = []
        self.licenses: dict[str, str] = {}
        self.revisions: list[str] = []

    def describe(self, repository: str, revision: str = "") -> Listing:
        folder = self.root / repository
        self.revisions.append(revision)
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        return Listing(f"commit of {repository}", files, self.licenses.get(repository, ""))

    def download(self, repository: str, commit: str, files: list[str], folder: Path) -> None:
        assert commit == f"commit of {repository}"
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(self.root / repository / file, folder / file)
        self.downloads += files


@contextlib.contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve root/org/name as the hub does. Yields its address, and the paths of files that were sent. A file x.y is
    refused while there is x.broken, with the status, error code and message that are in it. A file x.y is said to have the
    number of bytes that is in x.size, if there is one. Half of it is sent, and no more, while there is x.slow. A repository
    with a file `busy` is described only after as many refusals as it has lines: a status, and seconds for Retry-After."""
    sent: list[str] = []
    ended = threading.Event()
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
                self.list_files("/".join(parts[2:4]))
            elif parts[:2] == ["api", "models"]:
                self.describe("/".join(parts[2:4]), "/".join(parts[5:]))
            else:
                self.send_file("/".join(parts[:2]), "/".join(parts[4:]))

        do_HEAD = do_GET

        def list_files(self, repository: str) -> None:
            files = [file for file in (root / repository).rglob("*") if file.is_file()]
            rows = [
                {
                    "type": "file",
                    "path": str(file.relative_to(root / repository)),
                    "size": file.stat().st_size,
                    "oid": str(hash(file.read_bytes())),
                }
                for file in files
            ]
            self.reply(json.dumps(rows).encode(), "application/json")

        def describe(self, repository: str, revision: str) -> None:
            folder = root / repository
            refusals = (folder / "busy").read_text().splitlines() if (folder / "busy").exists() else []
            if refusals:
                (folder / "busy").write_text("\n".join(refusals[1:]))
                status, seconds = refusals[0].split()
                self.refuse("-", int(status), retry=seconds)
            elif not folder.is_dir():
                self.refuse("RepoNotFound")
            elif revision not in ("", "main", "v1", commit):
                self.refuse("RevisionNotFound")
            else:
                files = sorted(f for f in folder.rglob("*") if f.is_file())
                info = {
                    "id": repository,
                    "sha": commit,
                    "siblings": [
                        {"rfilename": str(file.relative_to(folder)), "size": self.size_of(file)}
                        for file in files
                    ],
                    "cardData": {"license": "apache-2.0"},
                }
                self.reply(json.dumps(info).encode(), "application/json")

        def size_of(self, file: Path) -> int:
            said = file.with_suffix(".size")
            return int(said.read_text()) if said.exists() else file.stat().st_size

        def send_file(self, repository: str, file: str) -> None:
            path = root / repository / file
            if (broken := path.with_suffix(".broken")).exists():
                status, code, said = (broken.read_text() or "409 - -").split(maxsplit=2)
                return self.refuse(code, int(status), said)
            if not path.is_file():
                return self.refuse("EntryNotFound")
            if self.command == "GET":
                sent.append(file)
            self.reply(path.read_bytes(), "application/octet-stream", path.with_suffix(".slow"))
            return None

        def reply(self, body: bytes, kind: str, slow: Path | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hash(body)}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                half = len(body) // 2 if slow and slow.exists() else 0
                self.wfile.write(body[:half])
                while half and slow and slow.exists():
                    ended.wait(0.05)
                with contextlib.suppress(OSError):  # of a reader that was killed
                    self.wfile.write(body[half:])

        def refuse(self, code: str, status: int = 404, said: str = "", retry: str = "") -> None:
            self.send_response(status)
            if retry:
                self.send_header("Retry-After", retry)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", said)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
