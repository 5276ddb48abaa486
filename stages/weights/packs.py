"""Finds the weights of each stage, and checks that they have not changed. Imports no torch.

A pack is a folder with a manifest.json (manifest.py). "mini" is inside this package; "standard" is made of three models
(standard.py). A single model is pulled from the model hub by its name (pulling.py). Any other is a folder, either with a
manifest or in the layout of the hub. In the second case its digests are recorded in locks/ under the models folder when
it is used for the first time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.base import StageSpec
from stages.contract.descriptor import Backend, find_nothing
from stages.contract.manifest import (
    LATER,
    MANIFEST,
    Manifest,
    NotPulled,
    PackError,
    PackErrors,
    PackFiles,
    StageEntry,
    digest_file,
    list_files,
    name_place,
    read_manifest,
    write_manifest,
)
from stages.registry import registry
from stages.weights import layouts, names
from stages.weights.catalog import describe_source
from stages.weights.dtypes import choose_dtype
from stages.weights.names import find_pulled

MINI = Path(__file__).parents[1] / "mini"
STANDARD = "standard"


@dataclass(frozen=True)
class Pack:
    """A folder of weights.

    record: the file with its digests. models_folder: where locks of folders without a manifest are kept.
    plain: the folder or file that was named, if it has no manifest. base: of relative paths of models.
    """

    folder: Path
    manifest: Manifest
    record: Path
    models_folder: Path
    plain: Path | None = None
    base: Path = Path()

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def notice(self) -> str:
        """Shown wherever results of its stages are shown; empty if there is nothing to warn of."""
        return self.manifest.notice or " ".join(
            sorted({entry.notice for entry in self.manifest.stages.values()} - {""})
        )

    def files_of(self, entry: StageEntry) -> PackFiles:
        """The files of one of its stages."""
        stage = next((name for name, known in self.manifest.stages.items() if known is entry), "")
        return PackFiles(self.folder, stage, entry)

    @property
    def files(self) -> set[Path]:
        """Those that stages may read; in a folder without a manifest, those that were recognized."""
        named = [file for entry in self.manifest.stages.values() for file in self.files_of(entry).values()]
        return {file for place in (named if self.plain else [self.folder]) for file in list_files(place)}

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def open_pack(
    name_or_path: str | Path,
    models_folder: Path,
    *,
    record: bool = True,
    stage: str = "",
    backend: str = "",
    base: Path = Path(),
) -> Pack:
    """Find a pack by name or by folder.

    base: the folder that a relative path is relative to.
    record: whether to record the digests of a folder that is new and has no manifest.
    stage, backend: if both are named, such a folder is recognized by that backend of that stage, whichever
        other backends could use it.
    Raises UnknownName, or PackError when there is none or it cannot be used.
    """
    name = str(name_or_path)
    known = {"mini": MINI, STANDARD: models_folder / STANDARD, **find_packs(models_folder)}
    path = known.get(name) or find_pulled(name, models_folder) or base / Path(name).expanduser()
    if name == STANDARD and not (path / MANIFEST).is_file():
        raise NotPulled(
            f'the pack "standard" is not in {models_folder}; pull it, or copy the folder {path} from a machine that has it.'
        )
    if not path.exists():
        raise names.explain_missing(name, path, known, models_folder, stage)
    path = Path(os.path.abspath(path))  # however it is written, a folder has one lock
    if (path / MANIFEST).is_file():
        return Pack(path, read_manifest(path / MANIFEST), path / MANIFEST, models_folder, base=base)
    asked = stage
    if not backend or is_default(path, models_folder, stage, backend):
        stage = backend = ""  # whichever backend can use it
    plain = open_plain(path, models_folder, record=record, stage=stage, backend=backend, asked=asked)
    return replace(plain, base=base)


def list_packs(models_folder: Path) -> list[str]:
    """The names of all packs."""
    return ["mini", *find_packs(models_folder)]


def find_packs(models_folder: Path) -> dict[str, Path]:
    """Folders with a manifest under the models folder, by name. A hidden one is not complete."""
    folders = (path.parent for path in sorted(models_folder.glob(f"*/{MANIFEST}")))
    return {folder.name: folder for folder in folders if not folder.name.startswith(".")}


def open_plain(
    path: Path, models_folder: Path, *, record: bool, stage: str = "", backend: str = "", asked: str = ""
) -> Pack:
    """A folder or file of weights without a manifest: recognize it and record its digests, unless that is done.

    stage, backend, asked: as in `recognize`. What is recognized for these alone has a separate lock.
    """
    lock = lock_of(path, models_folder, stage, backend)
    folder = path if path.is_dir() else path.parent
    if not lock.is_file():
        manifest = Manifest(name=path.name, stages=layouts.recognize(path, stage, backend, asked=asked))
        found = Pack(folder, manifest, lock, models_folder, path)
        if not record or not manifest.stages:
            return found
        digests = {file.relative_to(folder).as_posix(): digest_file(file) for file in sorted(found.files)}
        try:
            write_manifest(lock, msgspec.structs.replace(manifest, digests=digests))
        except OSError as error:
            raise PackError(
                f"{lock} cannot be written: {error.strerror}. Make {models_folder} writable."
            ) from error
    return Pack(folder, read_manifest(lock), lock, models_folder, path)


def lock_of(path: Path, models_folder: Path, stage: str = "", backend: str = "") -> Path:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = "-".join(part for part in (path.name, digest, stage, backend) if part)
    return models_folder / "locks" / f"{name}.json"


def is_default(path: Path, models_folder: Path, stage: str, backend: str) -> bool:
    """Whether a folder without a manifest is recognized by this backend of a stage when none is named."""
    lock = lock_of(path, models_folder)
    if lock.is_file() and (entry := read_manifest(lock).stages.get(stage)):
        return entry.backend == backend
    return backend == next(iter(registry.find_stage(stage).backends))


def verify(pack: Pack, files: Iterable[str] | None = None) -> None:
    """Compare files (all, or those named by relative path) with their digests. Raises PackError that lists every missing or
    changed file."""
    wrong = []
    for name in pack.manifest.digests if files is None else files:
        try:
            if not (pack.folder / name).is_file():
                wrong.append(f"{name} is missing")
            elif digest_file(pack.folder / name) != pack.manifest.digests[name]:
                wrong.append(f"{name} is altered")
        except OSError as error:
            raise PackError(f"{pack.folder / name} cannot be read: {error.strerror}.") from error
    if wrong:
        fix = "Copy or pull it again"
        if pack.plain:
            fix += f", or, if you changed it yourself, delete {pack.record}"
        raise PackError(f"{pack.folder}: {', '.join(wrong)}. {fix}.")


def resolve(
    pack: Pack,
    stage: str,
    overrides: Mapping[str, Any] = {},
    *,
    files: Mapping[str, Path] = {},
    notice: str = "",
) -> StageSpec:
    """A stage with its verified files, its fingerprint and the notice of its weights.

    overrides: backend, model (another pack or folder of weights for this stage), dtype, batch_size and
        options, as in [stages.*]; the pack's value is used for one that is missing, empty, 0 or "auto". The dtype
        "half" is the half precision of the backend.
    files: role → path, instead of the pack's.
    notice: of those files, shown where the pack has none.
    Raises UnknownName, or PackError when the pack has no such stage, or a file is missing, changed or not
    what the stage takes.
    """
    wanted = {key: value for key, value in overrides.items() if value not in ("", 0, "auto", None)}
    configured = pack
    kind = registry.kind_of(stage)  # a pack has weights for a stage, whichever variant of it they are for
    pack, entry = choose_weights(pack, kind, wanted)
    name, backend = entry.backend, registry.find_backend(stage, entry.backend)
    options = {**entry.options, **wanted.get("options", {})}
    paths = find_files(pack, entry, backend, files)
    digests = {role: check_files(pack, path, kind, name) for role, path in paths.items()}
    words = find_words(configured, stage, backend, {**options, **paths})
    digests |= {role: check_files(configured, path) for role, path in words.items()}
    paths.update(words)
    if backend.needs_weights:
        backend.check(paths, allow_pickle=options.get("allow_pickle") is True)
        notice = pack.manifest.notice_of(kind) or notice
    else:
        notice = str(options.get("notice", ""))
    dtype = choose_dtype(stage, name, paths, wanted.get("dtype") or entry.dtype or "float32")
    return StageSpec(
        name=stage,
        backend=name,
        files={role: str(path) for role, path in paths.items()},
        fingerprint=fingerprint(stage, name, digests | layouts.list_versions(backend, paths), dtype, options),
        dtype=dtype,
        batch_size=wanted.get("batch_size", 16),
        options=options,
        provenance=msgspec.structs.replace(
            describe_source(pack.manifest, kind, entry),
            backend=name,
            dtype=dtype,
            options=relevant_options(backend, options),
        ),
        notice=notice,
    )


def find_files(pack: Pack, entry: StageEntry, backend: Backend, others: Mapping[str, Path]) -> PackFiles:
    """A stage's files: others in the place of the pack's, and those that the backend brings along for the rest."""
    paths = pack.files_of(entry)
    paths.update(others)
    if backend.bundled and (missing := [role for role in backend.roles if role not in paths]):
        bundled = backend.bundled()
        paths.update({role: Path(bundled[role]) for role in missing})
    return paths


def find_words(pack: Pack, stage: str, backend: Backend, known: Mapping[str, object]) -> dict[str, Path]:
    """The files of words that a model takes from the configured pack. known: what it has by role, of itself or as an option."""
    files = pack.manifest.stages.get(stage, StageEntry("")).files
    taken = [role for role in backend.vocabulary if role in files and known.get(role) is None]
    return {role: pack.folder / files[role] for role in taken}


def choose_weights(pack: Pack, stage: str, wanted: Mapping[str, Any]) -> tuple[Pack, StageEntry]:
    """A stage's weights, those of its own model if one is named; and the pack that they are in."""
    name, model = wanted.get("backend", ""), wanted.get("model")
    without_weights = bool(name) and not registry.find_backend(stage, name).needs_weights
    if model:
        kind = "" if without_weights else name
        pack = open_pack(model, pack.models_folder, stage=stage, backend=kind, base=pack.base)
    if without_weights:
        return pack, StageEntry(name)
    pack, entry = find_entry(pack, stage, name)
    backend = registry.find_backend(stage, entry.backend)
    if model and backend.bundled and not name and (other := pack.manifest.other_than(stage)):
        # It would be ignored without a word.
        raise PackError(f"{model} is a model for the stage {other}, not for {stage}.")
    return pack, entry if backend.needs_weights else StageEntry(entry.backend)


