"""Which weights each stage runs on, where they lie, and whether they are still what they were. Imports no torch.

A pack is a folder with a manifest.json (manifest.py). "mini" lies inside this package; "standard" is pulled from the
model hub once (hub.py); any other is a folder, with a manifest or in the hub's own layout, whose digests are then
recorded at first sight under the models folder, in locks/.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stages import recognition, registry
from stages.base import StageSpec
from stages.descriptor import Backend
from stages.manifest import (
    MANIFEST,
    Manifest,
    NotPulled,
    PackError,
    StageEntry,
    digest_file,
    list_files,
    read_manifest,
    write_manifest,
)
from stages.weights.hub import Hub, pull

MINI = Path(__file__).parents[1] / "mini"
STANDARD = "standard"


@dataclass(frozen=True)
class Pack:
    """A folder of weights and what is known of it.

    record: the file that its digests stand in. models_folder: where locks of folders without a manifest are kept.
    """

    folder: Path
    manifest: Manifest
    record: Path
    models_folder: Path

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def notice(self) -> str:
        """To be shown wherever its stages' results are; empty for weights that mean something."""
        return self.manifest.notice or " ".join(sorted({entry.notice for entry in self.manifest.stages.values()} - {""}))

    @property
    def size_bytes(self) -> int:
        """Of its files that stages may read; of a folder without a manifest, which may hold anything, only of those named."""
        named = [self.folder / file for entry in self.manifest.stages.values() for file in entry.files.values()]
        places = [self.folder] if self.record.parent == self.folder else named
        return sum(file.stat().st_size for file in {file for place in places for file in list_files(place)})


def open_pack(name_or_path: str | Path, models_folder: Path, *, record: bool = True) -> Pack:
    """Find a pack by name or by folder. record: whether to record the digests of a folder that is new and has no manifest.
    Raises UnknownName, or PackError when there is none or it cannot be used."""
    name = str(name_or_path)
    known = {"mini": MINI, STANDARD: models_folder / STANDARD, **find_packs(models_folder)}
    path = known.get(name, Path(name).expanduser())
    if name == STANDARD and not (path / MANIFEST).is_file():
        raise NotPulled(
            f'the pack "standard" is not in {models_folder}; pull it, or copy the folder {path} from a machine that has it.'
        )
    if not path.exists():
        if "/" in name:
            raise PackError(f"there is no folder {name}; name a pack or a folder with weights.")
        raise registry.UnknownName("pack", name, known, ", and a folder is told by the slash in its path")
    path = path.absolute()
    if (path / MANIFEST).is_file():
        return Pack(path, read_manifest(path / MANIFEST), path / MANIFEST, models_folder)
    return open_plain(path, models_folder, record=record)


def list_packs(models_folder: Path) -> list[str]:
    """The names of the packs that are there."""
    return ["mini", *find_packs(models_folder)]


def pull_standard(models_folder: Path, progress: Callable[[str], None] = print, hub: Hub | None = None) -> Pack:
    """Fetch the standard pack, unless it is there. Raises PackError."""
    pull(models_folder / STANDARD, progress, hub)
    return open_pack(STANDARD, models_folder)


def find_packs(models_folder: Path) -> dict[str, Path]:
    """Folders with a manifest under the models folder, by name."""
    return {path.parent.name: path.parent for path in sorted(models_folder.glob(f"*/{MANIFEST}"))}


