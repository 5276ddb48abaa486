"""Draws Grafana's boards from recorded metrics, docs/board-*.webp: python docs/boards.py docs/boards.prom.xz docs

A real Prometheus (Debian: apt install prometheus) reads the recording, which benchmarks/recording.py made, and answers each
panel's query at the steps that Grafana would ask for. The board's JSON decides places, titles, units, legends and stacking.
Grafana itself is not a package of Debian, PyPI or npm, so docs/drawing.py draws the panels, without Grafana's controls.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from drawing import GAP, WIDTH, Series, draw_page
from PIL import Image
from playwright.sync_api import sync_playwright

BOARDS = Path(__file__).parents[1] / "deploy" / "grafana"
SCRAPES = 4  # in $__rate_interval, as in Grafana
START_SECONDS = 60.0
QUALITY = 80  # of WebP
SCALE = 1.25  # pixels of the picture for each of the page
TALL, TOP_ROWS = "visiond", 4  # of this board there is also a picture of its first rows
DESCRIPTION = 0x010E  # the field of EXIF that holds the digest of the board's JSON


@dataclass(frozen=True)
class Span:
    """Unix seconds."""

    start: float
    end: float
    step: float


class Prometheus:
    """A running Prometheus that has a recording."""

    def __init__(self, port: int, span: Span) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.span = span

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready"):
                return True
        except urllib.error.URLError:
            return False

    def ask(self, query: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """The labels of each series, and its times and values."""
        asked = {"query": query, "start": self.span.start, "end": self.span.end, "step": self.span.step}
        address = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(address) as answer:
            found = json.load(answer)["data"]["result"]
        return [(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in found]


def read_span(samples: str) -> Span:
    """The time of a recording, and the usual time between two scrapes."""
    times = sorted({float(line.rsplit(" ", 1)[1]) for line in samples.splitlines() if line[0] != "#"})
    gaps = sorted(after - before for before, after in pairwise(times))
    return Span(times[0], times[-1], round(gaps[len(gaps) // 2]))


@contextlib.contextmanager
def replaying(recording: Path) -> Iterator[Prometheus]:
    """A Prometheus that has the recording and nothing else."""
    samples = lzma.decompress(recording.read_bytes()).decode()
    with tempfile.TemporaryDirectory(prefix="visiond-boards-") as name:
        folder = Path(name)
        (folder / "samples").write_text(samples)
        (folder / "empty.yml").write_text("scrape_configs: []\n")
        subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "samples", folder / "tsdb"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        options = {
            "config.file": folder / "empty.yml",
            "storage.tsdb.path": folder / "tsdb",
            "storage.tsdb.retention.time": "100y",
            "web.listen-address": f"127.0.0.1:{port}",
        }
        process = subprocess.Popen(
            ["prometheus", *(f"--{key}={value}" for key, value in options.items())], stderr=subprocess.DEVNULL
        )
        prometheus = Prometheus(port, read_span(samples))
        try:
            last = time.monotonic() + START_SECONDS
            while not prometheus.is_ready():
                if process.poll() is not None or time.monotonic() > last:
                    sys.exit("Prometheus does not start; run `prometheus` in an empty folder to see why")
                time.sleep(0.2)
            yield prometheus
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def choose(board: Mapping[str, Any], prometheus: Prometheus) -> dict[str, str]:
    """What Grafana chooses in each menu when nobody has chosen: everything, or the first value."""
    chosen: dict[str, str] = {}
    for menu in board["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", menu.get("definition", ""))
        if not asked:
            continue  # the data source
        found = {labels.get(asked[2], "") for labels, _ in prometheus.ask(fill(asked[1], chosen, prometheus))}
        if not found:
            raise LookupError(f"no {menu['label']} in this recording")
        chosen[menu["name"]] = menu.get("allValue") or min(found)
    return chosen


def fill(query: str, chosen: Mapping[str, str], prometheus: Prometheus) -> str:
    """The query as Grafana sends it."""
    for name, value in {
        "__rate_interval": f"{SCRAPES * prometheus.span.step:.0f}s",
        **chosen,
    }.items():
        query = query.replace(f"${name}", value)
    return query


def ask_panel(
    panel: Mapping[str, Any], chosen: Mapping[str, str], prometheus: Prometheus
) -> Sequence[Series]:
    """The series of a panel, with their legends."""
    return [
        Series(name_series(target["legendFormat"], labels), points)
        for target in panel["targets"]
        for labels, points in prometheus.ask(fill(target["expr"], chosen, prometheus))
    ]


def name_series(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def draw_board(board: Mapping[str, Any], prometheus: Prometheus) -> str:
    """As HTML. Raises LookupError if one of its menus has nothing to choose."""
    chosen = choose(board, prometheus)
    answers = {
        panel["id"]: ask_panel(panel, chosen, prometheus)
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    titles = {menu["name"]: menu["label"] for menu in board["templating"]["list"]}
    menus = {titles[name]: "All" if value == ".*" else value for name, value in chosen.items()}
    return draw_page(board, menus, answers, (prometheus.span.start, prometheus.span.end))


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    recording, folder = map(Path, sys.argv[1:])
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with replaying(recording) as prometheus, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 400}, device_scale_factor=SCALE)
        for file in sorted(BOARDS.glob("*.json")):
            try:
                tab.set_content(draw_board(json.loads(file.read_text()), prometheus))
            except LookupError as reason:
                print(f"{file.stem} is not drawn: {reason}")
                continue
            picture = Image.open(io.BytesIO(tab.screenshot(full_page=True)))
            save(picture, folder / f"board-{file.stem}.webp", digest_of(file))
            end = tab.locator("h2").nth(TOP_ROWS)
            if file.stem == TALL and (box := end.bounding_box()):
                picture = picture.crop((0, 0, picture.width, int(SCALE * (box["y"] - GAP))))
                save(picture, folder / f"board-{file.stem}-top.webp", digest_of(file))
        browser.close()


def save(picture: Image.Image, file: Path, digest: str) -> None:
    exif = Image.Exif()
    exif[DESCRIPTION] = digest
    picture.save(file, "WEBP", quality=QUALITY, method=6, exif=exif)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
