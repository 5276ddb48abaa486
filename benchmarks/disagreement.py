"""Measures the order by disagreement: how many planted errors are among the first 2 % of the images, and how long it takes to
order a million images.

The errors are planted in the answers of the mini pack for scenes of `visiond samples`, in one of a hundred images: labels of
boxes are swapped, texts blanked, captions those of other images, or tags shifted by one. The second answers, of a second look
or a former model, are those for the same scenes in 70 % of their size; labels of people are the truth of the scenes. Each
figure is an average of ROUNDS plantings. --seed draws other scenes and plants other errors: 7 was used while the order was
made. Of a million images, "asked again" is the time while the index is as it was. With
--labels, so many images of fake stages get labels of all kinds, and are measured again.

    python -m benchmarks.disagreement --scenes 400 --seed 11
    python -m benchmarks.disagreement --images 1000000
    python -m benchmarks.disagreement --labels 10000
"""

from __future__ import annotations

import io
import itertools
import random
import resource
import sqlite3
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks.harness import TEMPORARY, make_files, read_options, run_fakes, work_folder
from daemon.config.loading import load
from daemon.core.labels import Kind, Label, ObjectLabel
from daemon.core.messages import Output
from daemon.labels.store import LabelStore
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Record
from daemon.ledger.records import Reader
from daemon.search.disagreement import measure
from daemon.search.entries import mark
from daemon.search.evidence import BLOCK, NAMES, Columns, Ranking, write_all
from daemon.search.query import parse
from daemon.search.searcher import Searcher
from stages.contract.binning import sure_text_of
from stages.scenes.generator import encode_scene, make_scene
from stages.scenes.truth import Truth
from visiond.engine import Annotator

SEED, MAX_SIDE, SMALLER, GROUP = 7, 448, 0.7, 100  # pixels; part of a side; scenes at once
SHARE, FIRST, ROUNDS = 0.01, 0.02, 60
WRONG = {"yolo": 0.5, "ocr": 0.1, "blip": 0.2, "clip": 0.7}  # disagreement with the truth
Answers = dict[str, dict[str, Any]]  # by stage
Labels = Mapping[Kind, Label]
CONDITIONS = {
    "scores alone": ("scores",),
    "second answers alone": ("models",),
    "labels alone": ("labels",),
    "scores, second answers": ("scores", "models"),
    "scores, labels": ("scores", "labels"),
    "all": ("scores", "models", "labels"),
}
QUERIES = ("", "bin:A", "bin:B", "bin:A bin:C")  # 100, 1, 10 and 90 % of the images
ORDERS = ("disagreement", "disagreement:labels", "disagreement:scores:yolo")


def main() -> None:
    options = read_options(__doc__, scenes=0, images=0, labels=0, seed=SEED, folder=TEMPORARY)
    with work_folder(options.folder) as folder:
        if options.scenes:
            find_planted(folder, options.scenes, options.seed)
        if options.images:
            time_order(folder, options.images)
        if options.labels:
            time_labels(folder, options.labels)


def time_labels(folder: Path, count: int) -> None:
    make_files(folder / "inbox", count, SEED)
    run_fakes(folder)
    state = folder / "state"
    with (
        closing(Reader(state / "ledger.sqlite")) as reader,
        closing(Searcher(state, reader, None)) as searcher,
    ):
        searcher.catch_up()
        digests = [record.digest for record in reader.finished()]
        said = say(make_scene(SEED, 0).truth)
        store = LabelStore(state)
        store.keep(
            [(digest, kind, label.value, "people") for digest in digests for kind, label in said.items()]
        )
        started, clock = time.process_time(), time.monotonic()
        searcher.catch_up()
        each = 1000 * (time.process_time() - started) / count
        print(
            f"{count:,} labelled images measured in {time.monotonic() - clock:.1f} s: {each:.2f} ms of CPU for each"
        )


def find_planted(folder: Path, count: int, seed: int) -> None:
    (folder / "daemon.toml").write_text('[log]\nlevel = "error"\n')
    with Annotator(load(folder / "daemon.toml")) as annotator:
        images = [image for image in annotate(annotator, count, seed) if is_right(*image)]
    scenes, count = count, len(images)
    whole = [measure(*image) for image in images]
    found: dict[str, Counter[str]] = {name: Counter() for name in CONDITIONS}
    planted: Counter[str] = Counter()
    for turn in range(ROUNDS):
        chance = random.Random(f"{seed} {turn}")
        changed: dict[int, str] = {}
        scores = [*whole]
        for place, kind in zip(chance.sample(range(count), round(count * SHARE)), turns(turn), strict=False):
            if name := plant(images, place, kind, scores, chance):
                changed[place] = name
        planted.update(changed.values())
        for name, signals in CONDITIONS.items():
            first = order(scores, signals, round(count * FIRST))
            found[name].update(changed[place] for place in first if place in changed)
    print(
        f"{count:,} of {scenes:,} scenes have right answers; {planted.total() / ROUNDS:.1f} planted errors, {ROUNDS} times; "
        f"found in the first {FIRST:.0%}:"
    )
    for name, each in found.items():
        shares = ", ".join(f"{kind} {each[kind] / max(1, planted[kind]):.0%}" for kind in PLANTS)
        print(f"{name:22} {each.total() / planted.total():4.0%}   {shares}")


