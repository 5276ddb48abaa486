"""Pulls one model from the model hub into a pack. Imports no torch until there is preprocessing to check or a pickle to
convert.

What a repository holds is recognized by its config.json, so that a model that no backend takes is refused before
its weights are downloaded; and so is one whose preprocessing its stage does not do.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stages.contract import recognition
from stages.contract.base import StageSpec, StageUnusable
from stages.contract.descriptor import KnownModel
from stages.contract.manifest import (
    MANIFEST,
    Manifest,
    PackError,
    StageEntry,
    digest_folder,
    list_files,
    write_manifest,
)
from stages.contract.recognition import PICKLE, WEIGHTS
from stages.registry import registry
from stages.weights import assembly, catalog
from stages.weights.catalog import ULTRALYTICS
from stages.weights.hub import Hub, HuggingFaceHub, Listing, choose_support
from stages.weights.names import Reference
from stages.yolo import recognition as yolo_recognition
from stages.yolo.descriptor import FILES as YOLO_FILES

CONFIG = "config.json"
DETECTOR = "det"  # the folder of a text detector that is pulled together with a text recognizer
PICKLES = (".bin", ".pt")
COMMIT = ".commit"  # in a folder that is not complete: the commit of its files
# How ultralytics names the files of its other models.
TASKS = {
    "-pose": "a YOLO pose model",
    "-seg": "a YOLO segmentation model",
    "-sem": "a YOLO segmentation model",
    "-cls": "a YOLO classification model",
    "-obb": "a YOLO model of oriented boxes",
    "-depth": "a YOLO depth model",
    "-world": "a YOLO-World model",
}
# The stage whose models are nearest to a class, by the end of its name.
ENDS = {
    "ForObjectDetection": "yolo",
    "ForInstanceSegmentation": "yolo",
    "ForConditionalGeneration": "blip",
    "VisionEncoderDecoderModel": "ocr",  # TrOCR, Donut, Nougat
    "Model": "clip",
}
Print = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Download:
    """What to download from a repository, and its entry in the manifest. model: None for a .pt file of ultralytics."""

    files: list[str]
    stage: str
    entry: StageEntry
    model: KnownModel | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A repository of a model. place: its folder in the pack."""

    repository: str
    listing: Listing
    order: Download
    place: str

    @property
    def disk_bytes(self) -> int:
        """Needed while it is pulled: a pickle is there twice while it is converted."""
        sizes = {name: self.listing.sizes.get(name, 0) for name in self.order.files}
        return sum(size * (2 if name.endswith(PICKLES) else 1) for name, size in sizes.items())

    @property
    def size_bytes(self) -> int | None:
        """Of the files to download; None if the hub does not say it."""
        sizes = [self.listing.sizes.get(file) for file in self.order.files]
        return None if None in sizes else sum(filter(None, sizes))


def pull(
    reference: Reference,
    models_folder: Path,
    progress: Print,
    hub: Hub | None = None,
    parts: Sequence[Part] = (),
    *,
    allow_pickle: bool = False,
) -> Path:
    """Make the pack of one model under the models folder, unless it exists. Returns its folder.
    progress: called with a sentence about what is being done. parts: what to download, if that is known already.

    Raises PackError if the hub cannot be reached, or if no backend takes the model.
    """
    folder = models_folder / reference.folder
    if (folder / MANIFEST).is_file():
        progress(f"{folder} already exists; delete it to pull it again.")
        return folder
    if folder.exists():
        raise PackError(f"{folder} exists without a {MANIFEST}; delete it, or name it as a path.")
    source = hub or HuggingFaceHub(progress)
    parts = parts or plan_parts(source, reference, allow_pickle=allow_pickle)
    partial = begin(partial_of(reference, models_folder), parts[0].listing.commit)
    for part in parts:
        fetch(source, part, partial, progress)
    for file in list_files(partial):
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    write_manifest(partial / MANIFEST, describe_pack(reference, parts, digest_folder(partial)))
    for part in parts:
        (partial / part.place / COMMIT).unlink()
        shutil.rmtree(partial / part.place / ".cache", ignore_errors=True)  # the hub's library's
    os.rename(partial, folder)
    progress(f"{folder} is ready.")
    return folder


def partial_of(reference: Reference, models_folder: Path) -> Path:
    """The folder of a download that is not complete."""
    return models_folder / f".{reference.folder}.partial"


