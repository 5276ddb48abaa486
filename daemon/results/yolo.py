"""A sink that keeps a data set for YOLO: the image and the labels of each image, as the image is finished."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from anyio import to_thread

from daemon.config.loading import Config
from daemon.core.errors import NotWritable
from daemon.core.jobs import JobStatus
from daemon.core.urls import is_url
from daemon.exports.answered import Answered
from daemon.exports.webdataset import ending_of
from daemon.exports.yolo import PARTS, describe, make_label, part_of, place_image, read_classes
from daemon.inbox.disk import why_not_deleted
from daemon.ledger.record import Record
from daemon.results.files import SinkFile, put_files, write_file
from daemon.system.mounts import FolderAway, KnownFolder, describe_closed

# Of all images that can be read.
ENDINGS = [ending_of(each) for each in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "AVIF", "HEIF", "BMP", "PPM")]


class YoloSink:
    """Records that are DONE: <results>.yolo as an export makes it, with the last state of each image.

    The names of an image have a digest of its path instead of its number, so a later version of its file replaces it. An image
    without a file is left out. The numbers of classes are in data.yaml, which has each before labels do.
    """

    def __init__(self, config: Config) -> None:
        self._folder = config.output.folder_of("yolo")
        self._known = KnownFolder(os.fsencode(self._folder))
        self._inboxes = {inbox.root: inbox.name for inbox in config.inbox}

    def problem(self) -> str:
        try:
            self._read_description()
        except (NotWritable, OSError) as error:
            return str(error)
        return describe_closed(self._folder)

    async def append(self, records: Sequence[Record]) -> None:
        """Raises NotWritable, FolderAway, OSError."""
        last = {(record.inbox, record.path): record for record in records if record.status is JobStatus.DONE}
        if last:
            await to_thread.run_sync(self._put, [*last.values()], abandon_on_cancel=True)

    def _put(self, records: Sequence[Record]) -> None:
        images = [Answered(record, record.path.decode(errors="replace"), []) for record in records]
        known = self._read_description()
        classes = read_classes(known)
        here = {image.record.id: part_of(image) for image in images if _has_file(image)}
        files = [file for each in images for file in self._files_of(each, classes, each.record.id in here)]
        if (described := describe(self._parts_with(here.values()), classes)) != known:
            data = partial(write_file, data=described.encode())
            put_files(self._known, [SinkFile([os.fsencode(self._description)], data)])
        put_files(self._known, files)

    def _parts_with(self, used: Collection[str]) -> list[str]:
        return [part for part in PARTS if part in used or (self._folder / "images" / part).is_dir()]

    @property
    def _description(self) -> Path:
        return self._folder / "data.yaml"

    def _read_description(self) -> str:
        """Raises NotWritable if it is not known which class has which number; OSError."""
        try:
            described = self._description.read_text("utf-8")
            read_classes(described)
        except FileNotFoundError:
            described = ""
            if not (self._folder / "labels").exists():
                return described
        except ValueError:
            described = ""
        if not described:
            raise NotWritable(
                f"{self._description} is missing or damaged, and it alone says which number each class has. Move "
                f"{self._folder} away: the sink makes a new one"
            )
        return described

    def _files_of(self, image: Answered, classes: dict[str, int], is_here: bool) -> Iterator[SinkFile]:
        """Its labels, its image, and what there is of an earlier version with another format or in the other part."""
        inbox = self._inboxes.get(image.record.inbox_path, f"inbox-{image.record.inbox}")
        mark = hashlib.sha256(os.path.join(os.fsencode(inbox), image.record.path)).hexdigest()[:16]
        file = image.own_name("", mark).name

        def name(kind: str, part: str, ending: str) -> bytes:
            return os.fsencode(f"{self._folder}/{kind}/{part}/{mark[:2]}/{file}.{ending}")

        label = name("labels", part_of(image), "txt")
        picture = name("images", part_of(image), ending_of(image.record.format))
        if is_here:
            yield SinkFile([label], partial(write_file, data=make_label(image, classes).encode()))
            yield SinkFile([picture], partial(_place, image))
        known = {name("labels", part, "txt") for part in PARTS}
        known |= {name("images", *place) for place in itertools.product(PARTS, ENDINGS)}
        yield SinkFile(sorted(known - {label, picture} if is_here else known), None)


def _has_file(image: Answered) -> bool:
    """Whether it can be in a data set. Raises FolderAway if it is not there, and may come back."""
    record = image.record
    if is_url(image.location) or record.has_file():
        return not is_url(image.location) and os.access(record.location, os.R_OK)
    is_missing = not os.path.lexists(record.location)
    if is_missing and (why := why_not_deleted(record.inbox_path, record.path, record.seen_at)):
        raise FolderAway(f"{image.location} cannot be linked: {why}")
    return False


def _place(image: Answered, path: bytes) -> None:
    """Raises OSError."""
    write_file(path, b"")  # in a folder, and in the place of what a crash has left
    os.unlink(path)
    place_image(image, os.fsdecode(path))
