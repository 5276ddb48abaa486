"""Where an export may be written; and one that is a folder: what its images are called, and how it gets its name whole or not
at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from daemon.config.loading import Config
from daemon.config.state import closed_to_others
from daemon.core.errors import NotWritable, WrongArgument
from daemon.core.files import STDOUT, rename_durably, sync_folders, written_into
from daemon.core.labels import Kind, LookUp, no_labels
from daemon.core.urls import is_url
from daemon.exports.answered import Answered, Explain
from daemon.exports.columns import ExportColumns
from daemon.exports.formats import FOLDERS, WITH_IMAGES
from daemon.exports.label_studio import write_label_studio
from daemon.ledger.record import Record
from daemon.system.mounts import Position, ask

MANIFEST = "visiond.json"


class ExportManifest(msgspec.Struct):
    """What an export has made: its files at the top; and labels of people, with where these were from, by digest and kind. (The
    file has also the version of visiond, and which models gave the answers.)"""

    files: list[str]
    labels: dict[str, dict[Kind, str]] = {}


def read_manifest(folder: Path) -> ExportManifest | None:
    """None: no export made it."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=ExportManifest)
    except (OSError, msgspec.DecodeError):
        return None


def name_inboxes(roots: Iterable[bytes], configured: Mapping[bytes, str]) -> dict[bytes, str]:
    """A name for each inbox of the ledger, different ones; "" for a single inbox. configured: names by roots. One that is not
    configured any more is called like its folder."""
    found = [*roots]
    if len(found) < 2:
        return dict.fromkeys(found, "")
    names: dict[bytes, str] = {}
    for root in found:
        name = configured.get(root) or os.path.basename(os.fsdecode(root).rstrip("/")) or "inbox"
        others = set(names.values())
        names[root] = next(n for n in (name, *(f"{name}-{k}" for k in range(2, 9999))) if n not in others)
    return names


def name_images(
    records: Iterable[Record],
    inboxes: Mapping[bytes, str],
    left_out: list[str],
    labels: LookUp = no_labels,
) -> Iterator[Answered]:
    """Each with its path in the inbox as its name; below the inbox's name, if there are several. inboxes: these names, by the
    roots of the inboxes. left_out: as in Answered. labels: of people, which take the place of answers."""
    for record in records:
        path = record.path.decode(errors="replace")
        yield Answered(
            record, os.path.join(inboxes.get(record.inbox_path, ""), path), left_out, labels(record.digest)
        )


def keep_files(images: Iterable[Answered], format: str) -> Iterator[Answered]:
    """Leave out those whose files are gone or have changed since. Raises WrongArgument for one in an object store."""
    for image in images:
        if is_url(image.location):
            raise WrongArgument(
                f"{image.location} is in an object store, and {format} needs files. Choose images of other inboxes with "
                "--where, use another format, or copy the images first."
            )
        if image.record.has_file():
            yield image
        else:
            image.leave_out()


def write_images(
    folder: Path,
    format: str,
    records: Iterable[Record],
    inboxes: Mapping[bytes, str],
    left_out: list[str],
    columns: ExportColumns,
    explain: Explain = lambda image: None,
) -> dict[str, dict[Kind, str]]:
    """Make the files of a format in an empty folder. columns: for their labels and stages. explain: as of
    `write_label_studio`. The rest: as of `name_images`. Returns which labels these are, for ExportManifest. Raises
    WrongArgument."""
    said: dict[str, dict[Kind, str]] = {}
    images = _note_labels(name_images(records, inboxes, left_out, columns.labels), said)
    if format == "label-studio":
        write_label_studio(folder, images, boxes="yolo" in columns.stages, explain=explain)
    else:
        FOLDERS[format](folder, keep_files(images, format) if format in WITH_IMAGES else images)
    return said


def _note_labels(images: Iterable[Answered], said: dict[str, dict[Kind, str]]) -> Iterator[Answered]:
    """said: gets those that are whole: without objects of which some stay out, as crowds do."""
    for image in images:
        whole = image.origins
        if Kind.OBJECTS in whole and len(image.objects) < len(image.labels[Kind.OBJECTS].value):
            del whole[Kind.OBJECTS]
        if whole:
            said[image.digest] = whole
        yield image


def check_target(config: Config, file: Path, own: Path | None = None) -> None:
    """Raises WrongArgument if a file, or a folder, would be written where the daemon looks for images or keeps its results, or
    in the place of `own`, the file of the configuration. A mount that does not answer is not asked."""
    if own and file.resolve() == own.resolve():
        raise WrongArgument(f"{file} is the configuration. Name another file.")
    if "jsonl" in config.output.sinks and file.resolve() == config.output.jsonl_file.resolve():
        raise WrongArgument(f"The daemon appends the records of the sink jsonl to {file}. Name another file.")
    if file != STDOUT and (holder := ask(lambda: next(_list_holders(config, file), ""))):
        raise WrongArgument(f"{file} is inside {holder}. Name a file elsewhere.")


def _list_holders(config: Config, file: Path) -> Iterator[str]:
    """The daemon's folders that a file or a folder of this name would be in, in words."""
    here, parent = Position.of(file), Position.of(file.absolute().parent)
    for inbox in config.inbox:
        if not inbox.url:
            there = Position.of(inbox.path)
            if here.is_within(there) and (inbox.recursive or there.is_within(parent)):
                yield f"the inbox {inbox.path}, where the daemon takes every file for a new one"
    for key, folder in (config.own_folders | config.output.sink_folders).items():
        if here.is_within(Position.of(folder)):
            yield f"{folder}, a folder of the daemon ({key})"


def check_folder(folder: Path, *, force: bool) -> None:
    """Raises NotWritable if the folder exists and may not be replaced: with force, what an export has made may, if nothing was
    added to it."""
    if not os.path.lexists(folder) or (folder.is_dir() and not os.listdir(folder)):
        return
    if not (made := read_manifest(folder)):
        raise NotWritable(f"{folder} already exists, and no export of visiond made it; name another folder.")
    if added := sorted({*os.listdir(folder)} - {*made.files}):
        raise NotWritable(
            f"{folder} already exists and has {added[0]}, which no export made; name another folder."
        )
    if not force:
        raise NotWritable(f"{folder} already exists; name another folder, or replace it with --force.")


def write_folder(
    folder: Path, write: Callable[[Path], None], about: Callable[[], dict[str, Any]], *, force: bool
) -> None:
    """write: makes the files in an empty folder. about: called afterwards, for MANIFEST. Raises NotWritable."""
    folder = folder.resolve()
    check_folder(folder, force=force)
    with closed_to_others(), written_into(folder):
        # Names of its own: another export, or a user, may have something beside it.
        partial = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=folder.parent))
        aside = partial.with_suffix(".old")
        try:
            partial.chmod(0o750)
            write(partial)
            files = sorted([*os.listdir(partial), MANIFEST])
            text = msgspec.json.encode(about() | {"files": files})
            (partial / MANIFEST).write_bytes(msgspec.json.format(text) + b"\n")
            sync_folders([os.fsencode(partial)])
            if os.path.lexists(folder):
                folder.rename(aside)
            rename_durably(partial, folder)
        finally:
            if aside.exists() and not folder.exists():  # the new one did not get its name
                aside.rename(folder)
            for rest in (partial, aside):
                shutil.rmtree(rest, ignore_errors=True)
