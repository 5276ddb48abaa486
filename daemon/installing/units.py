"""The template unit for several daemons, made from the unit for one:

python -m daemon.installing.units deploy/systemd/visiond.service > deploy/systemd/visiond@.service
"""

from __future__ import annotations

import sys
from pathlib import Path

CHANGES = {
    "# docs/operations.md explains how to install this.": "# visiond@NAME, one of several daemons on a machine: "
    "docs/operations.md. Made from visiond.service by `make docs`.\n#",
    "Description=visiond,": "Description=visiond %i,",
    "/etc/visiond/daemon.toml": "/etc/visiond/%i.toml",
    "StateDirectory=visiond": "StateDirectory=visiond-%i",
    "CacheDirectory=visiond": "CacheDirectory=visiond-%i",
    "/var/lib/visiond": "/var/lib/visiond-%i",
    "/var/cache/visiond": "/var/cache/visiond-%i",
    "/srv/visiond": "/srv/visiond-%i",
    "systemctl edit visiond)": "systemctl edit visiond@NAME)",
}


def template_of(unit: str) -> str:
    """Its configuration, its folders, its state and its cache have the instance's name."""
    for before, after in CHANGES.items():
        unit = unit.replace(before, after)
    return unit


if __name__ == "__main__":
    sys.stdout.write(template_of(Path(sys.argv[1]).read_text()))