def open_plain(path: Path, models_folder: Path, *, record: bool) -> Pack:
    """A folder or file of weights without a manifest: recognise it, and record its digests when it is new, or have none."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    lock = models_folder / "locks" / f"{path.name}-{digest}.json"
    folder = path if path.is_dir() else path.parent
    if not lock.is_file():
        stages = recognise(path)
        if not record:
            return Pack(folder, Manifest(name=path.name, stages=stages), lock, models_folder)
        named = [folder / file for entry in stages.values() for file in entry.files.values()]
        files = sorted({file for place in named for file in list_files(place)})
        digests = {file.relative_to(folder).as_posix(): digest_file(file) for file in files}
        try:
            write_manifest(lock, Manifest(name=path.name, stages=stages, digests=digests))
        except OSError as error:
            raise PackError(f"{lock} cannot be written: {error.strerror}. Make {models_folder} writable.") from error
    return Pack(folder, read_manifest(lock), lock, models_folder)


def recognise(path: Path) -> dict[str, StageEntry]:
    """The stages that a folder in the hub's layout provides: clip/, blip/, yolo.safetensors, or one model by itself.

    Raises PackError when it provides none, or one that no stage takes.
    """
    found: dict[str, tuple[str, Backend, dict[str, str]]] = {}
    for stage, described in registry.STAGES.items():
        for name, backend in described.backends.items():
            if stage not in found and (files := backend.find(path)):
                shared = {role: found[other][2].get(part) for role, (other, part) in backend.shares.items() if other in found}
                found[stage] = name, backend, {**files, **{role: file for role, file in shared.items() if file}}
    if not found:
        raise PackError(describe_unknown(path))
    folder = path if path.is_dir() else path.parent
    for _, backend, files in found.values():
        backend.check({role: folder / file for role, file in files.items()}, allow_pickle=True)
    return {stage: StageEntry(name, files) for stage, (name, _, files) in found.items()}


def describe_unknown(path: Path) -> str:
    if path.is_file():
        return f"{path} is to be a YOLO model: a .pt file, or a .safetensors file with a yolo.json beside it."
    if (path / "config.json").is_file():
        model_type, name = recognition.name_model(path)
        taken = {stage: [b.takes for b in kind.backends.values() if b.takes] for stage, kind in registry.STAGES.items()}
        wanted = " and ".join(f"{name} for {stage}" for stage, names in taken.items() for name in names)
        return f'{path} holds {name or "a model"} (model_type "{model_type}" in its config.json); visiond takes {wanted}.'
    if any(path.glob("*.safetensors")) and not (path / "yolo.safetensors").is_file():
        return f"{path} has weights, but no config.json for them. Save the whole model there with save_pretrained."
    return (
        f"{path} has no weights that visiond knows: there should be a {MANIFEST}, or clip/, blip/ or yolo.safetensors with "
        "yolo.json."
    )


def verify(pack: Pack, names: Iterable[str] | None = None) -> None:
    """Hold files (all, or those named by relative path) against their digests.

    Raises PackError with every file that is missing or altered.
    """
    wrong = []
    for name in pack.manifest.digests if names is None else names:
        if not (pack.folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif digest_file(pack.folder / name) != pack.manifest.digests[name]:
            wrong.append(f"{name} is altered")
    if wrong:
        mend = "Copy or pull the pack again"
        if pack.record.parent != pack.folder:
            mend += f", or, if you changed it yourself, delete {pack.record}"
        raise PackError(f"{pack.folder}: {', '.join(wrong)}. {mend}.")


def resolve(
    pack: Pack,
    stage: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, Path] | None = None,
    notice: str = "",
) -> StageSpec:
    """A stage with its verified files, its fingerprint and the notice of its weights.

    overrides: backend, model (another pack or folder of weights for this stage), dtype, batch_size and options, as in
        [stages.*]; what is missing, empty, 0 or "auto" is the pack's.
    files: role → path, in place of the pack's. notice: theirs, which is told where the pack has none.
    Raises UnknownName, or PackError when the pack has no such stage, or a file is missing, altered or not what the stage takes.
    """
    wanted = {key: value for key, value in (overrides or {}).items() if value not in ("", 0, "auto", None)}
    if "model" in wanted:
        pack = open_pack(wanted["model"], pack.models_folder)
    name = wanted.get("backend") or find_entry(pack, stage).backend
    backend = registry.find_backend(stage, name)
    entry = find_entry(pack, stage) if backend.needs_weights else StageEntry(name)
    paths = {role: pack.folder / file for role, file in entry.files.items()} | dict(files or {})
    digests = {role: check_files(pack, path) for role, path in paths.items()}
    dtype = wanted.get("dtype") or entry.dtype or "float32"
    options = {**entry.options, **wanted.get("options", {})}
    if backend.needs_weights:
        backend.check(paths, allow_pickle=options.get("allow_pickle") is True)
    return StageSpec(
        name=stage,
        backend=name,
        files={role: str(path) for role, path in paths.items()},
        fingerprint=fingerprint(stage, name, digests, dtype, options),
        dtype=dtype,
        batch_size=wanted.get("batch_size", 16),
        options=options,
        notice=pack.manifest.notice_of(stage) or notice if backend.needs_weights else str(options.get("notice", "")),
    )


def resolve_all(pack: Pack, stages: Iterable[str], overrides: Mapping[str, Mapping[str, Any]]) -> list[StageSpec]:
    """Every stage in turn. Where a stage shares files with an earlier one, as the captions' CLIP does, they are the earlier
    one's, so that the answers of both can be compared."""
    specs: dict[str, StageSpec] = {}
    for stage in stages:
        described = registry.find_stage(stage)
        shared: dict[str, Path] = {}
        notice = ""
        for backend in described.backends.values():
            for role, (other, part) in backend.shares.items():
                if other in specs and part in specs[other].files:
                    shared[role], notice = Path(specs[other].files[part]), specs[other].notice
        spec = resolve(pack, stage, overrides.get(stage), files=shared, notice=notice)
        used = [specs[name].fingerprint for name in described.uses if name in specs]
        if used and described not in registry.BUILT_IN:  # visiond's own know what to share
            spec = msgspec.structs.replace(spec, fingerprint=digest([spec.fingerprint, *used]))
        specs[stage] = spec
    return list(specs.values())


