"""`visiond bundle`: a folder with visiond, all its packages and a script that installs them on a machine without an index."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from daemon.core.hints import command
from daemon.installing.environment import find_python
from daemon.installing.places import Places
from daemon.installing.source import CodeSource, find_source
from daemon.installing.steps import Step, StepFailed, carry_out, run, say, watch, written_since

WHEELS = "wheels"  # the folder of packages in a bundle
AT_ONCE = 8  # packages; an interrupted download loses at most these
ENTRY = re.compile(r"^\S(?:.*\n?)(?:[ \t].*\n?)*", re.MULTILINE)  # a package in the lock, with its digests
SCRIPT = """#!/bin/sh
# Installs visiond with the packages beside this file, and asks no package index. Takes the options of `visiond install`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
exec env PYTHONPATH="$(echo "$here"/visiond-*.whl)" PYTHONDONTWRITEBYTECODE=1 \\
    {python} -m daemon.installing install --wheels "$here/{wheels}" "$@"
"""


def make_bundle(folder: Path, wheel: Path | None, wanted: str = "") -> None:
    """wheel: visiond's; None: the visiond that runs. wanted: the interpreter that the other machine has too; "": this one.
    Downloads go on where they were interrupted. Raises StepFailed."""
    with tempfile.TemporaryDirectory(prefix="visiond-bundle-") as scratch:
        source = find_source(wheel, Path(scratch))
        if source.path.is_dir():
            why = "a bundle is made from a wheel, and this is a checkout"
            raise StepFailed(f"{why}. Type: make wheel, and name the wheel with --wheel")
        python = find_python(Places(Path(scratch)), wanted)
        name = run(python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])")
        again = command("bundle", folder, *(("--wheel", wheel) if wheel else ()))
        steps = [
            Step(
                f"all packages for {name} (several GB)",
                lambda: False,
                lambda: _download(folder, source, python, Path(scratch)),
                is_slow=True,
            ),
            Step(
                "visiond and the script install.sh", lambda: False, lambda: _add_visiond(folder, source, name)
            ),
        ]
        carry_out(steps, again=again)
    say(
        f"{folder} has visiond {source.version} with all packages for {name} on this kind of machine.",
        f"Copy it to the other machine, and type there as root: sh {folder.name}/install.sh",
        "With --upgrade behind it, the script replaces the visiond that is installed there.",
    )


def _download(folder: Path, source: CodeSource, python: str, scratch: Path) -> None:
    """A few packages at a time: pip adds files to the folder only when it has all that it was asked for.
    Raises CalledProcessError, OSError."""
    (folder / WHEELS).mkdir(parents=True, exist_ok=True)
    run(python, "-m", "venv", scratch / "pip")  # an installed visiond has no pip
    pip = (scratch / "pip" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "download")
    only = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off")
    part = scratch / "requirements.lock"
    files = ("--dest", (folder / WHEELS).absolute(), "--requirement", part)
    entries, note = ENTRY.findall(source.lock.read_text()), written_since(folder)
    # What pip leaves when it is ended goes with this folder, which is on a disk with room.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as room:
        environ = {**os.environ, "TMPDIR": str(Path(room).absolute())}
        for start in range(0, len(entries), AT_ONCE):
            part.write_text("".join(entries[start : start + AT_ONCE]))
            watch(*pip, *only, *files, note=note, env=environ)
            say(f"          {min(start + AT_ONCE, len(entries))} of {len(entries)} packages, {note()}")


def _add_visiond(folder: Path, source: CodeSource, python: str) -> None:
    for older in folder.glob("visiond-*.whl"):  # the script takes the only one
        if older.name != source.path.name:
            older.unlink()
    shutil.copy(source.path, folder)
    script = folder / "install.sh"
    script.write_text(SCRIPT.format(python=python, wheels=WHEELS))
    script.chmod(0o755)