def resolve_all(
    pack: Pack, stages: Iterable[str], overrides: Mapping[str, Mapping[str, Any]]
) -> list[StageSpec]:
    """Every stage in turn. Where a stage shares files with an earlier one, as the captions' CLIP does,
    it gets the earlier stage's, so that the answers of both can be compared."""
    specs: dict[str, StageSpec] = {}
    errors: list[PackError | registry.UnknownName] = []
    for stage in stages:
        try:
            specs[stage] = resolve_beside(pack, stage, overrides.get(stage, {}), specs)
        except (PackError, registry.UnknownName) as error:
            if overrides.get(stage, {}).get("model"):
                name_place(error, f"stages.{stage}.model")
            errors.append(error)
    if errors:
        raise PackErrors(errors) if len(errors) > 1 else errors[0]
    return list(specs.values())


def resolve_beside(
    pack: Pack, stage: str, overrides: Mapping[str, Any], specs: Mapping[str, StageSpec]
) -> StageSpec:
    """A stage that runs after these."""
    described = registry.find_stage(stage)
    shared: dict[str, Path] = {}
    notice = ""
    for backend in described.backends.values():
        for role, (other, part) in backend.shares.items():
            if other in specs and part in specs[other].files:
                shared[role], notice = Path(specs[other].files[part]), specs[other].notice
    spec = resolve(pack, stage, overrides, files=shared, notice=notice)
    used = [specs[name].fingerprint for name in described.uses if name in specs]
    # visiond's own stages share files instead
    if used and registry.STAGES[registry.kind_of(stage)] not in registry.BUILT_IN:
        return msgspec.structs.replace(spec, fingerprint=digest([spec.fingerprint, *used]))
    return spec


