"""Measures how many images a second programs can upload by HTTP, beside the work on them with fake stages.

    python -m benchmarks.uploads --seconds 10 --runs 3 [--connections 16] [--kilobytes 4]

Every upload is another file, and is counted when its 202 has come: by then it is flushed to the disk of --folder. The program
that uploads is this process; it shares the cores with the daemon, its page and its worker. At the end each of these uploads
must have a result. "each": of an upload, in ms of CPU, which depends less on other load than the rate. --kilobytes: the size
of a file, of which the image is a small part.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop
from PIL import Image

from benchmarks.harness import FAKES, TEMPORARY, ask_ledger, read_options, spread, wait_for, work_folder
from daemon.config.loading import Config, load
from daemon.config.state import PAGE_TOKEN
from daemon.measure.throwaway import Throwaway

PORT = 19465
CONFIG = """
[[inbox]]
path = "inbox"
settle_seconds = 0
uploads = true
[http]
listen = ""
[page]
listen = "127.0.0.1:{port}"
[log]
level = "error"
"""
POLL_SECONDS, WARM_SECONDS = 0.05, 1.0


@dataclass
class Load:
    """Programs that upload as fast as they are answered."""

    config: Config
    bytes_each: int
    until: float  # monotonic
    chance: random.Random
    seconds: list[float] = field(default_factory=list)  # of each upload

    def __post_init__(self) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (64, 48), (90, 120, 150)).save(buffer, "JPEG")
        rest = bytes(max(0, self.bytes_each - buffer.tell() - 16))
        self._image = buffer.getvalue() + rest
        token = (self.config.state.path / PAGE_TOKEN).read_text().strip()
        self._head = (
            f"POST /api/images HTTP/1.1\r\nHost: {self.config.page.listen}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Length: {len(self._image) + 16}\r\n\r\n"
        ).encode()

    async def run(self, connections: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                tasks.create_task(self._upload())

    async def _upload(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        while (started := time.monotonic()) < self.until:
            writer.write(self._head + self._image + self.chance.randbytes(16))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 202 "), head
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.seconds.append(time.monotonic() - started)
        writer.close()


def measure(
    folder: Path, seconds: float, connections: int, bytes_each: int
) -> tuple[float, list[float], dict[str, float]]:
    """Uploads a second, the seconds of each, and the share of a core that each process used meanwhile."""
    (folder / "inbox").mkdir()
    file = folder / "daemon.toml"
    file.write_text(CONFIG.format(port=PORT) + FAKES)
    config = load(file)
    with Throwaway(config, file) as daemon:
        while not (config.state.path / PAGE_TOKEN).exists():
            time.sleep(POLL_SECONDS)
        wait_for(daemon, "done", 0)  # it answers
        load_of = Load(config, bytes_each, time.monotonic() + WARM_SECONDS, random.Random(1))
        uvloop.run(load_of.run(connections))  # until the page has started
        warm = len(load_of.seconds)
        wait_for(daemon, "done", warm)
        processes = [psutil.Process(), *_family(daemon.process.pid)]
        before = [_cpu_seconds(process) for process in processes]
        load_of.until = time.monotonic() + seconds
        uvloop.run(load_of.run(connections))
        used = {
            _kind_of(process): (_cpu_seconds(process) - then) / seconds
            for process, then in zip(processes, before, strict=True)
        }
        wait_for(daemon, "done", len(load_of.seconds))
    rows = ask_ledger(folder, "SELECT COUNT(*), COUNT(DISTINCT path) FROM image WHERE status = 1")
    assert rows == [(len(load_of.seconds),) * 2], f"{rows} images for {len(load_of.seconds)} uploads"
    of_each = load_of.seconds[warm:]
    return len(of_each) / seconds, sorted(of_each), used


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    kinds = {
        "benchmarks.uploads": "uploading",
        "daemon.server.page.process": "page",
        "daemon.workers": "worker",
    }
    return next((kind for word, kind in kinds.items() if word in words), "daemon")


def main() -> None:
    options = read_options(__doc__, seconds=10.0, runs=3, connections=16, kilobytes=4, folder=TEMPORARY)
    rates, middles, slowest = list[float](), list[float](), list[float]()
    for _ in range(options.runs):
        with work_folder(options.folder) as folder:
            rate, seconds, used = measure(
                folder, options.seconds, options.connections, options.kilobytes << 10
            )
        rates.append(rate)
        middles.append(1e3 * seconds[len(seconds) // 2])
        slowest.append(1e3 * seconds[len(seconds) * 99 // 100])
        cores = ", ".join(
            f"{kind} {share:.2f} ({1e3 * share / rate:.2f} ms each)" for kind, share in used.items()
        )
        print(f"{rate:,.0f} uploads/s; cores: {cores}", flush=True)
    print(
        f"{options.kilobytes} KiB each, {options.connections} connections: {spread(rates)} uploads/s, "
        f"median {spread(middles, 1)} ms, 99 % {spread(slowest, 1)} ms"
    )


if __name__ == "__main__":
    main()
