"""Every instruction of the Dockerfile is run, and the image does what the compose file expects."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.deploy.image import Image, build_and, read_image


@pytest.fixture
def image() -> Image:
    return read_image()


def test_the_dockerfile_makes_an_image_that_runs_without_rights(image: Image, tmp_path: Path) -> None:
    start = shlex.join([*image.entrypoint, *image.command])
    places = "/var/lib/visiond /var/cache/visiond /opt /etc/visiond"
    writes = f"for it in {places}; do touch $it/new 2>/dev/null && echo wrote $it; done; true"
    checks = [
        image.as_its_user(start),
        image.as_its_user("id -u"),
        image.as_its_user(writes),
        image.inside(
            "stat -c '%U %a %n' /var/cache/visiond /var/lib/visiond /etc/visiond/daemon.toml /srv/visiond/inbox "
            "/var/lib/visiond/models"
        ),
        image.as_its_user(shlex.join(image.health)),
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
        "visiond 700 /var/lib/visiond/models",
        "visiond 0.0.1 health",
    ]