def find_entry(pack: Pack, stage: str) -> StageEntry:
    """As the pack has it; else by the first backend of the stage that brings its weights or needs none."""
    if stage in pack.manifest.stages:
        return pack.manifest.stages[stage]
    for name, backend in registry.find_stage(stage).backends.items():
        if backend.bundled:
            return StageEntry(name, backend.bundled())
        if not backend.needs_weights:
            return StageEntry(name)
    raise PackError(f"{pack.folder} has no weights for {stage}; it has {', '.join(pack.manifest.stages) or 'none'}.")


def check_files(pack: Pack, path: Path) -> dict[str, str]:
    """Digests of a file or of all files in a folder, held against the pack's record where they are part of it."""
    if not path.exists():
        raise PackError(f"{path} is missing. Copy or pull the pack again.")
    if not path.is_relative_to(pack.folder):
        return {file.name: digest_file(file) for file in list_files(path)}
    files = [file.relative_to(pack.folder).as_posix() for file in list_files(path)]
    if strange := [file for file in files if file not in pack.manifest.digests]:
        raise PackError(f"{pack.folder}: {', '.join(strange)} is not in {pack.record}; take it out of the folder.")
    prefix = "" if path == pack.folder else path.relative_to(pack.folder).as_posix()
    known = [name for name in pack.manifest.digests if name == prefix or not prefix or name.startswith(f"{prefix}/")]
    verify(pack, known)
    return {name: pack.manifest.digests[name] for name in known}


def fingerprint(
    stage: str, backend: str, digests: Mapping[str, Mapping[str, str]], dtype: str, options: Mapping[str, Any]
) -> str:
    """Sixteen hexadecimal digits that change whenever the stage's answers may; where files lie does not matter."""
    contents = {role: sorted(files.values()) for role, files in digests.items()}
    described = registry.find_backend(stage, backend)
    telling = {key: value for key, value in options.items() if key not in described.silent}
    identity = [stage, backend, described.version, contents, dtype, telling]
    return digest(identity)


def digest(identity: list[Any]) -> str:
    return f"sha256:{hashlib.sha256(msgspec.json.encode(identity, order='sorted')).hexdigest()[:16]}"
