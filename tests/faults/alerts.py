"""Each alert of deploy/prometheus/rules/visiond.yml, driven by the fault that it is about: a real daemon, and a real
Prometheus with these rules. Exactly the alert of that fault fires.

So that an hour passes in half a minute, `for`, ranges and offsets of the rules are divided by FACTOR
(tests/deploy/rules.py), and Prometheus scrapes twice a second. Numbers of events and shares stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import PATIENCE, Daemon, Place, free_port, picture, wait_for
from tests.deploy.prometheus import MISSING, PROMETHEUS, Prometheus, started
from tests.deploy.rules import alerts
from tests.faults.test_canary import ONLY_PPM, SOON, WRONG, make_breakable
from tests.faults.test_disk import mounted
from tests.faults.test_lifecycle import OFTEN, hang_system_calls

FACTOR = 120.0
HOUR_SECONDS = 3600 / FACTOR
SCRAPE_SECONDS = 0.5
LONG_SECONDS = 2 * PATIENCE  # for an alert; the slowest takes 45 s
GIB = 1 << 30
Sizes = Mapping[str, int]

CARD = """
import sys
if "run" in sys.orig_argv:
    import daemon.layout.layout, daemon.monitoring.metrics, daemon.workers.slot
    from daemon.system.gpus import Gpu
    from daemon.workers import pool, slot
    from stages.registry.fake import count_used
    def list_card():
        used = count_used(FOLDER)
        return [Gpu(0, "GPU-fake", "card", TOTAL, TOTAL - used, used, "9.0", None, ())]
    daemon.layout.layout.list_gpus = daemon.monitoring.machine.list_gpus = list_card
    pool.FRESH_SECONDS, pool.REST_SECONDS, pool.LONGEST_REST_SECONDS = 0.05, 0.1, 0.2
    slot.FIRST_PAUSE_SECONDS, slot.LONGEST_PAUSE_SECONDS = 0.1, 0.2
"""


@dataclass
class Scene:
    """A daemon at work, and a Prometheus that watches it."""

    place: Place
    daemon: Daemon
    prometheus: Prometheus
    address: str
    linger_seconds: float
    _dropped: int = 0

    def work(self, images: int = 3, inbox: str = "") -> None:
        """More good images arrive."""
        self.place.drop_many(range(self._dropped, self._dropped + images), inbox)
        self._dropped += images

    def fired(self) -> set[str]:
        """The alerts that have fired so far."""
        query = 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
        return {sample["metric"]["alertname"] for sample in self.prometheus.ask(query)}

    def expect(self, alert: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until this alert fires, and see that no other one has by then, or does while the fault lasts."""

        def fires() -> list[dict[str, Any]]:
            meanwhile()
            return [found for found in self.prometheus.alerts() if found["labels"]["alertname"] == alert]

        found = wait_for(fires, f"{alert}; fired: {self.fired()}", LONG_SECONDS)
        assert {one["labels"]["instance"] for one in found} == {self.address}
        texts = " ".join(text for one in found for text in one["annotations"].values())
        assert "error" not in texts.lower().replace(
            "temporary error", ""
        )  # of a template, which shows it in the text
        assert "<no value>" not in texts
        end = time.monotonic() + self.linger_seconds

        def is_over() -> bool:
            meanwhile()
            return time.monotonic() > end

        wait_for(is_over, "more time", LONG_SECONDS)
        wait_for(lambda: alert in self.fired(), "its series")
        assert (fired := self.fired()) == {alert}, fired


@contextlib.contextmanager
def opened(
    folder: Path, sizes: Sizes, settings: Mapping[str, Any] = {}, environment: Mapping[str, str] = {}
) -> Iterator[Scene]:
    """The daemon has done some images, which Prometheus knows, and no alert fires."""
    if not PROMETHEUS:
        pytest.skip(MISSING)
    port = free_port()
    place = Place(folder, {"http": {"listen": f"127.0.0.1:{port}"}} | dict(settings))
    place.configure({"pipeline": {"retry_seconds": 0.05, "rescan_seconds": 1.0}})
    with (
        Daemon(place, environment=environment) as daemon,
        started(folder, port, interval_seconds=SCRAPE_SECONDS, factor=FACTOR) as prometheus,
    ):
        scene = Scene(place, daemon, prometheus, f"127.0.0.1:{port}", sizes["linger_seconds"])
        prometheus.wait_for("count(visiond_images_pending)", 1)
        scene.work(inbox=next(iter(place.dropped)))
        prometheus.wait_for('sum(visiond_images_total{outcome="done"})', 3)
        assert not (fired := scene.fired()), fired
        yield scene


def kill_the_daemon(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes) as scene:
        scene.daemon.kill(group=True)
        scene.expect("VisiondDown")


