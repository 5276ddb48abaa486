"""What the commands do with a daemon that runs, and with its ledger when none does."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec

from daemon.config import Config
from daemon.errors import NothingFound, NotPermitted, NotRunning
from daemon.jobs import JobStatus
from daemon.ledger import Ledger
from daemon.records import Reader
from daemon.schema import trouble_named
from daemon.state import CONTROL, LEDGER, lock_state
from daemon.status import Snapshot

CHUNK = 10_000  # images named in one request


@contextlib.contextmanager
def open_reader(config: Config) -> Iterator[Reader]:
    """The ledger, for reading. Raises NothingFound when there is none yet, LedgerDamaged whenever it turns out to be."""
    path = config.state.path / LEDGER
    try:
        reader = Reader(path)
    except PermissionError as error:
        raise NotPermitted(f"{path} belongs to another user; run this as the daemon's user or as root.") from error
    except FileNotFoundError:
        raise NothingFound(f"There is no ledger at {path} yet; `visiond run` makes it.") from None
    with contextlib.closing(reader), trouble_named(path):
        yield reader


def find_status(config: Config) -> Snapshot:
    """The running daemon's own account or, when none runs, the ledger's counts."""
    try:
        return msgspec.convert(ask(config.state.path / CONTROL, "GET", "/api/status"), Snapshot)
    except NotRunning:
        with open_reader(config) as reader:
            counts = reader.counts()
    return Snapshot(
        running=False,
        pending=counts[JobStatus.PENDING],
        done=counts[JobStatus.DONE],
        failed=counts[JobStatus.FAILED],
        skipped=counts[JobStatus.SKIPPED],
        gone=counts[JobStatus.GONE],
    )


def retry(config: Config, ids: list[int]) -> int:
    """FAILED images back to PENDING: by the daemon, which alone may write its ledger, or here when none runs."""
    chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
    try:
        return sum(ask(config.state.path / CONTROL, "POST", "/retry", chunk)["retried"] for chunk in chunks)
    except NotRunning:
        with lock_state(config.state.path), contextlib.closing(Ledger(config.state.path / LEDGER)) as ledger:
            return sum(anyio.run(ledger.retry, chunk) for chunk in chunks)


def ask(control: Path, method: str, path: str, body: object = None) -> Any:
    """A request to the running daemon over its control socket; returns the decoded JSON. Raises NotRunning."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(str(control))
        connection.request(method, path, msgspec.json.encode(body) if body is not None else None)
        return msgspec.json.decode(connection.getresponse().read())
    except PermissionError as error:
        raise NotPermitted(f"{control} belongs to another user; run this as the daemon's user or as root.") from error
    except OSError as error:
        raise NotRunning(f"No daemon answers at {control}: {error.strerror}.") from error
    finally:
        connection.close()
