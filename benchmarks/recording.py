"""Records the metrics of a daemon at work. docs/boards.py draws Grafana's boards from them.

    python -m benchmarks.recording /tmp/boards.prom.xz
    python -m benchmarks.recording docs/boards.prom.xz --standard bench --seconds 230 --rate 300 --delivery 15000

The stages are fakes; with --standard the daemon has the weights and images of `visiond bench`, on all GPUs. Images arrive in
two inboxes: in `scans` all the time, and in `mail` twice, as one large delivery. Now and then an image is broken. In the
middle a worker is killed; later a reload is refused, and the next one is accepted.

The file has what Prometheus reads: each scrape's samples with their time and with the labels `job` and `instance`. Kernels
for GPUs are compiled before the recording.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import lzma
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.harness import make_files, read_options
from daemon.control import ask
from daemon.errors import NotRunning, VisiondError
from daemon.measure.place import Place
from stages.processes import environment, python

INSTANCE = "127.0.0.1:9464"  # as in deploy/prometheus/prometheus.yml
SCRAPE_SECONDS = 5.0
ARRIVE_SECONDS = 0.5  # between two groups of images
BROKEN = 60  # one of so many images is broken
PATIENCE_SECONDS = 600.0
FIRST = 8  # images that are done before the recording begins
CONFIG = """\
[[inbox]]
path = "scans"
name = "scans"
settle_seconds = 0
[[inbox]]
path = "mail"
name = "mail"
settle_seconds = 0
[output]
sinks = ["jsonl"]
[http]
listen = "{address}"
[page]
listen = ""
[log]
level = "error"
[pipeline]
reuse_results = false  # each name counts
{pipeline}
{stages}
"""
SECONDS = {"ocr": 0.012, "yolo": 0.004, "clip": 0.003, "blip": 0.014}  # of the fake stages, for an image
FAKES = "".join(
    f'[stages.{name}]\nbackend = "fake"\noptions = {{ latency_per_image_seconds = {seconds} }}\n'
    for name, seconds in SECONDS.items()
)
SAMPLE = re.compile(r"^([a-zA-Z_:]\w*)(?:\{(.*)\})? (\S+)$")


class Recorder:
    """Scrapes the daemon at fixed times."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._end.wait(max(0.0, due - time.monotonic())):
            due += SCRAPE_SECONDS
            now = time.time()
            with contextlib.suppress(OSError):  # Prometheus has a gap there too
                self._lines += [label(line, now) for line in scrape().splitlines() if SAMPLE.match(line)]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()

    def write(self, file: Path) -> None:
        content = "".join(f"{line}\n" for line in [*self._lines, "# EOF"])
        file.write_bytes(lzma.compress(content.encode(), preset=9))
        print(f"{file}: {len(self._lines):,} samples, {file.stat().st_size:,} bytes")