def hang_a_write(folder: Path, sizes: Sizes) -> None:
    """Without linger: systemd would restart it, and its images would go on."""
    settings = {"pipeline": {"batch_timeout_seconds": 1.0}}
    hanging = hang_system_calls(folder, folder / "results" / "stuck")
    with opened(folder, {"linger_seconds": 0}, settings, OFTEN | hanging) as scene:
        scene.place.drop("stuck/a.ppm", picture(2))
        scene.expect("VisiondWatchdog")


def put_a_file_in_the_results_folders_place(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes) as scene:
        scene.place.site.results.rename(folder / "gone")
        scene.place.site.results.touch()
        scene.work()
        scene.expect("VisiondNothingFinished")


def deliver_faster_than_it_works(folder: Path, sizes: Sizes) -> None:
    slow = {"blip": {"options": {"latency_per_image_seconds": 0.05}}}
    with opened(folder, sizes, {"stages": slow}) as scene:
        scene.expect("VisiondBacklogGrows", lambda: scene.work(20))


def deliver_broken_images(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes) as scene:
        for number in range(30):
            scene.place.drop(f"{number}.png", b"no image")
        scene.work(100)
        scene.expect("VisiondManyFailures")


def kill_workers(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes, {"pipeline": {"workers_per_device": 3}}) as scene:
        for round_ in range(2):
            for worker in wait_for(lambda: all_ready(scene.daemon, 3), "three workers"):
                os.kill(worker, signal.SIGKILL)
            scene.daemon.wait_until(
                lambda _, lost=3 * (round_ + 1): len(list(scene.daemon.events("worker lost"))) >= lost,
                "the loss of three workers",
            )
        scene.expect("VisiondWorkersRestarting", scene.work)


def all_ready(daemon: Daemon, count: int) -> list[int]:
    """The process ids of the workers, if all are ready."""
    ready = [worker["state"] for worker in daemon.status()["workers"]].count("ready") == count
    return daemon.workers() if ready else []


def take_gpu_memory(folder: Path, sizes: Sizes) -> None:
    """The GPU is a fake one, a folder with a file for each that uses its memory."""
    card = folder / "card"
    card.mkdir()
    (folder / "sitecustomize.py").write_text(
        CARD.replace("FOLDER", repr(str(card))).replace("TOTAL", f"{16 * GIB}")
    )
    memory = {
        "memory_folder": str(card),
        "memory_bytes": 16 * GIB,
        "load_bytes": GIB,
        "image_bytes": GIB >> 3,
    }
    pipeline = {"devices": ["cuda:0"], "workers_per_device": 3, "mps": False}
    settings = {"pipeline": pipeline, "stages": {"ocr": {"options": memory, "batch_size": 8}}}
    with opened(folder, sizes, settings, {"PYTHONPATH": str(folder)}) as scene:
        (card / ".partial").write_text(str(13 * GIB))
        (card / ".partial").rename(card / "neighbor")
        scene.expect("VisiondGpuMemory", scene.work)


def break_a_model(folder: Path, sizes: Sizes) -> None:
    """Its answers are wrong for a moment, without an error."""
    file, environment = make_breakable(folder)
    with opened(folder, sizes, environment=environment) as scene:
        file.touch()
        scene.work(40)
        scene.daemon.wait_event(WRONG)
        file.unlink()
        scene.expect("VisiondWrongAnswers", scene.work)


def break_a_model_for_one_format(folder: Path, sizes: Sizes) -> None:
    """The embeddings are equal, and those of known images, which have another format, are right."""
    file, environment = make_breakable(folder, ONLY_PPM)
    with (folder / "site" / "sitecustomize.py").open("a") as site:
        site.write(SOON)
    with opened(folder, sizes, environment=environment) as scene:
        file.touch()
        scene.work(100)
        scene.expect("VisiondSuspiciousAnswers", lambda: scene.work(1))


def fill_the_disk(folder: Path, sizes: Sizes) -> None:
    with mounted(folder / "results", "16m") as disk, opened(folder, sizes) as scene:
        (disk.folder / "filler").write_bytes(bytes((16 << 20) - (600 << 10)))
        scene.expect("VisiondDiskLow")


def take_an_inbox_away(folder: Path, sizes: Sizes) -> None:
    settings = {"inbox": [{"name": name, "settle_seconds": 0.1} for name in ("mail", "scans")]}
    with opened(folder, sizes, settings) as scene:
        scene.place.inbox("scans").rename(folder / "gone")
        scene.expect("VisiondInboxAway", lambda: scene.work(1, "mail"))