def describe_pack(reference: Reference, parts: Sequence[Part], digests: dict[str, str]) -> Manifest:
    order, listing = parts[0].order, parts[0].listing
    files = {role: part.place for part in parts for role in part.order.entry.files} if parts[1:] else None
    return Manifest(
        name=reference.typed,
        description=f"Pulled from {reference.repository} by `visiond models pull`.",
        stages={order.stage: msgspec.structs.replace(order.entry, files=files) if files else order.entry},
        digests=digests,
        revision={part.repository: part.listing.commit for part in parts},
        license=(reference.entry and reference.entry.license) or listing.license,
    )


def plan_parts(source: Hub, reference: Reference, *, allow_pickle: bool) -> list[Part]:
    """The repositories of a model, and what to download from them. Raises PackError."""
    parts = [plan_part(source, reference, allow_pickle=allow_pickle)]
    if reference.entry and reference.entry.detector:
        detector = Reference(reference.entry.detector)
        parts.append(plan_part(source, detector, DETECTOR, allow_pickle=allow_pickle))
    return parts


def plan_part(source: Hub, reference: Reference, place: str = ".", *, allow_pickle: bool) -> Part:
    listing = source.describe(reference.repository, reference.revision)
    order = plan(source, reference, listing, allow_pickle=allow_pickle)
    return Part(reference.repository, listing, order, place)


def fetch(source: Hub, part: Part, partial: Path, progress: Print) -> None:
    """Download a part of a model, and check it."""
    commit = part.listing.commit
    folder = begin(partial / part.place, commit)
    progress(f"{part.repository} at {commit}: {', '.join(part.order.files)}")
    files, support = part.order.files, choose_support(part.order.files)
    try:
        if part.order.model and support:
            source.download(part.repository, commit, support, folder)
            for file in recognition.find_marked(folder):
                file.write_bytes(file.read_bytes().removeprefix(BOM_UTF8))
            recognition.check_support(folder)
            recognition.check_size(part.order.model, folder)
            check_processor(part.order, folder)
        source.download(part.repository, commit, [file for file in files if file not in support], folder)
        finish(part.order, folder, progress)
    except PackError as error:
        raise rename(error, folder, part.repository) from error


def begin(partial: Path, commit: str) -> Path:
    """The folder for the files. It is kept after a failure, so that the next try continues with the files of the
    same commit."""
    mark = partial / COMMIT
    if partial.exists() and (not mark.is_file() or mark.read_text() != commit):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    mark.write_text(commit)
    return partial


