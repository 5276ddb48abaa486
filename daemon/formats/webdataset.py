"""WebDataset (https://github.com/webdataset/webdataset): shards, which are tars, with a sample for each image: the file as it
is, its sidecar as .json, and its caption as .txt."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from daemon.formats.answered import Answered

SHARD_BYTES, SHARD_IMAGES = 1 << 30, 10_000  # a shard ends with the image that reaches one of them
ENDINGS = {"JPEG": "jpg", "TIFF": "tif", "HEIF": "heic"}  # of other formats, their name in small letters


def ending_of(format: str) -> str:
    """The suffix by which readers of WebDataset know how to decode an image."""
    return ENDINGS.get(format, format.lower())


def add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_webdataset(folder: Path, images: Iterator[Answered]) -> None:
    """Raises OSError if an image cannot be read."""
    numbers = itertools.count()
    taken: set[int] = set()
    for first in images:
        with tarfile.open(folder / f"shard-{next(numbers):06d}.tar", "w") as tar:
            for image in itertools.chain([first], itertools.islice(images, SHARD_IMAGES - 1)):
                _add_sample(tar, image, image.take_name(taken))
                if tar.offset >= SHARD_BYTES:
                    break


def _add_sample(tar: tarfile.TarFile, image: Answered, name: PurePath) -> None:
    """Its key is its name, with other characters for the dots: a key ends at the first dot after the folders."""
    key = str(name.with_name(name.stem.replace(".", "_")))
    add_file(tar, f"{key}.{ending_of(image.record.format)}", Path(image.location).read_bytes())
    add_file(tar, f"{key}.json", image.record.sidecar)
    if image.caption:
        add_file(tar, f"{key}.txt", image.caption.encode())
