"""The standard pack: three models, each pulled as by its own name, in one pack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stages.contract.manifest import (
    LABELS,
    MANIFEST,
    Manifest,
    StageEntry,
    digest_folder,
    list_files,
    read_manifest,
    write_manifest,
)
from stages.weights import assembly, names, pulling
from stages.weights.hub import SCENES, Hub
from stages.weights.packs import STANDARD, Pack, open_pack, verify
from stages.weights.pulling import Part

MODELS = {"yolo": "yolov8n", "clip": "clip-b32", "blip": "blip-base"}
ENTRIES = {
    "yolo": StageEntry("ultralytics", {"weights": "yolo/yolo.safetensors", "config": "yolo/yolo.json"}),
    "clip": StageEntry("transformers", {"model": "clip", "labels": LABELS}),
    "blip": StageEntry("transformers", {"model": "blip", "clip": "clip"}),
}


def pull_standard(
    models_folder: Path,
    progress: Callable[[str], None] = print,
    hub: Hub | None = None,
    *,
    allow_pickle: bool = False,
) -> Pack:
    """Fetch the standard pack and its models, those that are not here. Raises PackError."""
    folder = models_folder / STANDARD
    if (folder / MANIFEST).is_file():
        progress(f"{folder} already exists; delete it to make it again.")
        return open_pack(STANDARD, models_folder)
    models = {
        stage: pull_model(name, models_folder, progress, hub, allow_pickle=allow_pickle)
        for stage, name in MODELS.items()
    }
    for pack in models.values():
        verify(pack)
    make(folder, {stage: pack.folder for stage, pack in models.items()}, progress)
    return open_pack(STANDARD, models_folder)


def pull_model(
    name: str,
    models_folder: Path,
    progress: Callable[[str], None] = print,
    hub: Hub | None = None,
    parts: Sequence[Part] = (),
    *,
    allow_pickle: bool = False,
) -> Pack:
    """Fetch one model by its name or repository, unless it is there. parts: as for `pulling.pull`. Raises UnknownName,
    PackError."""
    reference = names.read_reference(name)
    folder = pulling.pull(reference, models_folder, progress, hub, parts, allow_pickle=allow_pickle)
    return open_pack(folder, models_folder)


def make(folder: Path, models: Mapping[str, Path], progress: Callable[[str], None]) -> None:
    """Make the pack in a new folder from those of the models, by stage. Their files are in both, and once on the disk."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that ended
    for stage, source in models.items():
        for file in list_files(source):
            place = partial / stage / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            link(file, place)
    classes = assembly.read_classes(partial / "yolo")
    (partial / LABELS).write_text("\n".join([*classes, *SCENES]) + "\n")
    manifests = [read_manifest(source / MANIFEST) for source in models.values()]
    manifest = Manifest(
        name=STANDARD,
        description="YOLOv8n, CLIP ViT-B/32 and BLIP base, from the model hub.",
        stages=ENTRIES,
        digests=digest_folder(partial),
        revision={name: commit for one in manifests for name, commit in one.revision.items()},
        license=", ".join(dict.fromkeys(one.license for one in manifests if one.license)),
    )
    write_manifest(partial / MANIFEST, manifest)
    os.rename(partial, folder)
    progress(f"{folder} is ready.")


def link(file: Path, place: Path) -> None:
    """The same file under another name, or a copy where the file system cannot do that."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)
