"""Makes a virtual environment with visiond, beside the one in use, and switches between them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from daemon.installing.places import Places
from daemon.installing.source import FILES, CodeSource
from daemon.installing.steps import StepFailed, run, watch, written_since

LEAST_PYTHON = (3, 11)
NEWEST_PYTHON = 15  # of Python 3, that is looked for
HIDDEN = ("/home", "/root")  # from the service, by ProtectHome=
COMPLETE = ".complete"  # a file in an environment that has everything
UV = re.compile(r"^uv==.*?(?=^\S)", re.MULTILINE | re.DOTALL)  # its entry in the lock


def find_python(places: Places, wanted: str) -> str:
    """An interpreter that the service can run. wanted: by the user, or "". Raises StepFailed."""
    ours = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    minors, folders = range(NEWEST_PYTHON, LEAST_PYTHON[1] - 1, -1), ("/usr/bin", "/usr/local/bin")
    others = [f"{folder}/python3.{minor}" for minor in minors for folder in folders]
    found = [path for path in ([wanted] if wanted else [ours, *others]) if shutil.which(path)]
    for path in found:
        if not places.is_system or not os.path.realpath(path).startswith(HIDDEN):
            return path
    hidden = f" {found[0]} is in a home folder, which the service cannot see." if found else ""
    raise StepFailed(
        f"there is no Python 3.{LEAST_PYTHON[1]} or newer that the service could run.{hidden} "
        "On Debian or Ubuntu: apt install python3-venv. Or name another one with --python."
    )


def _find_uv() -> Path | None:
    """uv, if it is installed for the Python that runs this."""
    try:
        from uv import find_uv_bin

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError):
        return None


class Environment:
    """The environment for one version of visiond."""

    def __init__(self, places: Places, source: CodeSource, python: str, wheels: Path | None = None) -> None:
        """python: the interpreter that was asked for; "": any that fits. wheels: a folder with all packages; None: they
        come from a package index."""
        self._places = places
        self._source = source
        self._wanted = python
        self._from: list[str | Path] = ["--no-index", "--find-links", wheels.absolute()] if wheels else []
        self.folder = places.environments / source.label

    @property
    def visiond(self) -> Path:
        return self.folder / "bin" / "visiond"

    def is_complete(self) -> bool:
        return (self.folder / COMPLETE).is_file() and self._own() == (self.folder / COMPLETE).read_text()

    def is_in_use(self) -> bool:
        return self._places.program.is_symlink() and self._places.program.resolve() == self.folder.resolve()

    def make(self) -> None:
        """Raises StepFailed, CalledProcessError, OSError."""
        python = find_python(self._places, self._wanted)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        uv = _find_uv()
        # Not with --clear if it is in use: a daemon may run from it.
        options = [*([] if self.is_in_use() else ["--clear"]), *(["--without-pip"] if uv else [])]
        run(python, "-m", "venv", *options, self.folder)
        lock = self.folder / "requirements.lock"
        lock.write_bytes(self._source.lock.read_bytes())
        uv = uv or self._add_uv(lock)
        # What the user has set comes last, so it wins.
        environ = {"UV_CACHE_DIR": str(self._places.packages), "UV_LINK_MODE": "hardlink", **os.environ}
        note = written_since(self.folder)
        into = ("--python", self.folder / "bin" / "python")

        def add(*what: str | Path) -> None:
            # Bytecode, as the service may not write it: otherwise each process compiles everything again.
            words = (uv, "pip", "install", *into, "--compile-bytecode", *self._from, *what)
            watch(*words, note=note, draws=True, env=environ)

        add("--require-hashes", "--no-deps", "--requirements", lock)
        if self._places.own_packages.is_file():
            add("--requirements", self._places.own_packages)
        add("--no-deps", "--no-build-isolation", "--reinstall", self._source.path)
        self._link_docs()
        (self.folder / COMPLETE).write_text(self._own())

    def _link_docs(self) -> None:
        """Where the units say that the documentation is, whichever Python this is."""
        for docs in self.folder.glob(f"lib/python*/site-packages/{FILES}/docs"):
            link = self.folder / "docs"
            link.unlink(missing_ok=True)
            link.symlink_to(docs.relative_to(self.folder))

    def _add_uv(self, lock: Path) -> Path:
        """Install the uv that the lock names, with pip."""
        entry = UV.search(lock.read_text() + "\n.")
        if entry is None:
            raise StepFailed("requirements.lock does not name uv")
        only = self.folder / "uv.lock"
        only.write_text(entry.group())
        programs = self.folder / "bin"
        pip = (programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(*pip, *self._from, "--require-hashes", "--no-deps", "--requirement", only)
        return programs / "uv"

    def _own(self) -> str:
        file = self._places.own_packages
        return file.read_text() if file.is_file() else ""


def switch(places: Places, folder: Path) -> None:
    """Make this environment the one in use, in one step. An older visiond's folder, which was no link, is moved aside."""
    link, fresh = places.program, places.program.with_name("visiond.new")
    if link.is_dir() and not link.is_symlink():
        link.rename(set_aside(places))
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.relative_to(link.parent) if folder.is_relative_to(link.parent) else folder)
    os.replace(fresh, link)


def set_aside(places: Places) -> Path:
    """Where the folder of a visiond goes that was installed by hand."""
    return places.program.with_name("visiond.by-hand")


def in_use(places: Places) -> Path | None:
    """The environment that is installed."""
    if places.program.is_symlink():
        return places.program.resolve()
    return places.program if places.program.is_dir() else None


def go_back(places: Places, before: Path | None) -> None:
    """Undo `switch`. before: what `in_use` said then."""
    if before == places.program:  # the folder of one installed by hand
        places.program.unlink()
        set_aside(places).rename(places.program)
    elif before:
        switch(places, before)


def remove_others(places: Places, *kept: Path | None) -> None:
    """Remove all environments but these; uv's cache stays."""
    for folder in places.environments.iterdir():
        if folder.is_dir() and folder != places.packages and folder not in kept:
            shutil.rmtree(folder)
