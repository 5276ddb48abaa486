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

# Options that change how fast or whether an answer comes, but not which.
SILENT_OPTIONS = {
    "load_seconds",
    "latency_seconds",
    "latency_per_image_seconds",
    "fail",
    "oom_above",
    "allow_pickle",
    "unusable",
    "notice",
}


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
    if path.is_file():
        if path.suffix == ".pt":
            entry = StageEntry("ultralytics", {"weights": path.name})
        elif path.suffix == ".safetensors" and (path.parent / "yolo.json").is_file():
            entry = StageEntry("ultralytics", {"weights": path.name, "config": "yolo.json"})
        else:
            raise PackError(f"{path} is to be a YOLO model: a .pt file, or a .safetensors file with a yolo.json beside it.")
        check_kind("yolo", {role: path.parent / file for role, file in entry.files.items()})
        return {"yolo": entry}
    stages: dict[str, StageEntry] = {}
    if (path / "yolo.safetensors").is_file() and (path / "yolo.json").is_file():
        stages["yolo"] = StageEntry("ultralytics", {"weights": "yolo.safetensors", "config": "yolo.json"})
    clip, blip = (find_model(path, kind) for kind in ("clip", "blip"))
    if clip:
        labels = {"labels": "labels.txt"} if (path / "labels.txt").is_file() else {}
        stages["clip"] = StageEntry("transformers", {"model": clip, **labels})
    if blip:
        stages["blip"] = StageEntry("transformers", {"model": blip, **({"clip": clip} if clip else {})})
    if not stages:
        raise PackError(describe_unknown(path))
    for stage, entry in stages.items():
        check_kind(stage, {role: path / file for role, file in entry.files.items()})
    return stages


def find_model(path: Path, kind: str) -> str | None:
    """Where a transformers model of that kind lies: in a sub-folder of that name, or in the folder itself."""
    if (path / kind / "config.json").is_file():
        return kind
    config = path / "config.json"
    return "." if config.is_file() and recognition.read_config(config).get("model_type") == kind else None


def describe_unknown(path: Path) -> str:
    if (path / "config.json").is_file():
        model_type, name = recognition.name_model(path)
        wanted = " and ".join(f"{name} for {stage}" for stage, (name, _) in recognition.CLASSES.items())
        return f'{path} holds {name or "a model"} (model_type "{model_type}" in its config.json); visiond takes {wanted}.'
    if any(path.glob("*.safetensors")) and not (path / "yolo.safetensors").is_file():
        return f"{path} has weights, but no config.json for them. Save the whole model there with save_pretrained."
    return (
        f"{path} has no weights that visiond knows: there should be a {MANIFEST}, or clip/, blip/ or yolo.safetensors with "
        "yolo.json."
    )


def check_kind(stage: str, files: Mapping[str, Path], *, allow_pickle: bool = True) -> None:
    """Raises PackError when files hold another kind of model than the stage takes, are not whole, or may not be read."""
    if stage == "yolo":
        recognition.check_yolo(files, allow_pickle=allow_pickle)
    elif stage in recognition.CLASSES:
        recognition.check_transformers(stage, files["model"])
        if "clip" in files:
            recognition.check_transformers("clip", files["clip"])


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
    backend = wanted.get("backend") or find_entry(pack, stage).backend
    registry.find_backend(stage, backend)
    entry = StageEntry(backend) if backend == "fake" else find_entry(pack, stage)
    paths = {role: pack.folder / file for role, file in entry.files.items()} | dict(files or {})
    digests = {role: check_files(pack, path) for role, path in paths.items()}
    dtype = wanted.get("dtype") or entry.dtype or "float32"
    options = {**entry.options, **wanted.get("options", {})}
    if backend != "fake":
        check_kind(stage, paths, allow_pickle=options.get("allow_pickle") is True)
    return StageSpec(
        name=stage,
        backend=backend,
        files={role: str(path) for role, path in paths.items()},
        fingerprint=fingerprint(stage, backend, digests, dtype, options),
        dtype=dtype,
        batch_size=wanted.get("batch_size", 16),
        options=options,
        notice=str(options.get("notice", "")) if backend == "fake" else pack.manifest.notice_of(stage) or notice,
    )


def resolve_all(pack: Pack, stages: Iterable[str], overrides: Mapping[str, Mapping[str, Any]]) -> list[StageSpec]:
    """Every stage in turn. The captions' CLIP follows the clip stage's, so that their embeddings are comparable."""
    specs: list[StageSpec] = []
    clip: dict[str, Path] = {}
    notice = ""
    for stage in stages:
        if stage == "blip":
            spec = resolve(pack, stage, overrides.get(stage), files=clip, notice=notice)
        else:
            spec = resolve(pack, stage, overrides.get(stage))
        if stage == "clip" and "model" in spec.files:
            clip, notice = {"clip": Path(spec.files["model"])}, spec.notice
        specs.append(spec)
    return specs


def find_entry(pack: Pack, stage: str) -> StageEntry:
    if stage in pack.manifest.stages:
        return pack.manifest.stages[stage]
    if stage == "ocr":
        return StageEntry("ppocr", find_ocr_files())
    raise PackError(f"{pack.folder} has no weights for {stage}; it has {', '.join(pack.manifest.stages) or 'none'}.")


def find_ocr_files() -> dict[str, str]:
    """Absolute paths of PP-OCRv6 small, which the rapidocr wheel carries. Raises PackError when it is not installed."""
    from stages.ocr.onnxfile import WeightsError, weight_files  # numpy, which only those who resolve need

    try:
        return {role: str(path) for role, path in weight_files().items()}
    except WeightsError as error:
        raise PackError(str(error)) from error


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
    telling = {key: value for key, value in options.items() if key not in SILENT_OPTIONS}
    identity = [stage, backend, registry.VERSIONS[backend], contents, dtype, telling]
    return f"sha256:{hashlib.sha256(msgspec.json.encode(identity, order='sorted')).hexdigest()[:16]}"
