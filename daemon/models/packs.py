"""The packs in the models folder and those that the configuration names, each with the stages that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from daemon.config.loading import Config
from daemon.core.errors import ModelsUnusable
from daemon.core.hints import quantity
from daemon.layout.models import pack_errors
from daemon.terminal.display import print_json, print_table
from stages.contract.manifest import MANIFEST, PackError, PackErrors
from stages.registry import registry
from stages.weights import catalog, packs
from stages.weights.layouts import plugin_errors
from stages.weights.packs import Pack


@dataclass(frozen=True)
class Listed:
    """A pack or other weights, and the stages and second looks that use it. problem: why it cannot be used, or empty.
    pack: None if not even its content can be read."""

    name: str
    folder: Path
    pack: Pack | None
    used: list[str]
    problem: str = ""

    @property
    def stages(self) -> list[str]:
        return list(self.pack.manifest.stages) if self.pack else []

    @property
    def license(self) -> str:
        return describe_license(self.pack) if self.pack and not self.problem else ""

    @property
    def note(self) -> str:
        return "cannot be used: see below" if self.problem else self.pack.notice if self.pack else ""


@dataclass(frozen=True)
class Shelf:
    packs: list[Listed]
    missing: list[str]  # a sentence for each configured model or pack that is not here

    @property
    def problems(self) -> list[str]:
        return list(
            dict.fromkeys([*(listed.problem for listed in self.packs if listed.problem), *self.missing])
        )


def list_shelf(config: Config) -> Shelf:
    """What is damaged is listed too, with its problem."""
    found: dict[tuple[Path, str], Listed] = {}
    missing = []
    named = name_weights(config)
    for name in dict.fromkeys([*packs.list_packs(config.models.folder), *named]):
        listed = open_listed(config, name)
        if not listed.pack and not listed.folder.exists():
            missing.append(listed.problem)
            continue
        listed = found.setdefault((listed.folder, listed.name), listed)
        used = named.get(name, [])
        listed.used.extend(
            str(use) for use in used if registry.kind_of(use.stage) in listed.stages or not listed.pack
        )
    return Shelf(list(found.values()), missing)


def open_listed(config: Config, name: str) -> Listed:
    """Weights by name or path, with what is wrong with them, as far as the headers of their files show:
    `visiond models verify` reads all of them."""
    pack, problem = None, ""
    try:
        with pack_errors():
            pack = packs.open_pack(name, config.models.folder, record=False, base=config.folder)
            check_headers(pack)
    except ModelsUnusable as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - anything may be wrong in one pack's files; the others are listed
        problem = f"{pack.folder if pack else name} cannot be used: {type(error).__name__}: {error}."
    if pack:
        return Listed(pack.name, pack.folder, pack, [], problem)
    folder = packs.find_packs(config.models.folder).get(name, config.folder / Path(name).expanduser())
    return Listed(folder.name, folder.absolute(), None, [], problem)


def check_headers(pack: Pack) -> None:
    """Raises PackError for what is wrong with a pack, as far as the headers of its files show; and whatever a
    backend's check raises for a manifest that names other files than the backend takes."""
    for stage, entry in pack.manifest.stages.items():
        files = pack.files_of(entry)
        for file in files.values():
            if not file.exists():
                raise PackError(f"{file} is missing. Copy or pull the pack again.")
        try:
            backend = registry.find_backend(stage, entry.backend)
        except registry.UnknownName as error:
            raise PackError(f"{pack.folder / MANIFEST} cannot be used: {error}") from error
        with plugin_errors(stage, pack.folder):
            backend.check(files, allow_pickle=True)


class Use(NamedTuple):
    """look: the name of a second look, or empty."""

    stage: str
    look: str = ""

    def __str__(self) -> str:
        return f"{self.stage} (second look {self.look})" if self.look else self.stage


def name_weights(config: Config) -> dict[str, list[Use]]:
    """Names and paths of weights in the configuration, each with what uses them."""
    named: dict[str, list[Use]] = {}
    for stage in config.stage_names:
        section = getattr(config.stages, stage)
        if section.backend != "fake":
            named.setdefault(section.model or config.models.pack, []).append(Use(stage))
    for look in config.second_look:
        if look.model:
            named.setdefault(look.model, []).append(Use(look.stage, look.name))
    return named


def describe_license(pack: Pack) -> str:
    """Of the weights if it is known, and of the libraries that run them if they have conditions."""
    weights, found = pack.manifest.license, []
    for stage, entry in pack.manifest.stages.items():
        library = registry.find_license(stage, entry.backend, pack.files_of(entry))
        if library and library != weights:
            found.append(f"{entry.backend}: {library}")
    return ", ".join(filter(None, (weights, *dict.fromkeys(found))))


def choose_packs(shelf: Shelf, stages: Sequence[str] | None) -> list[Listed]:
    """The packs with one of these stages, or all; and those whose stages cannot be read."""
    return [
        listed
        for listed in shelf.packs
        if stages is None or not listed.pack or any(stage in listed.stages for stage in stages)
    ]


def print_packs(config: Config, stages: Sequence[str] | None) -> list[str]:
    """Print a table of the packs. Returns the problems."""
    shelf = list_shelf(config)
    print_table(
        ("pack", "folder", "MiB", "stages", "used for", "license", "note"),
        (
            (
                listed.name,
                listed.folder,
                listed.pack.size_bytes >> 20 if listed.pack else "-",
                ", ".join(listed.stages) or "-",
                ", ".join(listed.used) or "-",
                listed.license or "-",
                listed.note,
            )
            for listed in choose_packs(shelf, stages)
        ),
    )
    return shelf.problems


def print_packs_json(config: Config, stages: Sequence[str] | None) -> list[str]:
    """Print the packs as JSON. Returns the problems."""
    shelf = list_shelf(config)
    rows = [
        {
            "name": listed.name,
            "folder": str(listed.folder),
            "bytes": listed.pack.size_bytes if listed.pack else 0,
            "stages": listed.stages,
            "used_for": listed.used,
            "notice": listed.pack.notice if listed.pack else "",
            "license": listed.license,
            "revision": listed.pack.manifest.revision if listed.pack else {},
            "problem": listed.problem,
        }
        for listed in choose_packs(shelf, stages)
    ]
    print_json(rows)
    return shelf.problems


def verify_named(config: Config, wanted: Sequence[str] | None) -> None:
    """Check the files of these packs, or of all that the configuration uses, against their digests; print the number of
    files of each. Raises ModelsUnusable with the problems of all."""
    used = list(name_weights(config)) or [config.models.pack]
    called = {Path(name).name: name for name in used if "/" in name}  # as `list` names folders
    for name in (*packs.list_packs(config.models.folder), *catalog.offered()):
        called.pop(name, None)
    errors: list[PackError] = []
    with pack_errors():
        for name in wanted or used:
            try:
                print(verify_one(config, called.get(name, name)))
            except PackError as error:
                errors.append(error)
        if errors:
            raise PackErrors(errors)


def verify_one(config: Config, name: str) -> str:
    """What was found, as a sentence. Raises UnknownName, PackError."""
    found = "unchanged"
    pack = packs.open_pack(name, config.models.folder, record=False, base=config.folder)
    if not pack.record.is_file():
        found = "recorded, never used before"
        pack = packs.open_pack(name, config.models.folder, base=config.folder)
    packs.verify(pack)
    return f"{pack.name}: {quantity(len(pack.manifest.digests), 'file')} {found}"
