"""Reads the labels of annotation tools."""

from __future__ import annotations

import codecs
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.hints import command
from daemon.core.labels import Kind, LeftOut, ObjectLabel, Said
from daemon.exports.datasets import MANIFEST, read_manifest
from daemon.labels.coco import Coco, read_coco
from daemon.labels.label_studio import LabelTask, read_label_studio
from daemon.labels.matching import digest_of
from daemon.labels.saying import bounds, say
from daemon.labels.splits import FOLDERS, TRAIN
from daemon.labels.table import read_csv
from daemon.labels.yolo import CLASSES, read_yolo


def _read_truth(file: Path, left_out: LeftOut) -> Iterator[Said]:
    """What `visiond samples` has drawn."""
    from stages.scenes.truth import read_truth  # with OpenCV, which no other file of labels needs

    try:
        truths = read_truth(file)
    except msgspec.MsgspecError as error:
        raise WrongArgument(
            f"{file} is not the .truth.jsonl of `visiond samples`, and no other JSON lines can be read: {error}."
        ) from None
    for truth in truths:
        objects = [ObjectLabel(each.label, each.box) for each in truth.objects]
        lines = [(bounds(line.box), line.text) for line in truth.lines]
        shown: dict[Kind, list[Any]] = {
            Kind.OBJECTS: objects,
            Kind.TAGS: truth.tags,
            Kind.CAPTION: truth.captions,
            Kind.TEXT: lines,
        }
        size = truth.width, truth.height
        for kind, parts in shown.items():
            yield from say(truth.file, kind, parts, size, size)


READERS = {
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".yaml", ".yml", ".txt"), read_yolo),
    ".jsonl": _read_truth,
}


def read_labels(path: Path, left_out: LeftOut, *, corrected: bool = False) -> Iterator[Said]:
    """What a file says, or a folder of a data set. corrected: people have looked at the answers of models in it, which count
    as labels then. Raises WrongArgument."""
    read = _read_folder if path.is_dir() else READERS.get(path.suffix.lower(), _read_json)
    folder = path if path.is_dir() else path.parent
    if path.suffix.lower() == ".txt" and path.name != CLASSES:
        raise WrongArgument(
            f"{path} is a part of a data set of YOLO. Name the folder with data.yaml or {CLASSES}."
        )
    try:
        found = read(path, left_out)
        yield from found if corrected else _leave_out_answers(found, path, folder, left_out)
    except OSError as error:
        raise WrongArgument(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise WrongArgument(f"{path} is not UTF-8: {error}.{_fix_encoding(path)}") from None


def _fix_encoding(path: Path) -> str:
    """What to type, of a table: of YOLO's files, another one may be meant than the one that was named."""
    if READERS.get(path.suffix.lower()) is not read_csv:
        return ""
    quoted = shlex.quote(str(path))
    return f" If a program on Windows wrote it, type: iconv -f cp1252 -t utf-8 {quoted} > new{path.suffix}"


def _fix_answers(path: Path) -> str:
    """What to type."""
    return f"If people have corrected them, type: {command('labels', 'import', '--corrected', str(path))}"


def _find_exported(path: Path, folder: Path) -> Mapping[str, Mapping[Kind, str]]:
    """Which labels an export has written into this file or folder, as of ExportManifest; none: no export did. Raises
    WrongArgument if it has only answers of models."""
    made = read_manifest(folder)
    if not made or (path != folder and path.name not in made.files):
        return {}
    if not made.labels:
        raise WrongArgument(
            f"{path} has answers of models, as `visiond export` wrote them. {_fix_answers(path)}"
        )
    return made.labels


def _leave_out_answers(found: Iterable[Said], path: Path, folder: Path, left_out: LeftOut) -> Iterator[Said]:
    """Raises WrongArgument if there is nothing else."""
    if labels := _find_exported(path, folder):
        yield from _of_people(found, labels, folder, left_out)
        return
    for said in found:
        if said.by_model:
            raise WrongArgument(
                f"{path} has scores, as answers of models have and labels have not. {_fix_answers(path)}"
            )
        yield said


def _of_people(
    found: Iterable[Said], labels: Mapping[str, Mapping[Kind, str]], folder: Path, left_out: LeftOut
) -> Iterator[Said]:
    """Without the answers of models. labels: as of ExportManifest. folder: of the images, for formats that have no digests."""
    for said in found:
        digest = said.digest or f"sha256:{digest_of(said.name, folder).hex()}"
        if origin := labels.get(digest, {}).get(said.kind):
            yield said._replace(digest=digest, origin=origin)
        elif said.value:
            left_out(_explain_left(said, digest, folder))


def _explain_left(said: Said, digest: str, folder: Path) -> str:
    if digest == "sha256:":
        return "boxes whose image is not in the folder"
    if not said.digest and not (folder / said.name).is_symlink():
        return "boxes of models, or of an image that another program has written anew since the export"
    return "answers of models; if people have corrected them, add --corrected"


def _read_folder(folder: Path, left_out: LeftOut) -> Iterator[Said]:
    named = [folder / name for name in ("data.yaml", "dataset.yaml", CLASSES, f"labels/{CLASSES}")]
    others = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*.yml"))]
    if described := next((file for file in (*named, *others) if file.exists()), None):
        yield from read_yolo(described, left_out)
        return
    if not (files := sorted({*folder.glob("*.json")} - {folder / MANIFEST})):
        yield from _read_parts(folder, left_out)
    for file in files:
        yield from _read_json(file, left_out)


def _read_parts(folder: Path, left_out: LeftOut) -> Iterator[Said]:
    files = [file for part in FOLDERS for file in sorted((folder / part).glob("*.json"))]
    if not files:
        raise WrongArgument(
            f"{folder} has neither a data.yaml or {CLASSES} of YOLO nor a .json of COCO or Label Studio. Name the file with "
            "the labels."
        )
    has_others = any(file.parent.name != TRAIN for file in files)
    for file in files:
        held_out = file.parent.name != TRAIN if has_others else None
        for said in _read_json(file, left_out):
            yield said._replace(name=os.path.join(file.parent.name, said.name), held_out=held_out)


def _read_json(file: Path, left_out: LeftOut) -> Iterator[Said]:
    text = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        if text.lstrip()[:1] == b"[":
            yield from read_label_studio(
                msgspec.json.decode(text, type=list[LabelTask], strict=False), left_out
            )
        else:
            yield from read_coco(msgspec.json.decode(text, type=Coco, strict=False), left_out)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        packed = " It is a zip file: unpack it, and name what is in it." if text[:2] == b"PK" else ""
        raise WrongArgument(
            f"{file} is neither COCO (an object with images and annotations) nor an export of Label Studio as JSON, not "
            f"JSON-MIN (a list of tasks with data and annotations): {error}.{packed}"
        ) from None
