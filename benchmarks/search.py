"""Measures the search: how long its index takes to make, how large it is, how long answers take, and whether the ten nearest
images are the ten that a comparison in full precision finds; and how long the page takes.

Makes a ledger of its own with results of random words, boxes and embeddings, and a model of CLIP ViT-B/32's size with
random weights.

    python -m benchmarks.search --images 1000000
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import FAKES, TEMPORARY, read_options, work_folder
from daemon.core.jobs import Content, Ending, File, Job, JobStatus, Placed, Version
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.search import matrix
from daemon.search.encoder import Ask
from daemon.search.query import parse
from daemon.search.searcher import NEWEST, By, Searcher
from stages.contract import processes
from stages.contract.base import StageSpec
from stages.weights.packs import MINI

DIM, CENTERS = 512, 2000
GROUP = 1000  # images in one transaction
STAGES = ("ocr", "yolo", "clip", "blip")
VOCABULARY = 50_000
OBJECTS = ("person", "car", "dog", "cat", "chair", "bottle", "book", "bird", "boat", "cup")
SHARES = {"A": 1, "B": 10, "C": 89}  # bins, in per cent of the images
QUERIES = (
    "",
    "w17",
    "w17 w230",
    "w3 w5",
    '"w3 w5"',
    "w49*",
    "w3 -w5",
    "bin:B object:dog",
    "w2 bin:C tag:photo",
    "w49999",
)
PATHS = (
    "/",
    "/?by=newest&q=w17+w230",
    "/?by=newest&bin=B&object=dog",
    "/?by=newest&after=2020-01-01",
    "/?by=words&q=w17",
    "/?state=failed",
    "/?state=pending",
)
FILTERS = ("bin:A", "bin:B", "bin:A bin:C")  # 1, 10 and 90 % of the images
ROUNDS = 40
EXACT = 20  # sentences whose ten nearest images are compared


class Words:
    """Words as in real texts: few are in most of them, and most in few."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [f"w{number}" for number in range(VOCABULARY)]
        weights = [1 / (number + 10) for number in range(VOCABULARY)]
        self._sums = [float(total) for total in np.cumsum(weights)]
        self._bins, self._shares = list(SHARES), list(SHARES.values())

    def draw(self, count: int) -> str:
        return " ".join(self._random.choices(self._words, cum_weights=self._sums, k=count))

    def choose_bin(self) -> str:
        return self._random.choices(self._bins, self._shares)[0]

    def choose(self, names: tuple[str, ...]) -> str:
        return self._random.choice(names)


def draw_embeddings(
    count: int, source: np.random.Generator, centers: NDArray[np.float32]
) -> NDArray[np.float16]:
    """Unit vectors [count, DIM] in clusters around a common direction, as those of images are."""
    around = centers[source.integers(len(centers), size=count)]
    found = around + 0.6 * source.standard_normal((count, DIM), np.float32) / DIM**0.5
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), np.float16)


def draw_centers(source: np.random.Generator) -> NDArray[np.float32]:
    found = source.standard_normal((CENTERS, DIM), np.float32) + 1.5 * source.standard_normal(DIM, np.float32)
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def make_outputs(words: Words, embedding: NDArray[np.float16]) -> dict[str, Output]:
    box = [[8, 8], [200, 8], [200, 30], [8, 30]]
    lines = [{"text": words.draw(6), "score": 0.95, "box": box} for _ in range(8)]
    objects = [{"label": words.choose(OBJECTS), "score": 0.8, "box": [10, 10, 90, 90]} for _ in range(3)]
    encoded = base64.b64encode(embedding.astype("<f2").tobytes()).decode()
    answers: dict[str, Any] = {
        "ocr": {"lines": lines, "count": 8, "area_ratio": 0.1},
        "yolo": {"detections": objects, "count": 3, "unique": 2, "dispersion": 0.1},
        "clip": {
            "embedding": {"dim": DIM, "dtype": "float16", "base64": encoded},
            "tags": [{"label": "photo", "score": 0.8}, {"label": words.choose(OBJECTS), "score": 0.15}],
        },
        "blip": {"text": words.draw(10), "similarity": 0.3},
    }
    return {stage: Output(msgspec.json.encode(answer), 0.001) for stage, answer in answers.items()}


