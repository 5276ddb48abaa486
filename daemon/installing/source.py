"""What is installed: the visiond that runs the command, from a checkout, from a wheel, or installed by pip."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.resources.abc import Traversable
from pathlib import Path

from daemon.installing.steps import StepFailed

ROOT = Path(__file__).parents[2]  # a checkout, a wheel, or the folder of installed packages
FILES = "daemon/installing/files"  # in a wheel: see pyproject.toml
CODE = ("daemon/", "stages/", "visiond/")  # the packages of pyproject.toml


@dataclass(frozen=True)
class CodeSource:
    """path: a checkout or a wheel. files: what is needed besides the code."""

    path: Path
    version: str
    digest: str  # of all its code
    lock: Traversable
    systemd: Traversable

    @property
    def label(self) -> str:
        """The name of its environment."""
        return f"{self.version}-{self.digest[:12]}"


def find_source(wheel: Path | None, scratch: Path) -> CodeSource:
    """wheel: the program to install; None: the one that runs. scratch: a folder for a wheel of an installed one.
    Raises StepFailed."""
    if wheel:
        return _of_wheel(wheel)
    if zipfile.is_zipfile(ROOT):
        return _of_wheel(ROOT)
    if (ROOT / "pyproject.toml").is_file():
        return _of_checkout(ROOT)
    return _of_wheel(pack_installed(scratch))


def _of_checkout(folder: Path) -> CodeSource:
    from daemon import __version__

    lock, systemd = folder / "requirements.lock", folder / "deploy" / "systemd"
    code = [file for name in CODE for file in (folder / name).rglob("*") if file.is_file()]
    entries = [
        (file.relative_to(folder).as_posix(), file) for file in code if "__pycache__" not in file.parts
    ]
    return CodeSource(folder, __version__, _digest(entries, lock, systemd), lock, systemd)


def _of_wheel(file: Path) -> CodeSource:
    """Raises StepFailed."""
    try:
        packed = zipfile.ZipFile(file)
    except (OSError, zipfile.BadZipFile) as error:
        raise StepFailed(f"{file} is not a wheel: {error}") from error
    files = zipfile.Path(packed, f"{FILES}/")
    name, version, *_ = file.name.split("-")
    if name != "visiond" or not files.exists():
        raise StepFailed(f"{file} is not a wheel of visiond 0.2.0 or newer")
    names = [entry for entry in packed.namelist() if entry.startswith(CODE) and not entry.startswith(FILES)]
    names = [entry for entry in names if not entry.endswith("/")]
    entries = [(entry, zipfile.Path(packed, entry)) for entry in names]
    lock, systemd = files / "requirements.lock", files / "systemd"
    return CodeSource(file, version, _digest(entries, lock, systemd), lock, systemd)


def _digest(code: Iterable[tuple[str, Traversable]], lock: Traversable, systemd: Traversable) -> str:
    """The same for a checkout, its wheel, and what was installed from it."""
    units = [(file.name, file) for file in systemd.iterdir() if file.is_file()]
    whole = hashlib.sha256()
    for name, file in sorted([*code, *units, ("lock", lock)], key=lambda entry: entry[0]):
        whole.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def pack_installed(scratch: Path) -> Path:
    """A wheel of the visiond that is installed beside this file."""
    installed = metadata.distribution("visiond")
    wheel = scratch / f"visiond-{installed.version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in sorted(installed.files or [], key=str):
            name = entry.as_posix()
            made_by_the_installer = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")
            if ".." in entry.parts or "__pycache__" in entry.parts or entry.name in made_by_the_installer:
                continue
            data = Path(str(entry.locate())).read_bytes()
            # A fixed time, so that the same files make the same wheel.
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}")
            if entry.name == "METADATA":
                where = f"{entry.parent.as_posix()}/RECORD"
        record.append(f"{where},,")
        packed.writestr(zipfile.ZipInfo(where, (1980, 1, 1, 0, 0, 0)), "\n".join(record) + "\n")
    return wheel
