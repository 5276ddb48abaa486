"""Code in the folder where the daemon is started, and in its inbox: none of it may run."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.daemon_process import PATIENCE, Place
from tests.forked import TOKEN

TRAP = "import os, sys\nopen({mark!r}, 'a').write(__name__ + ' in ' + repr(sys.orig_argv) + '\\n')\n"
CUSTOM = {"sitecustomize", "usercustomize"}  # which Python imports by itself
# Modules that a library may import although they are not installed.
OPTIONAL = {"pillow_heif", "uvloop", "pyarrow", "pynvml", "tensorrt", "flash_attn", "xformers"}
OURS = {"daemon", "stages", "visiond"}
MARK = "mark"  # where traps that run leave a line
VISIOND = Path(sys.executable).with_name("visiond")


def module_names() -> set[str]:
    """The names of every module of the standard library, every installed package,
    and some that may not be installed."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    return set(sys.stdlib_module_names) | installed | CUSTOM | OPTIONAL | OURS


def lay(folder: Path, names: Iterable[str], mark: Path) -> None:
    for name in names:
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(mark)))


def loaded_by_python() -> set[str]:
    """The modules that Python imports before our code can prevent it."""
    command = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep}
    run = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in run.stdout.split()} | CUSTOM


def spring(folder: Path, *, real: bool) -> tuple[int, list[str], int]:
    """Run the commands in a folder of traps, once with an empty entry on PYTHONPATH too. Returns how
    many traps there were, those that ran, and how many images are DONE. real: CLIP is not a fake."""
    settings = {"stages": {"clip": {"backend": ""}}} if real else {}
    place = Place(folder, settings)
    place.drop_many(range(4))
    mark, names = folder / MARK, module_names()
    lay(folder, names, mark)
    lay(place.inbox(), names, mark)
    run(place, "run", "--once")
    # This many are made by several processes.
    run(place, "samples", "more", "--count", "200" if real else "2")
    # With an empty entry on PYTHONPATH, Python imports `daemon` from the current folder before visiond can prevent it
    # (SECURITY.md).
    for name in loaded_by_python() | {"daemon"}:
        (folder / f"{name}.py").unlink(missing_ok=True)
    place.drop_many(range(4, 6))
    run(place, "run", "--once", PYTHONPATH=os.pathsep)
    return len(names), mark.read_text().splitlines() if mark.exists() else [], place.judge().counts["DONE"]


def run(place: Place, *arguments: str, **environment: str) -> None:
    """The installed command, started in the place's folder."""
    ended = subprocess.run(
        [VISIOND, *arguments],
        cwd=place.folder,
        env={**os.environ, TOKEN: place.token, **environment},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert ended.returncode == 0 or (place.folder / MARK).exists(), ended.stderr[-3000:]
