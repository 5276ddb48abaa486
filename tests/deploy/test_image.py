"""Every instruction of the Dockerfile is run, and the image does what the compose file expects."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.deploy.image import Image, build_and, read_image

SERVER = """
import http.server, subprocess, sys, threading
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS)
        self.end_headers()
    def log_message(self, *words):
        pass
with http.server.HTTPServer(("127.0.0.1", 9464), Answer) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("health", STATUS, subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL).returncode)
    server.shutdown()
"""


@pytest.fixture
def image() -> Image:
    return read_image()


def test_the_dockerfile_makes_an_image_that_runs_without_rights(image: Image, tmp_path: Path) -> None:
    start = shlex.join([*image.entrypoint, *image.command])
    places = "/var/lib/visiond /var/cache/visiond /opt /etc/visiond"
    writes = f"for it in {places}; do touch $it/new 2>/dev/null && echo wrote $it; done; true"
    health = shlex.join(image.health)
    checks = [
        image.as_its_user(start),
        image.as_its_user("id -u"),
        image.as_its_user(writes),
        image.inside(
            "stat -c '%U %a %n' /var/cache/visiond /var/lib/visiond /etc/visiond/daemon.toml /srv/visiond/inbox"
        ),
        image.as_its_user(f"{health} 2>/dev/null || echo health: no answer"),
        *(
            image.as_its_user(f"python3 -c {shlex.quote(SERVER.replace('STATUS', status))} {health}")
            for status in ("200", "503")
        ),
    ]
    told = build_and(image, tmp_path, *checks).splitlines()
    assert told == [
        "visiond 0.0.1 run",
        "10001",
        "wrote /var/lib/visiond",
        "wrote /var/cache/visiond",
        "visiond 700 /var/cache/visiond",
        "visiond 700 /var/lib/visiond",
        "root 644 /etc/visiond/daemon.toml",
        "visiond 2770 /srv/visiond/inbox",
        "health: no answer",
        "health 200 0",
        "health 503 1",
    ]