Scored = dict[tuple[str, str], float]
Scene = tuple[Record, Mapping[str, bytes], Labels]


def annotate(annotator: Annotator, count: int, seed: int) -> Iterator[Scene]:
    """The answers for each scene, those for it in a smaller size, and its truth as labels."""
    for start in range(0, count, GROUP):
        scenes = [make_scene(seed, index, MAX_SIDE) for index in range(start, min(start + GROUP, count))]
        files = [encode_scene(scene) for scene in scenes]
        first = annotator.records([(str(at), data) for at, (_, data) in enumerate(files)])
        second = annotator.records([(str(at), shrink(data)) for at, (_, data) in enumerate(files)])
        for scene, one, other in zip(scenes, first, second, strict=True):
            yield (
                one,
                {
                    stage: enlarge(stage, output, one.width / other.width)
                    for stage, output in other.outputs.items()
                },
                say(scene.truth),
            )
        print(f"{start + len(scenes):,} scenes", flush=True)


def shrink(data: bytes) -> bytes:
    out = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        size = [max(16, round(SMALLER * side)) for side in image.size]
        image.convert("RGB").resize((size[0], size[1])).save(out, "JPEG", quality=70, exif=image.getexif())
    return out.getvalue()


def enlarge(stage: str, output: Output, scale: float) -> bytes:
    answer = msgspec.json.decode(output.payload)
    if stage == "yolo":
        for each in answer["detections"]:
            each["box"] = [scale * side for side in each["box"]]
    return msgspec.json.encode(answer)


def say(truth: Truth) -> Labels:
    values: dict[Kind, Any] = {
        Kind.OBJECTS: [ObjectLabel(each.label, each.box) for each in truth.objects],
        Kind.TAGS: truth.tags,
        Kind.CAPTION: truth.captions,
        Kind.TEXT: "\n".join(line.text for line in truth.lines),
    }
    return {kind: Label(value, "truth", 1.0) for kind, value in values.items()}


def is_right(record: Record, others: Mapping[str, bytes], labels: Labels) -> bool:
    """Whether the answers are right, nearly: those that are not would be found too, and are not planted."""
    found = measure(record, {}, labels)
    return all(found.get(("labels", stage), 0.0) < most for stage, most in WRONG.items())


def order(scores: Sequence[Scored], signals: Sequence[str], count: int) -> list[int]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE evidence (name, block, part, PRIMARY KEY (name, block))")
        write_all(connection, dict(enumerate(scores)))
        names = [name for name in NAMES if name.split(":")[0] in signals]
        ranked = Ranking(Columns.read(connection, names)).in_order(count)
    return [*itertools.islice((number for part in ranked for number in part), count)]


# The planted errors. Each changes an answer that is right, and returns whether it is wrong now.


def swap_labels(answers: Answers, said: Labels, chance: random.Random, other: Answers) -> bool:
    boxes, others = answers["yolo"]["detections"], other["yolo"]["detections"]
    labels = {each["label"] for each in boxes}
    if len(labels) > 1:
        one = chance.choice(boxes)
        two = chance.choice([each for each in boxes if each["label"] != one["label"]])
        one["label"], two["label"] = two["label"], one["label"]
    elif boxes and (new := {each["label"] for each in others} - labels):
        chance.choice(boxes)["label"] = sorted(new)[0]
    else:
        return False
    return True


def blank_text(answers: Answers, said: Labels, chance: random.Random, other: Answers) -> bool:
    had = bool(sure_text_of(answers["ocr"]) and said[Kind.TEXT].value)
    answers["ocr"] |= {"lines": [], "count": 0, "area_ratio": 0.0}
    return had


def change_caption(answers: Answers, said: Labels, chance: random.Random, other: Answers) -> bool:
    answers["blip"]["text"] = other["blip"]["text"]
    return other["blip"]["text"] not in said[Kind.CAPTION].value


def shift_tags(answers: Answers, said: Labels, chance: random.Random, other: Answers) -> bool:
    tags = answers["clip"]["tags"]
    labels = [tag["label"] for tag in tags]
    for tag, label in zip(tags, [*labels[1:], *labels[:1]], strict=True):
        tag["label"] = label
    return tags[0]["label"] not in said[Kind.TAGS].value


PLANTS: Mapping[str, Callable[[Answers, Labels, random.Random, Answers], bool]] = {
    "labels of boxes": swap_labels,
    "texts": blank_text,
    "captions": change_caption,
    "tags": shift_tags,
}