def overflow_the_queue_of_events(folder: Path, sizes: Sizes) -> None:
    """A daemon that is stopped reads no events."""
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with opened(folder, sizes) as scene:
        touched = [scene.place.inbox() / name for name in (".a", ".b")]  # names that are ignored
        for file in touched:
            file.touch()
        for overflows in range(1, 6):
            scene.prometheus.wait_for('avg_over_time(up{job="visiond"}[5s])', 0.8)  # not down for long in all
            scene.daemon.pause()
            for number in range(room + 1):
                os.utime(touched[number % 2])  # equal events in a row would be one
            scene.daemon.signal(signal.SIGCONT)
            scene.prometheus.wait_for("visiond_watch_overflows_total", overflows)
        scene.expect("VisiondEventsLost", scene.work)


def break_a_sink(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes, {"output": {"sinks": ["jsonl"]}}) as scene:
        file = Path(f"{scene.place.site.results}.jsonl")
        wait_for(file.exists, "the file of the sink")
        file.unlink()
        file.mkdir()
        scene.expect("VisiondPublishingBehind", scene.work)


def reload_a_typo(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes) as scene:
        scene.place.configure({"pipeline": {"max_attempts": 0}})
        scene.place.command("reload")
        scene.expect("VisiondConfigurationRefused", scene.work)


def put_a_file_in_the_backup_folders_place(folder: Path, sizes: Sizes) -> None:
    """Upkeep begins when no image is in flight. From the start, the file would be a wrong configuration."""
    backups = folder / "backups"
    settings = {"backup_folder": str(backups), "quiet_hours": "", "backup_days": 1e-4}
    with opened(folder, sizes, {"upkeep": settings}) as scene:
        wait_for(lambda: any(backups.glob("[!.]*")), "the first backup")
        backups.rename(folder / "gone")
        backups.touch()
        scene.expect("VisiondUpkeepFailed")


def take_the_address_of_the_page(folder: Path, sizes: Sizes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        page = {"listen": f"127.0.0.1:{other.getsockname()[1]}"}
        with opened(folder, sizes, {"page": page}) as scene:
            scene.expect("VisiondPageDown")


def work_with_models_of_the_demonstration(folder: Path, sizes: Sizes) -> None:
    with opened(folder, sizes, {"stages": {"yolo": {"options": {"notice": "demonstration"}}}}) as scene:
        scene.expect("VisiondDemonstrationModels", lambda: scene.work(1))


DRILLS: dict[str, Callable[[Path, Sizes], None]] = {
    "VisiondDown": kill_the_daemon,
    "VisiondWatchdog": hang_a_write,
    "VisiondManyFailures": deliver_broken_images,
    "VisiondWorkersRestarting": kill_workers,
    "VisiondWrongAnswers": break_a_model,
    "VisiondSuspiciousAnswers": break_a_model_for_one_format,
    "VisiondInboxAway": take_an_inbox_away,
    "VisiondPublishingBehind": break_a_sink,
    "VisiondConfigurationRefused": reload_a_typo,
    "VisiondDiskLow": fill_the_disk,
    "VisiondGpuMemory": take_gpu_memory,
    "VisiondEventsLost": overflow_the_queue_of_events,
    "VisiondNothingFinished": put_a_file_in_the_results_folders_place,
    "VisiondUpkeepFailed": put_a_file_in_the_backup_folders_place,
    "VisiondPageDown": take_the_address_of_the_page,
    "VisiondDemonstrationModels": work_with_models_of_the_demonstration,
    "VisiondBacklogGrows": deliver_faster_than_it_works,
}
assert DRILLS.keys() == {alert.name for alert in alerts()}, "each alert needs a drill"


def work_for_an_hour(folder: Path, hours: float = 1.0) -> int:
    """Images arrive all the time, now and then a broken one, and a worker is lost once: no alert fires.
    Returns the number of good images."""
    with opened(folder, {"linger_seconds": 0}, {"output": {"sinks": ["jsonl"]}}) as scene:
        end = time.monotonic() + hours * HOUR_SECONDS
        os.kill(scene.daemon.workers()[0], signal.SIGKILL)
        rounds = 0

        def is_over() -> bool:
            nonlocal rounds
            rounds += 1
            scene.work(2)
            if rounds % 20 == 0:
                scene.place.drop(f"{rounds}.png", b"no image")
            return time.monotonic() > end

        wait_for(is_over, "the hour", hours * HOUR_SECONDS + PATIENCE)
        assert not (fired := scene.fired()), fired
        return scene._dropped


def drive_alerts(folder: Path, sizes: Sizes) -> str:
    """Every drill and the hour; returns what happened."""
    lines = []
    for alert, drill in DRILLS.items():
        (folder / alert).mkdir()
        try:
            drill(folder / alert, sizes)
        except pytest.skip.Exception as reason:
            lines.append(f"{alert} not tried: {reason}")
    (folder / "hour").mkdir()
    images = work_for_an_hour(folder / "hour", sizes["hours"])
    tried = len(DRILLS) - len(lines)
    text = (
        f"{tried} alerts fired, each for its fault alone; none in {sizes['hours']} hours with {images} images"
    )
    return "\n".join([text, *lines])
