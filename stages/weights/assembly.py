"""Makes a pack from checkpoints on disk, without the model hub. Imports no torch unless there is a pickle to convert."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from stages.contract import recognition
from stages.contract.descriptor import MODULES, KnownModel
from stages.contract.manifest import (
    LABELS,
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
from stages.ocr import files as ocr
from stages.registry import registry
from stages.weights.hub import SCENES, choose_support
from stages.yolo import recognition as yolo_recognition
from stages.yolo.descriptor import FILES as YOLO_FILES


def assemble(
    folder: Path,
    name: str,
    sources: Mapping[str, Path],
    progress: Callable[[str], None],
    *,
    labels: Path | None = None,
    allow_pickle: bool = False,
) -> Manifest:
    """Fill a new folder with a pack. sources: stage → YOLO's or PP-OCR's file, or a folder as transformers saves it.
    labels: CLIP's, one on each line. progress: called with a sentence about what is being done.

    Raises PackError if a source is not what its stage takes, or is a pickle that may not be read; OSError.
    """
    backends = choose_backends(sources, labels, allow_pickle=allow_pickle)
    folder.mkdir()
    stages: dict[str, StageEntry] = {}
    origins: dict[str, str] = {}
    for stage, source in sources.items():
        backend = registry.find_backend(stage, backends[stage])
        if stage == "ocr" and backend.roles:
            files = add_networks(source, folder, progress)
        elif backend.models:
            add_transformers(backend.models, source, folder / stage, progress)
            files = {"model": stage}
        else:
            origins |= add_yolo(source, folder, progress)
            files = dict(YOLO_FILES)
        files |= {"labels": LABELS} if stage == "clip" else {}
        files |= {role: other for role, (other, _) in backend.shares.items() if other in sources}
        stages[stage] = StageEntry(backends[stage], files, notice=notice_beside(source, stage))
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


def choose_backends(
    sources: Mapping[str, Path], labels: Path | None, *, allow_pickle: bool
) -> dict[str, str]:
    """The backend that takes each source. Raises PackError with a line for each source that cannot be used. Called
    first, as a conversion takes minutes."""
    backends, problems = {}, []
    for stage, source in sources.items():
        try:
            backends[stage] = choose_backend(stage, source, allow_pickle=allow_pickle)
        except PackError as error:
            problems.append(str(error))
    if labels and not labels.is_file():
        problems.append(f"--labels {labels} must be a text file with a label on each line.")
    if problems:
        raise PackError("\n".join(problems))
    return backends


def choose_backend(stage: str, source: Path, *, allow_pickle: bool) -> str:
    """Raises PackError if no backend takes the source."""
    described = registry.find_stage(stage)
    backends = described.backends
    if stage == "yolo" and not source.is_dir():
        check_yolo(source, allow_pickle=allow_pickle)
        return next(iter(backends))
    if stage == "ocr" and (networks := find_networks(source)):
        backends["ppocr"].check(networks, allow_pickle=allow_pickle)
        return "ppocr"
    check_folder(stage, source)
    found = [name for name, backend in backends.items() if recognition.find_model(source, backend.models)]
    taken = backends[found[0]].models if found else described.models
    model = recognition.check_transformers(taken, source, pickle=True)
    if not found:  # a model for embeddings has the config.json of the one that it was made from
        raise PackError(
            f"--{stage} {source} has no {MODULES}, so it is no model for embeddings: copy that file from its repository too; "
            "or, for captions, name the folder with --blip."
            if model.embeds
            else f"--{stage} {source} has a {MODULES}, so it is a model for embeddings: name the folder with --clip."
        )
    if not recognition.list_weights(source, pickle=True) and not allow_pickle:
        raise PackError(
            f"{source / recognition.PICKLE} is a pickle, which can run code when it is read. If you trust it, add "
            "--allow-pickle: it is then read once, by torch's restricted loader."
        )
    return found[0]


def check_yolo(source: Path, *, allow_pickle: bool) -> None:
    if source.suffix not in (".pt", ".safetensors") or not source.is_file():
        raise PackError(
            f"--yolo {source} must be a file: .pt, or .safetensors with a yolo.json beside it; or a folder as "
            "transformers saves a model."
        )
    yolo_recognition.check(yolo_files(source), allow_pickle=allow_pickle)


def check_folder(stage: str, source: Path) -> None:
    if not (source / "config.json").is_file():
        raise PackError(
            f"--{stage} {source} must be a folder as transformers saves a model, but it has no config.json."
        )


def find_networks(source: Path) -> dict[str, Path]:
    """The networks of PP-OCR in a folder or an ONNX file, by role; {} for a folder of another model, such as a page
    reader. Raises PackError."""
    found = ocr.find(source) if source.exists() else {}
    if not found and not (source / "config.json").is_file():
        damage = ocr.describe_damage(source) if source.is_dir() else ""
        raise PackError(
            damage
            or f"--ocr {source} must be a text detector or a text recognizer of PP-OCR: an ONNX file, or a folder with the "
            "files of one, or with both in det/ and rec/; or the folder of a page reader."
        )
    place = source if source.is_dir() else source.parent
    return {role: place / name for role, name in found.items()}


def yolo_files(source: Path) -> dict[str, Path]:
    return {"weights": source, "config": source.with_name(YOLO_FILES["config"])}


def add_yolo(source: Path, folder: Path, progress: Callable[[str], None]) -> dict[str, str]:
    """Put YOLO's two files into the folder. Returns the name and digest of the file that they were converted from."""
    if source.suffix == ".pt":
        progress(f"converting {source} to safetensors")
        from stages.yolo.weights import convert_checkpoint

        with loader_errors():
            convert_checkpoint(source, folder)
        return {source.name: digest_file(source)}
    for role, file in yolo_files(source).items():
        shutil.copyfile(file, folder / YOLO_FILES[role])
    return {}


