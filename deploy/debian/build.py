"""Makes the Debian package from a wheel, with dpkg-deb: `python deploy/debian/build.py WHEEL FOLDER`.

Why not a virtual environment in the package (dh-virtualenv): with torch and the CUDA libraries it would have several
gigabytes, most of them the same in each version. The wheel and its list of packages have eleven megabytes.
"""

from __future__ import annotations

import getpass
import gzip
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def build(wheel: Path, folder: Path) -> Path:
    """The package, in the folder. Raises CalledProcessError if dpkg-deb refuses it."""
    version = debian_version(wheel.name.split("-")[1])
    package = folder / f"visiond_{version}_all.deb"
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        control, share, doc = tree / "DEBIAN", tree / "usr/share/visiond", tree / "usr/share/doc/visiond"
        for made in (control, share, doc):
            made.mkdir(parents=True)
        fields = (HERE / "control").read_text().replace("@VERSION@", version)
        (control / "control").write_text(fields.replace("@MAINTAINER@", find_maintainer()))
        for script in ("postinst", "prerm"):
            shutil.copy(HERE / script, control / script)
            (control / script).chmod(0o755)
        shutil.copy(wheel, share)
        shutil.copy(HERE / "install.sh", share)
        for file in (HERE / "copyright", ROOT / "LICENSE", *ROOT.glob("*.md")):
            shutil.copy(file, doc)
        shutil.copytree(
            ROOT / "docs", doc / "docs", ignore=shutil.ignore_patterns("*.py", "site", "__pycache__")
        )
        (doc / "changelog.gz").write_bytes(gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0))
        tree.chmod(0o755)
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, package], check=True)
    return package


def find_maintainer() -> str:
    """Who builds the package, as Debian's tools decide: DEBFULLNAME and DEBEMAIL, else the name in git, else the user of
    this machine."""

    def known(variable: str, key: str) -> str:
        if (told := os.environ.get(variable)) or not shutil.which("git"):
            return told or ""
        asked = subprocess.run(["git", "config", key], cwd=ROOT, capture_output=True, text=True, check=False)
        return asked.stdout.strip()

    user = getpass.getuser()
    return f"{known('DEBFULLNAME', 'user.name') or user} <{known('DEBEMAIL', 'user.email') or f'{user}@{socket.getfqdn()}'}>"


def debian_version(version: str) -> str:
    """Debian sorts 0.2.0~dev0 before 0.2.0."""
    return re.sub(r"\.?(dev|a|b|rc)(\d+)$", r"~\1\2", version)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
