"""WebDataset (https://github.com/webdataset/webdataset): shards, which are tars, with a sample for each image: the file as it
is, its sidecar as .json, and its caption as .txt. An image from a tar keeps the key that it had there."""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from daemon.exports.answered import Answered

SHARD_BYTES, SHARD_IMAGES = 1 << 30, 10_000  # a shard ends with the image that reaches one of them
# The name in a tar, behind the folder into which the daemon has unpacked that.
IN_TAR = re.compile(
    r"(?:.*?/)?[^/]+\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz)\.unpacked/(.+)", re.I | re.S
)
ENDINGS = {"JPEG": "jpg", "TIFF": "tif", "HEIF": "heic"}  # of other formats, their name in small letters


def ending_of(format: str) -> str:
    """The suffix by which readers of WebDataset know how to decode an image."""
    return ENDINGS.get(format, format.lower())


def add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_webdataset(folder: Path, images: Iterator[Answered]) -> None:
    numbers = itertools.count()
    for first in images:
        keys: set[str] = set()
        with tarfile.open(folder / f"shard-{next(numbers):06d}.tar", "w") as tar:
            for image in itertools.chain([first], itertools.islice(images, SHARD_IMAGES - 1)):
                _add_sample(tar, image, keys)
                if tar.offset >= SHARD_BYTES:
                    break


def _key(image: Answered) -> str:
    """That of its sample in the tar that it is from: its name there up to the first dot. Otherwise its own name."""
    if not (found := IN_TAR.fullmatch(image.name)):
        return str(image.own_name(""))
    place = PurePath(found[1])
    return str(place.with_name(place.name.partition(".")[0] or str(image.record.id)))


def _add_sample(tar: tarfile.TarFile, image: Answered, keys: set[str]) -> None:
    """Without an image whose bytes are not those that were processed. keys: those of the shard; neighbors with one key would be
    one sample."""
    try:
        data = Path(image.location).read_bytes()
    except OSError:
        data = b""
    if hashlib.sha256(data).digest() != image.record.digest:
        image.leave_out()
        return
    key = _key(image)
    while key in keys:
        key = f"{key}-{image.record.id}"
    keys.add(key)
    add_file(tar, f"{key}.{ending_of(image.record.format)}", data)
    add_file(tar, f"{key}.json", image.record.sidecar)
    if image.caption:
        add_file(tar, f"{key}.txt", image.caption.encode())
