"""Makes the image of the Dockerfile without Docker: runs every instruction in a chroot.

The base is this machine's own system under an overlay, so nothing needs a registry, and what the instructions write is gone at
the end. apt-get only simulates the installation of Debian's packages. The program is a stand-in; `make install-test` installs
the real one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.daemon_process import PATIENCE
from tests.deploy.standin import make_wheel

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BEGIN = """
set -e
mount -t tmpfs tmpfs {place}
mkdir {place}/upper {place}/work {place}/root {place}/context
mount -t overlay overlay -o lowerdir=/,upperdir={place}/upper,workdir={place}/work {place}/root || exit 77
cd {place}/root
rm -rf opt/visiond* etc/visiond etc/systemd/system/visiond*
mkdir -p standin tmp && chmod 1777 tmp && cp -r {standin}/. standin
mount -t proc proc proc && mount --bind /dev dev
chroot . sh -c 'userdel visiond; groupdel visiond' 2>/dev/null || true
ip link set lo up
"""
APT = """#!/bin/sh
[ "$1" = install ] || exit 0
ls /var/lib/apt/lists/*Packages* >/dev/null 2>&1 || exit 0
exec /usr/bin/apt-get --simulate "$@"
"""
PYTHON = """#!/bin/sh
export PYTHONPATH=/standin UV_OFFLINE=1
exec /usr/bin/python3 "$@" --wheel {wheel}
"""
UV = """
def find_uv_bin():
    return "/standin/uv"
"""


@dataclass
class Image:
    """What the instructions say. steps: shell commands that make it, in the folder that becomes its root."""

    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def inside(self, command: str, user: str = "root") -> str:
        """A shell command in the image."""
        number, _, group = user.partition(":")
        rights = f"setpriv --reuid={number} --regid={group} --clear-groups" if user != "root" else ""
        values = {"PATH": PATH, **self.arguments, **self.environment}
        words = " ".join(shlex.quote(f"{name}={value}") for name, value in values.items())
        inner = f"cd {self.folder} && {command}"
        return f"chroot . {rights} env -i {words} sh -c {shlex.quote(inner)}"

    def as_its_user(self, command: str) -> str:
        return self.inside(command, self.user)


def instructions() -> Iterator[tuple[str, str]]:
    """Each with its words, on one line."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            yield name, words.strip()


def read_image() -> Image:
    """Fails the test if the Dockerfile has an instruction that is not known here."""
    image = Image()
    for name, words in instructions():
        match name:
            case "ARG":
                key, _, value = words.partition("=")
                image.arguments[key] = value
            case "FROM" | "VOLUME" | "EXPOSE" | "STOPSIGNAL":
                pass
            case "RUN":
                image.steps += list(run(image, words))
            case "COPY":
                source, target = words.split()
                image.steps.append(f"mkdir -p .{os.path.dirname(target)} && cp ../context/{source} .{target}")
            case "USER":
                image.user = string.Template(words).substitute(image.arguments)
            case "WORKDIR":
                image.folder = words
                image.steps.append(f"mkdir -p .{words}")
            case "ENV":
                image.environment |= dict(word.split("=", 1) for word in shlex.split(words))
            case "HEALTHCHECK":
                image.health = json.loads(words.partition("CMD ")[2])
            case "ENTRYPOINT":
                image.entrypoint = json.loads(words)
            case "CMD":
                image.command = json.loads(words)
            case _:
                pytest.fail(f"the test does not know the instruction {name}")
    return image


def run(image: Image, words: str) -> Iterator[str]:
    """Commands for a RUN and its mounts. A bind mount has the files that Docker gets; a cache is an empty folder here."""
    while mounted := re.match(r"--mount=type=(bind|cache),target=(\S+)\s+(.*)", words):
        kind, target, words = mounted.groups()
        yield f"mkdir -p .{target}"
        yield f"mount --rbind ../context .{target}" if kind == "bind" else f"mount -t tmpfs tmpfs .{target}"
    # The stand-ins for apt-get and for the program come first.
    yield image.inside(f"PATH=/standin/bin:$PATH; {words}")


def context() -> Iterator[str]:
    """Commands that mount the files that .dockerignore lets through."""
    for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            path = ROOT / line[1:]
            target = f"../context/{line[1:]}"
            yield f"mkdir -p {target if path.is_dir() else os.path.dirname(target)}"
            yield f"{'' if path.is_dir() else f'touch {target} && '}mount --bind {path} {target}"


def build_and(image: Image, folder: Path, *checks: str) -> str:
    """Run the instructions and then these commands; returns what the checks print. Skips the test if this machine
    cannot run them."""
    if os.geteuid():
        pytest.skip("only root can run the Dockerfile")
    if not (shutil.which("unshare") and shutil.which("ip") and Path("/usr/bin/python3").exists()):
        pytest.skip("iproute2 or Debian's python3 is not installed: make tools")
    standin, place = folder / "standin", folder / "place"
    (standin / "bin").mkdir(parents=True)
    place.mkdir()
    wheel = make_wheel(standin, "0.0.1")
    shutil.copy(Path(sysconfig.get_path("scripts")) / "uv", standin / "uv")
    (standin / "uv.py").write_text(UV)
    for name, content in (("apt-get", APT), ("python3", PYTHON.format(wheel=f"/standin/{wheel.name}"))):
        (standin / "bin" / name).write_text(content)
        (standin / "bin" / name).chmod(0o755)
    lines = [*context(), *image.steps, "echo BUILT", *checks]
    script = BEGIN.format(place=place, standin=standin) + "\n".join(lines)
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"no overlay over this machine's root: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.partition("BUILT\n")[2]
