"""Measures whether workers notice that their answers have become wrong, how soon, and whether right answers are ever suspected.

    python -m benchmarks.canary                        a daemon for each planted fault, with the mini pack
    python -m benchmarks.canary --good 200000          healthy daemons of all dtypes, over photographs

On a GPU each fault is planted just after a look, which is the worst moment, while images arrive at a steady rate. (On a CPU
looks are too rare for this.) Healthy workers look after every three hundred images. The photographs are those that packages
carry, or those in --photographs.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.harness import CONFIG, TEMPORARY, ask_ledger, read_options, spread, work_folder
from daemon.config.loading import load
from daemon.measure.throwaway import Throwaway
from daemon.workers import canary, chain
from stages.scenes.generator import encode_scene, make_scene
from stages.scenes.photographs import find_photographs
from tests.daemon.workers.wrong_answers import FAULTS

WRONG = b"answers to known images are wrong"
PATIENCE_SECONDS = 90.0  # a fault that is not noticed by then counts as not noticed
LONGEST_SIDE = 640  # pixels of a photograph
DTYPES = {"float32": "float32", "half": "half", "int8": "int8 for CLIP, else half"}
SETTINGS = """
[pipeline]
reuse_results = false
workers_per_device = 1
[models]
pack = "mini"
"""
SITE = """
import sys
if "daemon.workers.child" in sys.orig_argv:
    from benchmarks.canary import change_worker
    change_worker({folder!r}, {fault!r})