def plan(hub: Hub, reference: Reference, listing: Listing, *, allow_pickle: bool) -> Download:
    """What to download. Raises PackError if the model cannot be used, as far as its config.json and the names of its
    files show."""
    if reference.file:
        return plan_checkpoint(reference, listing, allow_pickle=allow_pickle)
    repository = reference.repository
    if CONFIG not in listing.files:
        raise PackError(
            f"{repository} has no {CONFIG}, so it is not a model of transformers; {list_checkpoints(listing)}. "
            f"{advise(repository, listing)}".rstrip()
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            hub.download(repository, listing.commit, [CONFIG], folder)
            stage, backend, model = recognize(repository, folder, listing.files)
            recognition.check_parts(model, listing.files, repository)
            weights = choose_weights(hub, repository, listing, folder)
        except PackError as error:
            raise rename(error, folder, repository) from error
    if weights == [PICKLE]:
        check_pickle(f"{repository}/{PICKLE}", allow_pickle=allow_pickle)
    files = sorted({*choose_support(listing.files), *weights})
    return Download(files, stage, StageEntry(backend, {model.role: "."}), model)


def plan_checkpoint(reference: Reference, listing: Listing, *, allow_pickle: bool) -> Download:
    """A .pt file of ultralytics."""
    name = f"{reference.repository}/{reference.file}"
    if reference.file not in listing.files:
        raise PackError(f"there is no file {name} on the model hub; {list_checkpoints(listing)}.")
    for end, what in TASKS.items():
        if end in reference.file:
            raise PackError(f"{name} is {what}; {yolo_recognition.TAKEN}.")
    check_pickle(name, allow_pickle=allow_pickle)
    yolo_recognition.check_library(name)
    return Download([reference.file], "yolo", StageEntry(ULTRALYTICS, dict(YOLO_FILES)))


def check_processor(order: Download, folder: Path) -> None:
    """Raises PackError if the stage cannot prepare images as the model's files say, before its weights are downloaded."""
    spec = StageSpec(order.stage, order.entry.backend, {"model": str(folder)})
    load_processor = getattr(registry.find_class(spec), "load_processor", None)
    try:
        if load_processor:
            load_processor(spec, "cpu")
    except StageUnusable as error:
        raise PackError(str(error)) from error


def finish(order: Download, folder: Path, progress: Print) -> None:
    """Check the files that were downloaded, and convert a pickle to safetensors."""
    if order.model is None:
        checkpoint = folder / order.files[0]
        yolo_recognition.check_checkpoint(checkpoint)
        assembly.add_yolo(checkpoint, folder, progress)
        checkpoint.unlink()
        return
    recognition.check_transformers((order.model,), folder, pickle=True)
    if PICKLE in order.files:
        progress(f"converting {PICKLE} to safetensors")
        assembly.convert_weights(order.model, folder)


def recognize(repository: str, folder: Path, files: Collection[str]) -> tuple[str, str, KnownModel]:
    """The stage and the backend that take the model of a config.json, in a repository with these files. Raises PackError
    with the nearest model that one takes."""
    model_type, kind = recognition.name_model(folder)
    for stage, described in registry.STAGES.items():
        for name, backend in described.backends.items():
            names = {model.name for model in backend.models if model.fits(model_type, files)}
            if names and (kind in names or not recognition.is_classifier(kind)):
                return stage, name, recognition.check_config(backend.models, folder)
    raise PackError(
        f'{repository} holds {kind or "a model"} (model_type "{model_type}" in its {CONFIG}), which no backend takes'
        f"{describe_nearest(model_type, kind)}. `visiond models list` shows all names."
    )


def describe_nearest(model_type: str, kind: str) -> str:
    """The family with the most similar model_type, or one for the same stage."""
    offered = list(catalog.offered().values())
    near = difflib.get_close_matches(model_type, [entry.type for entry in offered], n=1, cutoff=0.5)
    stage = next((stage for end, stage in ENDS.items() if kind.endswith(end)), "")
    entry = next((entry for entry in offered if entry.type in near), None) or next(
        (entry for entry in offered if entry.stage == stage and entry.type != ULTRALYTICS), None
    )
    return f"; the nearest that visiond takes is {entry.family}, for example {entry.name}" if entry else ""


def choose_weights(hub: Hub, repository: str, listing: Listing, folder: Path) -> list[str]:
    """The files with the weights: safetensors if the repository has them, else a pickle. folder: for the list of
    weights that are in several files."""
    whole, index = WEIGHTS
    if whole in listing.files:
        return [whole]
    if index in listing.files:
        hub.download(repository, listing.commit, [index], folder)
        shards = [os.path.relpath(file, folder) for file in recognition.list_weights(folder)]
        missing = [shard for shard in shards if shard not in listing.files]
        if missing or not shards:
            raise PackError(
                f"{repository} at {listing.commit} is not complete: {', '.join(missing) or 'all weights'} are missing."
            )
        return shards
    if PICKLE not in listing.files:
        raise PackError(
            f"{repository} has no weights that visiond can use: none of {', '.join((*WEIGHTS, PICKLE))}. "
            f"{advise(repository, listing)}".rstrip()
        )
    return [PICKLE]


def advise(repository: str, listing: Listing) -> str:
    """What a repository has in other places than transformers', and what to type to use it; "" for nothing known."""
    folder = "./" + repository.rpartition("/")[2]
    return recognition.advise(listing.files, folder, f"hf download {repository} --local-dir {folder}")


def check_pickle(name: str, *, allow_pickle: bool) -> None:
    """Raises PackError unless pickles may be read."""
    if not allow_pickle:
        raise PackError(
            f"{name} is a pickle, which can run code when it is read, and there are no safetensors. If you trust it, add "
            "--allow-pickle: it is then read once, by torch's restricted loader, and converted."
        )


def list_checkpoints(listing: Listing) -> str:
    files = [file for file in listing.files if file.endswith(".pt") and not any(end in file for end in TASKS)]
    if not files:
        return "it has no .pt file"
    return f"its .pt files are {', '.join(files)}: name one, as org/name/file.pt"


def rename(error: PackError, folder: Path, repository: str) -> PackError:
    """The error for the user, who knows the repository and not the folder of its files."""
    return PackError(str(error).replace(str(folder), repository))
