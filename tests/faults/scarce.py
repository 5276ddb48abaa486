"""Few descriptors, and HTTP clients that reconnect whenever
they are disconnected: the work still has its descriptors."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.daemon_process import Daemon, Place, meanwhile

CLIENTS = 200
TURNED_AWAY = "HTTP clients are refused, to keep file descriptors for the work"


class Scarce(NamedTuple):
    done: int
    pauses: int  # of the daemon, for lack of descriptors
    named: bool  # the log names who is refused and what to raise
    healthy: bool


def work_with_few_files(folder: Path, limit: int, images: int) -> Scarce:
    folder.mkdir()
    place = Place(folder, {"http": {"listen": "127.0.0.1:0"}, "pipeline": {"rescan_seconds": 0.2}})
    with Daemon(place, prefix=["prlimit", f"--nofile={limit}:{limit}"]) as daemon:
        with clients_that_come_again(daemon.port):
            daemon.wait_event(TURNED_AWAY)
            for start in range(0, images, 50):
                place.drop_many(range(start, min(start + 50, images)))
            daemon.wait_idle(images)
            healthy = daemon.get("/healthz")[0] == 200
        pauses = len(list(daemon.events("paused")))
        named = next(daemon.events(TURNED_AWAY))
        assert daemon.stop() == 0
    told = named["limit"] == limit and "LimitNOFILE=" in named["fix"]
    return Scarce(place.judge().counts["DONE"], pauses, told, healthy)


@contextlib.contextmanager
def clients_that_come_again(port: int) -> Iterator[None]:
    """Each sends the beginning of a request and, when it is disconnected, connects again."""
    clients: list[socket.socket] = []

    def come() -> None:
        while len(clients) < CLIENTS:
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            clients.append(client)
        clients[:] = [client for client in clients if lives(client)]

    try:
        with meanwhile(come):
            yield
    finally:
        for client in clients:
            client.close()


def lives(client: socket.socket) -> bool:
    """Whether the daemon has not closed the connection."""
    try:
        client.send(b"GET")
        if client.recv(1024):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    client.close()
    return False
