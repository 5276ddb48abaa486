"""manifest.json: the content of a pack of weights, and the digest of every file in it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.base import StageUnusable
from stages.contract.files import open_file, read_file

MANIFEST = "manifest.json"
LABELS = "labels.txt"  # the possible tags, one on each line; beside a model, or in a pack

# The files that a stage may read. Other files in a folder of weights (README, pickles, other frameworks) are ignored.
SUFFIXES = {".safetensors", ".json", ".txt", ".onnx", ".pt", ".jinja", ".model"}
# Chat templates and some tokenizers; manifests of version 0.1 do not list them.
LATER = (".jinja", ".model")


class PackError(Exception):
    """A pack of weights is missing, changed or cannot be used; the message says which one and how to fix it."""


class WeightsError(StageUnusable, PackError):
    """A file of weights is missing, damaged or of another model, as a check of packs finds, or a worker that loads it."""


class NotPulled(PackError):
    """The standard pack, or a model, has not been pulled yet. name: of the model, "" for the pack."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class HubBusy(PackError):
    """The model hub refuses requests for a while."""


class HubUnreachable(PackError):
    """The model hub does not answer at all, so it will not answer about other models either."""


class PackErrors(PackError):
    """What is wrong with several stages."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = errors


def name_place(error: Exception, place: str) -> None:
    """Put the configuration key before an error's message, unless the message already starts with it."""
    if not str(error).startswith(place.split(".", maxsplit=1)[0]):
        error.args = (f"{place}: {error}",)


class StageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stage as a pack provides it."""

    backend: str
    files: dict[str, str] = {}  # role → path of a file or folder, relative to the pack
    options: dict[str, Any] = {}
    dtype: str | None = None
    notice: str = ""  # of this stage's weights, if it is not the pack's


class PackFiles(dict[str, Path]):
    """The files of a stage by role, absolute. A role that the manifest lacks, and a backend asks for, is a PackError."""

    def __init__(self, folder: Path, stage: str, entry: StageEntry) -> None:
        super().__init__({role: folder / file for role, file in entry.files.items()})
        self._place = f"{folder / MANIFEST}: stages.{stage or entry.backend}.files"

    def __missing__(self, role: str) -> Path:
        raise PackError(f'{self._place} has no "{role}". Copy, pull or make the pack again.')


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: str
    description: str = ""
    trained: bool = True
    notice: str = ""  # shown wherever results of its stages are shown
    stages: dict[str, StageEntry] = {}
    digests: dict[str, str] = {}  # relative path → "sha256:…", of every file of the pack
    revision: dict[str, str] = {}  # repository → commit from which it was pulled
    license: str = ""  # of its weights, if it was pulled as one model
    card: dict[
        str, Any
    ] = {}  # its training and scores; minipack/visiond_mini/card.py writes them into README.md

    def notice_of(self, stage: str) -> str:
        """The notice for a stage's answers; empty if the stage is not in this pack."""
        entry = self.stages.get(stage)
        return (entry.notice or self.notice) if entry else ""

    def other_than(self, stage: str) -> str:
        """The only stage that the pack has weights for, if that is another one; else empty."""
        present = list(self.stages)
        return present[0] if len(present) == 1 and present != [stage] else ""


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises PackError if it cannot be used."""
    try:
        manifest = msgspec.json.decode(read_file(path), type=Manifest)
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise PackError(f"{path} is not the manifest of a pack: {error}.") from error
    named = [file for entry in manifest.stages.values() for file in entry.files.values()]
    for name in (*named, *manifest.digests):
        if leads_outside(name):
            raise PackError(f"{path} names {name}, which is outside the pack.")
    return manifest


def leads_outside(name: str) -> bool:
    """Whether a path in a folder may be one outside it."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    os.replace(partial, path)


def digest_file(path: Path) -> str:
    import hashlib  # it would slow every start

    with open_file(path) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def list_files(path: Path) -> list[Path]:
    """The file itself, or every file in a folder that a stage may read, in a fixed order; without hidden files."""
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.suffix in SUFFIXES
        and file.is_file()
        and file != path / MANIFEST
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def digest_folder(folder: Path) -> dict[str, str]:
    """The digest of each file that `list_files` finds, by its path in the folder."""
    return {file.relative_to(folder).as_posix(): digest_file(file) for file in list_files(folder)}