def find_entry(pack: Pack, stage: str, backend: str = "") -> tuple[Pack, StageEntry]:
    """A stage's weights, for one backend if it is named; and the pack that they are in.

    They are the pack's; else those that a backend brings along, or none if a backend needs none;
    else what the backend finds in the pack's folder.
    """
    entry = pack.manifest.stages.get(stage)
    if entry and backend in ("", entry.backend):
        return pack, entry
    backends = registry.find_stage(stage).backends
    for name, kind in backends.items():
        if backend in ("", name) and (kind.bundled or not kind.needs_weights):
            return pack, StageEntry(name, kind.bundled() if kind.bundled else {})
    if entry and backend in backends and backends[backend].find is find_nothing:
        return pack, msgspec.structs.replace(entry, backend=backend)
    return search_folder(pack, stage, backend)


def search_folder(pack: Pack, stage: str, backend: str) -> tuple[Pack, StageEntry]:
    """What a backend, or any of a folder without a manifest, can use in a pack's folder, although the manifest names it for no
    stage or for others. Raises PackError if there is nothing."""
    if pack.plain:
        plain = open_plain(pack.plain, pack.models_folder, record=True, stage=stage, backend=backend)
        if entry := plain.manifest.stages.get(stage):
            return plain, entry
    elif named := registry.find_stage(stage).backends.get(backend):
        with layouts.plugin_errors(stage, pack.folder):
            files = named.find(pack.folder)
        if files:
            return pack, StageEntry(backend, {**files, **layouts.shared_files(named, pack.manifest.stages)})
    raise PackError(layouts.explain_no_weights(pack.folder, pack.manifest, stage, backend))


