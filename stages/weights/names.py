"""What a user types for a model that can be pulled: a name of the catalog, or a repository of the model hub,
either with a revision."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stages.contract.manifest import MANIFEST, NotPulled, PackError, read_manifest
from stages.registry import registry
from stages.weights import catalog
from stages.weights.catalog import CATALOG, PublishedModel

PART = r"[A-Za-z0-9][\w.-]*"
REPOSITORY = re.compile(rf"({PART}/{PART})(?:/({PART}\.pt))?")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model on the hub. file: a .pt file, of a repository that has several models. revision: "" for the newest."""

    repository: str
    file: str = ""
    revision: str = ""
    entry: PublishedModel | None = None

    @property
    def name(self) -> str:
        """As short as a user can type it, without the revision."""
        return self.entry.name if self.entry else "/".join(filter(None, (self.repository, self.file)))

    @property
    def typed(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def folder(self) -> str:
        """Its name under the models folder: org--repo, with the file and the revision if there are any."""
        place = "--".join(filter(None, (self.repository, self.file.removesuffix(".pt")))).replace("/", "--")
        return f"{place}@{self.revision.replace('/', '--')}" if self.revision else place


def parse(text: str) -> Reference | None:
    """None: this is not a name of the catalog, and does not look like a repository."""
    name, at, revision = text.partition("@")
    if (at and not REVISION.fullmatch(revision)) or ".." in text:
        return None
    if entry := CATALOG.get(name):
        return Reference(entry.repository, entry.file, revision, entry)
    if not (match := REPOSITORY.fullmatch(name)):
        return None
    repository, file = match[1], match[2] or ""
    if entry := catalog.find_published(repository, file):
        return Reference(entry.repository, entry.file, revision, entry)
    return Reference(repository, file, revision)


def read_reference(text: str) -> Reference:
    """As `parse`. Raises UnknownName, or PackError for a model that no backend of this installation takes."""
    reference = parse(text)
    if reference is None:
        otherwise = "`visiond models list` shows all names; a repository of the model hub is written org/name"
        raise registry.UnknownName("model", text, (), otherwise, catalog.offered())
    entry = reference.entry
    if entry and not catalog.find_backend(entry):
        raise PackError(
            f'no backend of this installation takes {entry.name} ({entry.family}, model_type "{entry.type}").'
        )
    return reference


def find_pulled(text: str, models_folder: Path) -> Path | None:
    """The folder of a model under the models folder. A model that was pulled without a revision is found by its
    commit too."""
    if not (reference := parse(text)):
        return None
    if (folder := models_folder / reference.folder).is_dir():
        return folder
    newest = models_folder / reference.folder.partition("@")[0]
    if COMMIT.fullmatch(reference.revision) and (newest / MANIFEST).is_file():
        commit = read_manifest(newest / MANIFEST).revision.get(reference.repository, "")
        return newest if commit.startswith(reference.revision) else None
    return None


def explain_missing(
    name: str, path: Path, known: Iterable[str], models_folder: Path, stage: str
) -> Exception:
    """The error for a name of which there is no pack, model or folder. path: the folder that was looked for.
    known: the names of packs. stage: that the model is for, if it is for one."""
    reference = parse(name)
    if reference is None:
        if "/" in name:
            return PackError(
                f"there is no folder {os.path.abspath(path)}; name a pack, a model or a folder with weights."
            )
        otherwise = ", or a model that `visiond models list` shows; a folder must have a slash in its path"
        return registry.UnknownName("pack or model", name, known, otherwise, catalog.offered())
    try:
        read_reference(name)
    except PackError as error:
        return error
    if stage and reference.entry and reference.entry.stage != stage:
        return PackError(f"{name} is a model for the stage {reference.entry.stage}, not for {stage}.")
    missing = f"the model {reference.typed} is not in {models_folder}; "
    if "/" in name and not reference.entry:  # may be a folder with a typing error
        missing = (
            f"there is no folder {os.path.abspath(path)}, and no model {reference.typed} in {models_folder}. "
            "If you mean a model of the hub, "
        )
    return NotPulled(
        f"{missing}pull it, or copy the folder {models_folder / reference.folder} from a machine that has it.",
        reference.typed,
    )