def scrape() -> str:
    connection = http.client.HTTPConnection(INSTANCE, timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def label(line: str, now: float) -> str:
    """A sample as Prometheus keeps it, in the format of OpenMetrics. now: Unix seconds."""
    found = SAMPLE.match(line)
    assert found
    name, labels, value = found.groups()
    own = f'instance="{INSTANCE}",job="visiond"'
    return f"{name}{{{f'{labels},{own}' if labels else own}}} {value} {now:.3f}"


class Arrivals:
    """Gives images to the inboxes, each under a new name."""

    def __init__(self, folder: Path, images: list[Path]) -> None:
        self._folder = folder
        self._images = itertools.cycle(images)
        self._numbers = itertools.count()

    def give(self, inbox: str, count: int) -> None:
        for number in itertools.islice(self._numbers, count):
            path = next(self._images)
            target = self._folder / inbox / f"{number // 1000:03d}" / f"{number}{path.suffix}"
            target.parent.mkdir(exist_ok=True)
            content = path.read_bytes()
            part = self._folder / "part"
            part.write_bytes(content[: len(content) // 2] if number % BROKEN == BROKEN // 2 else content)
            part.rename(target)


def work(
    daemon: subprocess.Popen[bytes], home: Path, options: argparse.Namespace, arrivals: Arrivals
) -> None:
    """Give images to the inboxes, and cause the events, until the time is over."""
    control = home / "state" / "control.sock"
    events = [  # when, as a share of the time
        (0.15, lambda: arrivals.give("mail", options.delivery)),
        (0.45, lambda: kill_worker(daemon)),
        (0.60, lambda: arrivals.give("mail", options.delivery)),
        (0.70, lambda: reload_nonsense(home)),
        (0.78, lambda: ask(control, "POST", "/reload")),
    ]
    started, given = time.monotonic(), 0
    while (passed := time.monotonic() - started) < options.seconds:
        arrivals.give("scans", int(passed * options.rate) - given)
        given = int(passed * options.rate)
        while events and passed > events[0][0] * options.seconds:
            events.pop(0)[1]()
        time.sleep(ARRIVE_SECONDS)


def kill_worker(daemon: subprocess.Popen[bytes]) -> None:
    processes = psutil.Process(daemon.pid).children(recursive=True)
    next(process for process in processes if "daemon.workers.child" in process.cmdline()).kill()


def reload_nonsense(home: Path) -> None:
    file = home / "daemon.toml"
    whole = file.read_text()
    file.write_text(whole.replace("[log]", "[lag]"))
    try:
        with contextlib.suppress(VisiondError):  # it is refused
            ask(home / "state" / "control.sock", "POST", "/reload")
    finally:
        file.write_text(whole)


def wait_for_first(daemon: subprocess.Popen[bytes], home: Path) -> None:
    last = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < last and daemon.poll() is None:
        with contextlib.suppress(NotRunning):
            if ask(home / "state" / "control.sock", "GET", "/api/status")["ended_in_this_run"] >= FIRST:
                return
        time.sleep(ARRIVE_SECONDS)
    sys.exit("the daemon processes no images; see its messages above")


def record(options: argparse.Namespace, folder: Path) -> None:
    """folder: of the images and the pack, which stay; the daemon's own is removed at the end."""
    if options.standard:
        place = Place(folder)
        place.make_pack()
        images, stages = place.make_images(options.images), f"[models]\npack = {json.dumps(place.pack)}\n"
    else:
        make_files(folder / "images", options.images, 0)
        images, stages = sorted((folder / "images").iterdir()), FAKES
    with tempfile.TemporaryDirectory(prefix="recording-", dir=folder) as name:
        home = Path(name)
        (home / "scans").mkdir()
        (home / "mail").mkdir()
        settings = {"address": INSTANCE, "pipeline": "\n".join(options.pipeline), "stages": stages}
        (home / "daemon.toml").write_text(CONFIG.format(**settings))
        run(options, home, Arrivals(home, images))


def run(options: argparse.Namespace, home: Path, arrivals: Arrivals) -> None:
    command = python("-m", "daemon", "run", "--config", str(home / "daemon.toml"))
    daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment())
    try:
        arrivals.give("scans", FIRST)
        wait_for_first(daemon, home)
        recorder = Recorder()
        with recorder.recording():
            work(daemon, home, options, arrivals)
        recorder.write(Path(options.file))
    finally:
        daemon.terminate()
        daemon.wait()


def main() -> None:
    # rate: images per second in `scans`; delivery: images at once in `mail`; standard: as --folder of visiond bench
    defaults = {
        "seconds": 420.0,
        "rate": 12.0,
        "delivery": 2000,
        "images": 500,
        "standard": "",
        "pipeline": [""],
    }
    options = read_options(__doc__, "file", **defaults)
    with tempfile.TemporaryDirectory(prefix="visiond-recording-") as own:
        record(options, Path(options.standard or own))


if __name__ == "__main__":
    main()