"""


def change_worker(folder: str, fault: str) -> None:
    """In a worker, before it loads: count its looks; and have the fault while a file is there, or look often if there is
    no fault."""
    look, load_chain = canary.Canary.look, chain.Chain.load
    switch, count = (
        Path(folder, "broken"),
        os.open(Path(folder, "looks"), os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    )

    def look_and_count(self: canary.Canary) -> dict[str, str]:
        try:
            return look(self)
        finally:
            os.write(count, b".")

    def load_and_plant(self: chain.Chain, *arguments: Any) -> dict[str, float]:
        seconds = load_chain(self, *arguments)
        name, plant = FAULTS[fault]
        stage: Any = next(stage for stage in self.stages if stage.name == name)
        right = stage.run
        wrong = plant(right)
        stage.run = lambda images: (wrong if switch.exists() else right)(images)
        return seconds

    canary.Canary.look = look_and_count  # type: ignore[method-assign]
    if fault:
        chain.Chain.load = load_and_plant  # type: ignore[method-assign, assignment]
    else:
        canary.PAUSE_SECONDS, canary.SHARE = 0.0, 100


class Watched:
    """A daemon in a folder of its own, with its inbox, its log and its count of looks."""

    def __init__(self, folder: Path, fault: str, settings: str, *options: str) -> None:
        self.folder, self.fault, self.inbox = folder, fault, folder / "inbox"
        self.inbox.mkdir(parents=True, exist_ok=True)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE.format(folder=str(folder), fault=fault))
        file = folder / "daemon.toml"
        file.write_text(CONFIG.format(inbox=self.inbox) + SETTINGS + settings)
        self.log, self._looks = folder / "log", folder / "looks"
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{site}:{before}"
        try:
            self.daemon = Throwaway(load(file), file, *options, log=self.log)
            self.daemon.__enter__()
        finally:
            os.environ["PYTHONPATH"] = before

    @property
    def looks(self) -> int:
        return self._looks.stat().st_size if self._looks.exists() else 0

    def find_alarm(self) -> dict[str, Any] | None:
        lines = (line for line in self.log.read_bytes().splitlines() if WRONG in line)
        return next(map(json.loads, lines), None)

    def measure_notice(self) -> tuple[float, str]:
        """Break the model after the first look; the seconds until the worker says so, and what it says."""
        wait_until(lambda: self.looks > 0, "a look")
        (self.folder / "broken").touch()
        began = time.time()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: bool(self.find_alarm()), "the alarm")
        alarm = self.find_alarm()
        if not alarm:
            return float("inf"), "not noticed"
        return datetime.fromisoformat(alarm["timestamp"]).timestamp() - began, json.dumps(alarm["faults"])


def wait_until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)


def main() -> None:
    options = read_options(
        __doc__,
        good=0,
        together=7,
        rate=30.0,
        faults=list(FAULTS),
        dtypes=list(DTYPES),
        photographs="",
        folder=TEMPORARY,
    )
    with work_folder(options.folder) as folder:
        if options.good:
            measure_good(folder, options.good, options.dtypes, options.photographs)
        else:
            measure_faults(folder, options.faults, options.together, options.rate)


def measure_faults(folder: Path, faults: Sequence[str], together: int, rate: float) -> None:
    """together: daemons at once; rate: images a second for each."""
    seconds: list[float] = []
    for start in range(0, len(faults), together):
        group = faults[start : start + together]
        with contextlib.ExitStack() as stack:
            watched = [Watched(folder / fault, fault, "") for fault in group]
            for one in watched:
                stack.push(one.daemon)
            for one in watched:
                one.daemon.wait_until_ready()
            stack.enter_context(feeding([one.inbox for one in watched], rate))
            found: dict[str, tuple[float, str]] = {}

            def note(one: Watched, found: dict[str, tuple[float, str]] = found) -> None:
                found[one.fault] = one.measure_notice()

            threads = [threading.Thread(target=note, args=[one]) for one in watched]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for fault, (after, what) in found.items():
            print(f"{after:5.1f} s  {fault}: {what}", flush=True)
            seconds.append(after)
    in_time = sum(after <= 60 for after in seconds)
    print(f"{in_time} of {len(seconds)} faults noticed in 60 s; seconds: {spread(seconds, 1)}")


@contextlib.contextmanager
def feeding(inboxes: Sequence[Path], rate: float) -> Iterator[None]:
    """Drop images into each at this rate, each with bytes of its own."""
    scenes = [encode_scene(make_scene(0, index)) for index in range(50)]
    stop = threading.Event()

    def feed() -> None:
        for number in itertools.count():
            suffix, data = scenes[number % len(scenes)]
            for inbox in inboxes:
                partial = inbox.parent / "partial"
                partial.write_bytes(data + number.to_bytes(8))
                partial.rename(inbox / f"{number:07d}.{suffix}")
            if stop.wait(1 / rate):
                return

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_good(folder: Path, count: int, dtypes: Sequence[str], photographs: str) -> None:
    """Healthy daemons at once, one for each of the dtypes, share the images."""
    pictures = list(read_photographs(Path(photographs) if photographs else None))
    each = count // len(dtypes)
    with contextlib.ExitStack() as stack:
        watched = []
        for dtype in dtypes:
            inbox = folder / dtype / "inbox"
            inbox.mkdir(parents=True)
            for number in range(each):
                (inbox / f"{number:07d}.jpg").write_bytes(
                    pictures[number % len(pictures)] + number.to_bytes(8)
                )
            watched.append(Watched(folder / dtype, "", describe_stages(dtype), "--once"))
            stack.push(watched[-1].daemon)
        for dtype, one in zip(dtypes, watched, strict=True):
            one.daemon.wait_until_done()
            [(done,)] = ask_ledger(one.folder, "SELECT COUNT(*) FROM image WHERE status = 1")
            alarms = one.log.read_bytes().count(WRONG)
            print(f"{DTYPES[dtype]}: {done:,} images, {one.looks:,} looks, {alarms} false alarms", flush=True)
    print(f"{len(pictures)} photographs")


def describe_stages(dtype: str) -> str:
    by_stage = dict.fromkeys(("ocr", "yolo", "clip", "blip"), dtype)
    if dtype == "int8":
        by_stage |= {"ocr": "half", "yolo": "half", "blip": "half"}
    return "".join(f'[stages.{stage}]\ndtype = "{one}"\n' for stage, one in by_stage.items())


def read_photographs(folder: Path | None) -> Iterator[bytes]:
    for path in find_photographs(folder):
        with Image.open(path) as picture:
            picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            buffer = io.BytesIO()
            picture.convert("RGB").save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()


if __name__ == "__main__":
    main()