# The backends of version 0.1. A manifest of that version may lack files of the kinds LATER, which these do not read.
OLD_BACKENDS = {("yolo", "ultralytics"), ("clip", "transformers"), ("blip", "transformers")}


def check_files(pack: Pack, path: Path, stage: str = "", backend: str = "") -> dict[str, str]:
    """Digests by path of a file or of all files in a folder, compared with the pack's record if they are part of the pack."""
    if not path.exists():
        raise PackError(f"{path} is missing. Copy or pull the pack again.")
    if not path.is_relative_to(pack.folder):
        return {str(file): digest_file(file) for file in list_files(path)}
    refuse_unknown(pack, path, is_old=(stage, backend) in OLD_BACKENDS)
    place = path.relative_to(pack.folder)
    known = {
        name: digest for name, digest in pack.manifest.digests.items() if Path(name).is_relative_to(place)
    }
    verify(pack, known)
    return known


def refuse_unknown(pack: Pack, path: Path, *, is_old: bool) -> None:
    """Raises PackError for a file of a pack that its record lacks. is_old: whether it is for one of OLD_BACKENDS."""
    recorded = pack.manifest.digests
    lacks_later = is_old and not any(name.endswith(LATER) for name in recorded)
    found = {file.relative_to(pack.folder).as_posix() for file in list_files(path)}
    unknown = [name for name in sorted(found - recorded.keys()) if not (lacks_later and name.endswith(LATER))]
    if unknown:
        raise PackError(
            f"{pack.folder}: {', '.join(unknown)} is not in {pack.record}; remove it from the folder."
        )


def relevant_options(backend: Backend, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that may change an answer."""
    return {key: value for key, value in options.items() if key not in backend.silent}


def fingerprint(
    stage: str, backend: str, digests: Mapping[str, Mapping[str, str]], dtype: str, options: Mapping[str, Any]
) -> str:
    """Sixteen hexadecimal digits that change whenever the stage's answers may. Where the files are does not matter."""
    contents = {role: sorted(files.values()) for role, files in digests.items()}
    described = registry.find_backend(stage, backend)
    identity = [stage, backend, described.version, contents, dtype, relevant_options(described, options)]
    return digest(identity)


def digest(identity: list[Any]) -> str:
    return f"sha256:{hashlib.sha256(msgspec.json.encode(identity, order='sorted')).hexdigest()[:16]}"
