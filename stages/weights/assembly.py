"""Makes a pack from checkpoints on disk, without the model hub.
Imports no torch unless there is a pickle to convert."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from stages import recognition
from stages.blip import descriptor as blip
from stages.clip import descriptor as clip
from stages.clip.descriptor import LABELS
from stages.manifest import (
    MANIFEST,
    Manifest,
    PackError,
    StageEntry,
    digest_file,
    digest_folder,
    list_files,
    read_manifest,
    write_manifest,
)
from stages.recognition import Model
from stages.weights.hub import SCENES
from stages.yolo.descriptor import FILES as YOLO_FILES

MODELS = {"clip": clip.MODEL, "blip": blip.MODEL}


def assemble(
    folder: Path,
    name: str,
    sources: Mapping[str, Path],
    progress: Callable[[str], None],
    *,
    labels: Path | None = None,
    allow_pickle: bool = False,
) -> Manifest:
    """Fill a new folder with a pack. sources: stage → YOLO's file, or a folder as transformers saves it.
    labels: CLIP's, one on each line. progress: called with a sentence about what is being done.

    Raises PackError if a source is not what its stage takes, or is a pickle that may not be read; OSError.
    """
    check_sources(sources, labels, allow_pickle=allow_pickle)
    folder.mkdir()
    stages, origins = {}, {}
    if "yolo" in sources:
        origins = add_yolo(sources["yolo"], folder, progress)
        stages["yolo"] = StageEntry("ultralytics", YOLO_FILES, notice=notice_beside(sources["yolo"], "yolo"))
    for stage, model in MODELS.items():
        if stage in sources:
            add_transformers(model, sources[stage], folder / stage, progress)
            files = {"model": stage}
            files |= {"labels": LABELS} if stage == "clip" else {"clip": "clip"} if "clip" in sources else {}
            stages[stage] = StageEntry("transformers", files, notice=notice_beside(sources[stage], stage))
    if "clip" in sources:
        write_labels(folder, labels)
    for file in list_files(folder):
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    manifest = Manifest(
        name=name,
        description="Made from checkpoints by `visiond models make`.",
        stages=stages,
        digests=digest_folder(folder),
        revision=origins,
    )
    write_manifest(folder / MANIFEST, manifest)
    return manifest


def check_sources(sources: Mapping[str, Path], labels: Path | None, *, allow_pickle: bool) -> None:
    """Raises PackError with a line for each source that cannot be used. Checked first,
    as a conversion takes minutes."""
    problems = []
    for stage, source in sources.items():
        check = check_yolo if stage == "yolo" else partial(check_transformers, MODELS[stage])
        try:
            check(source, allow_pickle=allow_pickle)
        except PackError as error:
            problems.append(str(error))
    if labels and not labels.is_file():
        problems.append(f"--labels {labels} must be a text file with a label on each line.")
    if problems:
        raise PackError("\n".join(problems))


def check_yolo(source: Path, *, allow_pickle: bool) -> None:
    if source.suffix not in (".pt", ".safetensors") or not source.is_file():
        raise PackError(f"--yolo {source} must be a file: .pt, or .safetensors with a yolo.json beside it.")
    recognition.check_yolo(yolo_files(source), allow_pickle=allow_pickle)


def check_transformers(model: Model, source: Path, *, allow_pickle: bool) -> None:
    if not (source / "config.json").is_file():
        raise PackError(
            f"--{model.type} {source} must be a folder as transformers saves a model, but it has no config.json."
        )
    recognition.check_transformers(model, source, pickle=True)
    if not recognition.list_weights(source, pickle=True) and not allow_pickle:
        raise PackError(
            f"{source / recognition.PICKLE} is a pickle, which can run code when it is read. If you trust it, add "
            "--allow-pickle: it is then read once, by torch's restricted loader."
        )


def yolo_files(source: Path) -> dict[str, Path]:
    return {"weights": source, "config": source.with_name(YOLO_FILES["config"])}


def add_yolo(source: Path, folder: Path, progress: Callable[[str], None]) -> dict[str, str]:
    """Put YOLO's two files into the folder. Returns the name
    and digest of the file that they were converted from."""
    if source.suffix == ".pt":
        progress(f"converting {source} to safetensors")
        from stages.yolo.network import convert_checkpoint

        with loader_errors():
            convert_checkpoint(source, folder)
        return {source.name: digest_file(source)}
    for role, file in yolo_files(source).items():
        shutil.copyfile(file, folder / YOLO_FILES[role])
    return {}


def add_transformers(model: Model, source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Put a model's weights into the folder as safetensors, with its config, tokenizer and image processor."""
    weights = recognition.list_weights(source, pickle=True)
    folder.mkdir()
    beside = [
        file
        for file in source.iterdir()
        if file.suffix in (".json", ".txt") and not file.name.startswith(".")
    ]
    for file in [*beside, *(weights or [source / recognition.PICKLE])]:
        if file.name != MANIFEST and not file.name.endswith(".bin.index.json"):
            shutil.copyfile(file, folder / file.name)
    if not weights:
        progress(f"converting {source / recognition.PICKLE} to safetensors")
        convert_weights(model, folder)


def convert_weights(model: Model, folder: Path) -> None:
    import transformers

    from stages.checkpoints import convert_pickle

    with loader_errors():
        convert_pickle(getattr(transformers, model.name), folder)
    (folder / recognition.PICKLE).unlink()


@contextlib.contextmanager
def loader_errors() -> Iterator[None]:
    """Turns a loader's error about a file into a PackError."""
    try:
        yield
    except ValueError as error:
        raise PackError(str(error)) from error


def write_labels(folder: Path, labels: Path | None) -> None:
    """Write the labels for CLIP's tags: the given ones, or the names of YOLO's classes and of common scenes."""
    if labels:
        shutil.copyfile(labels, folder / LABELS)
        return
    config = folder / YOLO_FILES["config"]
    names = recognition.read_config(config)["names"] if config.is_file() else []
    (folder / LABELS).write_text("\n".join([*names, *SCENES]) + "\n")


def notice_beside(source: Path, stage: str) -> str:
    """The notice of the pack that the source is from: a notice belongs to the weights."""
    for place in (source, source.parent):
        if (place / MANIFEST).is_file():
            manifest = read_manifest(place / MANIFEST)
            return manifest.notice_of(stage)
    return ""
