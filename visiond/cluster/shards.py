"""WebDataset shards: a tar beside each part, with the sidecar of each image that is DONE and, if wanted, the image."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence

import msgspec

from daemon.core.jobs import JobStatus
from daemon.exports.webdataset import add_file, ending_of
from daemon.ledger.record import Record
from visiond.cluster.job import Shards


def shard_of(unit: str) -> str:
    return f"shard-{unit}.tar"


def write_shard(
    records: Iterable[Record], numbers: Sequence[int], images: Sequence[object], wanted: Shards
) -> bytes:
    """A tar. The key of an image is its number in the column `id` of the part: files of one name may lie in several
    folders, and WebDataset ends a key at the first dot. numbers, images: one for each record; an image that is not bytes is
    left out."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for record, number, image in zip(records, numbers, images, strict=True):
            if record.status is not JobStatus.DONE:
                continue
            key = f"{number:019d}"
            if wanted is Shards.images and isinstance(image, bytes):
                add_file(tar, f"{key}.{ending_of(record.format)}", image)
            document = msgspec.json.decode(record.sidecar, type=dict[str, msgspec.Raw])
            add_file(tar, f"{key}.json", msgspec.json.encode(document | {"id": number}))
    return file.getvalue()
