"""Copies of the backups in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from daemon.core.stores import list_objects, store_errors, store_of
from daemon.core.urls import split_url
from daemon.ledger.reading import Stop, Stopped
from daemon.maintenance.backups import NAME, list_backups

CHUNK_BYTES = 8 << 20


def upload_backups(folder: Path, url: str, kept: int, stop: Stop) -> str:
    """Upload each of the folder's newest `kept` backups that the store lacks, and remove all but the newest `kept` from
    it; returns what was done. A backup appears there whole or not at all. Runs in a thread.

    Raises Stopped, StoreFailed, MissingLibrary.
    """
    import obstore

    bucket, prefix = split_url(url)
    store = store_of(bucket, impatient=True)
    there = _list(store, prefix, url)
    uploaded = 0
    for file in list_backups(folder)[-kept:]:
        if there.get(file.name) == file.stat().st_size:
            continue
        with store_errors(f"{url}/{file.name}"):
            obstore.put(store, _key(prefix, file.name), _read(file, stop), chunk_size=CHUNK_BYTES)
        there.pop(file.name, None)
        there[file.name] = file.stat().st_size  # the newest
        uploaded += 1
    for name in [*there][:-kept]:
        with store_errors(f"{url}/{name}"):
            obstore.delete(store, _key(prefix, name))
    return f"{uploaded} uploaded to {url}, which has {min(len(there), kept)}"


def _list(store: object, prefix: str, url: str) -> dict[str, int]:
    """The backups in the store and their sizes, oldest first by when they were uploaded."""
    with store_errors(url):
        found = [each for page in list_objects(store, prefix) for each in page]
    found.sort(key=lambda each: each["last_modified"])
    sizes = {each["path"]: each["size"] for each in found}
    names = {path.rpartition("/")[2]: path for path in sizes}
    return {
        name: sizes[path]
        for name, path in names.items()
        if NAME.fullmatch(name) and path == _key(prefix, name)
    }


def _read(file: Path, stop: Stop) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            if stop():
                raise Stopped
            yield chunk


def _key(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