def turns(turn: int) -> Iterator[str]:
    return itertools.islice(itertools.cycle(PLANTS), turn % len(PLANTS), None)


def plant(images: Sequence[Scene], place: int, kind: str, scores: list[Scored], chance: random.Random) -> str:
    """Change the score of an image as if its answers had an error of this kind, or of the next one that it can have."""
    record, others, labels = images[place]
    other = {stage: msgspec.json.decode(o.payload) for stage, o in chance.choice(images)[0].outputs.items()}
    kinds = [*PLANTS]
    start = kinds.index(kind)
    for each in [*kinds[start:], *kinds[:start]]:
        answers = {stage: msgspec.json.decode(output.payload) for stage, output in record.outputs.items()}
        if PLANTS[each](answers, labels, chance, other):
            outputs = {stage: Output(msgspec.json.encode(answer), 0.0) for stage, answer in answers.items()}
            scores[place] = measure(replace(record, outputs=outputs), others, labels)
            return each
    return ""


def time_order(folder: Path, images: int) -> None:
    """Of a ledger with publications only, and an index with invented scores and bins."""
    ledger_file = folder / "ledger.sqlite"
    Ledger(ledger_file).close()
    with closing(sqlite3.connect(ledger_file)) as ledger, ledger:
        ledger.execute("INSERT INTO inbox (id, path) VALUES (1, x'2f61')")
        numbers = "WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < ?) "
        columns = "id, inbox, path, inode, size, mtime_ns, ctime_ns, status, seen_at, attempts, priority, emitted, finished_at"
        ledger.execute(
            f"{numbers} INSERT INTO image ({columns}, device, deaths, not_before) "
            "SELECT v, 1, CAST(v AS BLOB), v, 1, 1, 1, 1, 1.0, 1, 0, 1, 2.0, 0, 0, 0 FROM n",
            (images,),
        )
        ledger.execute(f"{numbers} INSERT INTO publication (number, image) SELECT v, v FROM n", (images,))
    with closing(Reader(ledger_file)) as reader, closing(Searcher(folder, reader, None)) as searcher:
        with closing(sqlite3.connect(folder / "search" / "index.sqlite")) as index, index:
            fill(index, images)
        for query in QUERIES:
            for name in ORDERS:
                times, kept, cpu = list[float](), list[float](), list[float]()
                for turn in range(20):
                    with closing(sqlite3.connect(folder / "search" / "index.sqlite")) as index, index:
                        index.execute("UPDATE about SET entries = ?", (images + turn,))  # as if one had come
                    started, spent = time.perf_counter(), time.process_time()
                    found = searcher.disagreeing(parse(query), name)
                    times.append(1000 * (time.perf_counter() - started))
                    cpu.append(1000 * (time.process_time() - spent))
                    again = time.perf_counter()
                    searcher.disagreeing(parse(query), name)
                    kept.append(1000 * (time.perf_counter() - again))
                    assert len(found.hits) == 50
                median, worst = statistics.median(times), sorted(times)[-2]
                print(
                    f"{images:,} images, {query or 'all':12} {name:26} median {median:4.0f} ms, p95 {worst:4.0f} ms, "
                    f"{statistics.median(cpu):4.0f} ms of CPU, asked again {statistics.median(kept):4.0f} ms"
                )
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found_all, _ = searcher.all_disagreeing(parse(""), "disagreement")
        ordered = array("q", itertools.chain.from_iterable(found_all))[::2]
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        print(
            f"all {len(ordered):,} in order: {time.process_time() - started:.1f} s of CPU, {more:,} MiB more"
        )
        started = time.process_time()
        searcher.disagreeing(parse(""), "disagreement", 9 * images // 10)
        print(f"50 after the first {9 * images // 10:,}: {time.process_time() - started:.1f} s of CPU")


def fill(index: sqlite3.Connection, images: int) -> None:
    chance = np.random.default_rng(0)
    for name in NAMES:
        # people have looked at one of a hundred, and a second model at one of ten
        share = {"labels": 0.01, "looks": 0.1, "models": 0.1, "scores": 1.0}[name.split(":")[0]]
        for block in range(images // BLOCK + 1):
            values = chance.integers(1, 256, BLOCK, np.uint8) * (chance.random(BLOCK) < share)
            index.execute(
                "INSERT INTO evidence VALUES (?, ?, ?)", (name, block, values.astype(np.uint8).tobytes())
            )
    marks = {name: mark("bin", name) for name in "ABC"}
    rows = (
        (number, marks["A" if number % 100 == 0 else "B" if number % 10 == 0 else "C"])
        for number in range(1, images + 1)
    )
    index.executemany("INSERT INTO entry (rowid, marks) VALUES (?, ?)", rows)
    index.execute("UPDATE about SET place = ?, entries = ?", (images, images))


if __name__ == "__main__":
    main()