async def fill(path: Path, images: int) -> None:
    """A ledger with this many images that are done and published."""
    words, source = Words(1), np.random.default_rng(1)
    centers = draw_centers(source)
    ledger = Ledger(path)
    await ledger.register([(Path("/srv/inbox"), 0)], [Model(stage, f"{stage}-1", "") for stage in STAGES])
    for start in range(0, images, GROUP):
        numbers = range(start, min(start + GROUP, images))
        files = [
            File(1, b"%03d/%d.jpg" % (n // 10_000, n), Version(n + 1, 100_000, n, n), True) for n in numbers
        ]
        await ledger.admit(files)
        jobs = await ledger.next_jobs(GROUP, ())
        embeddings = draw_embeddings(len(jobs), source, centers)
        endings = [
            end(job, make_outputs(words, each), words) for job, each in zip(jobs, embeddings, strict=True)
        ]
        await ledger.end(endings)
        await ledger.mark_emitted([Placed(job.id) for job in jobs])
    ledger.close()


def end(job: Job, outputs: dict[str, Output], words: Words) -> Ending:
    content = Content(job.id.to_bytes(32, "big"), "JPEG", 1280, 960, outputs=outputs)
    return Ending(job, JobStatus.DONE, time.time(), 1, words.choose_bin(), b"{}", content=content)


def make_model(folder: Path) -> StageSpec:
    """CLIP ViT-B/32 with random weights, and the tokenizer of the mini pack."""
    from transformers import CLIPConfig, CLIPModel

    CLIPModel(CLIPConfig()).save_pretrained(folder)
    for file in (MINI / "clip").iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return StageSpec("clip", "transformers", {"model": str(folder)}, "clip-1")


def measure(name: str, work: Callable[[], object], rounds: int = ROUNDS) -> None:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    print(
        f"{name:44} median {statistics.median(times):8.1f} ms   p95 {sorted(times)[int(0.95 * rounds)]:8.1f} ms",
        flush=True,
    )


def search(folder: Path, images: int) -> None:
    ledger = folder / "ledger.sqlite"
    if not ledger.exists():
        started = time.perf_counter()
        asyncio.run(fill(ledger, images))
        print(f"made a ledger of {images:,} images in {time.perf_counter() - started:.0f} s", flush=True)
    model = folder / "model"
    with closing(Reader(ledger)) as reader, closing(Searcher(folder, reader, make_model(model))) as searcher:
        started = time.perf_counter()
        added = searcher.catch_up()
        seconds = time.perf_counter() - started
        print(
            f"made the index of {added:,} images in {seconds:.0f} s: {1e6 * seconds / max(added, 1):.0f} µs each"
        )
        sizes = {
            file.name: file.stat().st_size >> 20
            for file in sorted((folder / "search").rglob("*"))
            if file.is_file()
        }
        print(f"MiB: {sizes}; ledger {ledger.stat().st_size >> 20}", flush=True)
        for text in QUERIES:
            query = parse(text)
            measure(f"newest 48: {text or '(all)'}", lambda query=query: searcher.newest(query, NEWEST, 48))  # type: ignore[misc]
        for text in QUERIES[1:4]:
            query = parse(text)
            measure(f"best 48 by words: {text}", lambda query=query: searcher.best(query, By.words, limit=48))  # type: ignore[misc]
        started = time.perf_counter()
        searcher.best(parse("two red cars"), By.meaning)
        print(f"first sentence, with its process and model: {time.perf_counter() - started:.1f} s")
        sentences = iter(words_of(1000))
        measure("48 by meaning", lambda: searcher.best(parse(next(sentences)), By.meaning, limit=48))
        measure("48 by words and meaning", lambda: searcher.best(parse(next(sentences)), limit=48))
        for filters in FILTERS:
            ask = partial(ask_with, searcher, sentences, filters)
            measure(f"48 by meaning, {filters}, the first time", ask, 1)
            measure(f"48 by meaning, {filters}", ask)
        measure("more like an image", lambda: searcher.like(images // 2))
        compare(searcher, images)
    ask_page(folder, images)


def ask_page(folder: Path, images: int) -> None:
    """The page's process, asked by HTTP: the whole way from a request to the last byte."""
    config = folder / "daemon.toml"
    config.write_text(f'[[inbox]]\npath = "/srv/inbox"\n[state]\npath = "{folder}"\n{FAKES}')
    command = processes.python("-m", "daemon", "page", "--config", str(config), "--listen", "127.0.0.1:0")
    environment = processes.environment({"PYTHONUNBUFFERED": "1"})
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as page:
        assert page.stdout
        origin = re.findall(r"http://[\d.:]+", page.stdout.readline())[0]
        for path in (*PATHS, f"/images/{images // 2}"):
            measure(f"page {path}", partial(read, f"{origin}{path}"))
        page.send_signal(signal.SIGINT)


def read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
        return content


def ask_with(searcher: Searcher, sentences: Iterator[str], filters: str) -> None:
    assert len(searcher.best(parse(f"{next(sentences)} {filters}"), By.meaning, limit=48).hits) == 48


def words_of(count: int) -> Iterator[str]:
    words = Words(7)
    return (words.draw(4) for _ in range(count))


def compare(searcher: Searcher, images: int) -> None:
    """Images as questions: their ten nearest by the search, and by all products in float32; and the ten nearest of those
    that fit a filter."""
    found = searcher.index.matrix("clip-1")
    assert found
    assert searcher._encoder
    rows = matrix.open_rows(*found)
    right, filtered = 0, Counter[str]()
    with closing(sqlite3.connect(searcher._reader.path)) as ledger:
        bins = dict(ledger.execute("SELECT number, bin FROM publication JOIN image ON image.id = image"))
    letters = np.array([bins[number] for number in rows.numbers.tolist()])
    for place in np.random.default_rng(3).integers(images, size=EXACT):
        query = rows.exact[place].astype(np.float32)
        scores = np.concatenate(
            [
                rows.exact[start : start + 100_000].astype(np.float32) @ query
                for start in range(0, len(rows.exact), 100_000)
            ]
        )
        expected = set(rows.numbers[np.argsort(-scores)[:11]].tolist())
        question = Ask(str(found[0]), found[1], found[2], 11, like=int(rows.numbers[place]))
        right += len(expected & set(searcher._encoder.ask(question).numbers))
        for filters in FILTERS:
            fits = np.isin(letters, re.findall("bin:(.)", filters))
            expected = set(rows.numbers[np.argsort(np.where(fits, -scores, 9))[:10]].tolist())
            allowed = searcher._masks.of(parse(filters)).tobytes()
            answer = searcher._encoder.ask(msgspec.structs.replace(question, count=10, allowed=allowed))
            filtered[filters] += len(expected & set(answer.numbers))
    print(f"of the {11 * EXACT} nearest images by float32, the search found {right}")
    print(f"of the {10 * EXACT} nearest that fit a filter: {dict(filtered)}")


def main() -> None:
    options = read_options(__doc__, images=100_000, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        search(folder, options.images)


if __name__ == "__main__":
    main()