def add_networks(source: Path, folder: Path, progress: Callable[[str], None]) -> dict[str, str]:
    """Put PP-OCR's networks into the folder. Returns their places by role, and that of the dictionary if it is a
    separate file."""
    files = {}
    (folder / "ocr").mkdir()
    for role, file in find_networks(source).items():
        place = Path("ocr", "rec" if role == "dict" else role)
        if file.is_dir():
            models = [model for model in ocr.MODELS if model.role == role]
            add_transformers(models, file, folder / place, progress)
            files[role] = place.as_posix()
        else:
            (folder / place).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / place / file.name)
            files[role] = (place / file.name).as_posix()
    return files


def add_transformers(
    models: Sequence[KnownModel], source: Path, folder: Path, progress: Callable[[str], None]
) -> None:
    """Put a model's weights into the folder as safetensors, with its config, tokenizer and image processor."""
    weights = recognition.list_weights(source, pickle=True)
    folder.mkdir()
    names = choose_support([file.name for file in source.iterdir() if not file.name.startswith(".")])
    beside = [source / name for name in names]
    for file in [*beside, *(weights or [source / recognition.PICKLE])]:
        shutil.copyfile(file, folder / file.name)
    if not weights:
        progress(f"converting {source / recognition.PICKLE} to safetensors")
        convert_weights(recognition.check_transformers(models, source, pickle=True), folder)


def convert_weights(model: KnownModel, folder: Path) -> None:
    import transformers

    from stages.pretrained.checkpoints import convert_pickle

    with loader_errors():
        convert_pickle(getattr(transformers, model.loaded_as or model.name), folder)
    (folder / recognition.PICKLE).unlink()


@contextlib.contextmanager
def loader_errors() -> Iterator[None]:
    """Turns a loader's error about a file into a PackError."""
    try:
        yield
    except ValueError as error:
        raise PackError(str(error)) from error


def write_labels(folder: Path, labels: Path | None) -> None:
    """Write the labels for CLIP's tags: the given ones, or the names of the detector's classes and of common scenes."""
    if labels:
        shutil.copyfile(labels, folder / LABELS)
        return
    (folder / LABELS).write_text("\n".join([*read_classes(folder), *SCENES]) + "\n")


def read_classes(folder: Path) -> list[str]:
    """The names of the object detector's classes in a pack, if it has one."""
    if (config := folder / YOLO_FILES["config"]).is_file():
        names = recognition.read_config(config)["names"]
    elif (config := folder / "yolo" / "config.json").is_file():
        names = (recognition.read_config(config).get("id2label") or {}).values()
    else:
        names = []
    return [str(name) for name in names if yolo_recognition.has_name(str(name))]


def notice_beside(source: Path, stage: str) -> str:
    """The notice of the pack that the source is from: a notice belongs to the weights."""
    for place in (source, source.parent):
        if (place / MANIFEST).is_file():
            manifest = read_manifest(place / MANIFEST)
            return manifest.notice_of(stage)
    return ""
