"""Kills the daemon while sinks write a file for each image, a data set for YOLO, and rows of Lance, and looks at every file and
row: one for each image and sink, whole, and with the answer of its image."""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from daemon.config.output import FILE_SINKS
from daemon.exports.yolo import VALIDATED, read_classes
from tests.checker import Verdict
from tests.daemon_process import Place
from tests.faults.kill import Outcome, kill_daemons, open_place

SUFFIXES = {
    "captions": ".txt",
    "hocr": ".ppm.hocr",
    "alto": ".ppm.alto.xml",
    "xmp": ".ppm.xmp",
    "xmp-adobe": ".xmp",
    "label-studio": ".ppm.json",
}
LINE = {
    "hocr": "{http://www.w3.org/1999/xhtml}title",
    "alto": "{http://www.loc.gov/standards/alto/ns-v4#}fileName",
    "xmp": "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li",
}


def kill_while_sinks_write(folder: Path, kills: int, files: int, chance: random.Random) -> Outcome:
    place = open_place(folder)
    with_lance = importlib.util.find_spec("lance") is not None  # `make tools` installs it
    place.configure({"output": {"sinks": ["yolo", *sorted(FILE_SINKS), *["lance"] * with_lance]}})
    outcome = kill_daemons(place, kills, files, chance)
    end = place.run_once()  # a daemon that is stopped waits for its sinks only for a while
    assert end.returncode == 0, end.stderr
    for sink in sorted(FILE_SINKS):
        judge_files(place, sink, outcome.verdict)
    judge_labels(place, outcome.verdict)
    if with_lance:
        judge_rows(place, outcome.verdict)
    return outcome


def judge_labels(place: Place, verdict: Verdict) -> None:
    """Adds what is wrong with the data set for YOLO to the verdict. It has the images whose files are there."""
    folder = Path(f"{place.site.results}.yolo")
    names = read_classes((folder / "data.yaml").read_text())
    expected: dict[str, Any] = {}
    for (inbox, path), document in verdict.results.items():
        mark = hashlib.sha256(os.path.join(os.fsencode(inbox), path)).hexdigest()[:16]
        digest = document["source"]["digest"].removeprefix("sha256:")
        part = "val" if int(digest[:2], 16) < VALIDATED else "train"
        if inbox != "delete":
            stem = f"{part}/{mark[:2]}/{Path(os.fsdecode(path)).stem}-{mark}"
            labels = [found["label"] for found in document["objects"]["detections"]]
            expected |= {f"images/{stem}.ppm": digest, f"labels/{stem}.txt": labels}
    found = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*.*") if f.name != "data.yaml"}
    verdict.lost += [f"yolo: {name}" for name in expected.keys() - found.keys()]
    verdict.double += [f"yolo: {name}" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        data = found[name].read_bytes()
        rows = [line.split() for line in data.decode().splitlines()] if name.endswith(".txt") else []
        said = (
            [[*names][int(row[0])] for row in rows]
            if name.endswith(".txt")
            else hashlib.sha256(data).hexdigest()
        )
        if said != expected[name]:
            verdict.wrong.append(f"yolo: {name} is of another image: {said}")


def judge_rows(place: Place, verdict: Verdict) -> None:
    """Adds what is wrong with the Lance data set to the verdict."""
    import lance

    def key(row: dict[str, Any]) -> tuple[int, str, str, str]:
        return row["id"], row["inbox"], row["path"], row["caption"]

    table = lance.dataset(f"{place.site.results}.lance").to_table(["id", "inbox", "path", "caption"])
    found = collections.Counter(map(key, table.to_pylist()))
    expected = {
        key({**document, **document["source"], "caption": document["caption"]["text"]})
        for document in verdict.results.values()
    }
    verdict.lost += [f"lance: {row}" for row in expected - found.keys()]
    verdict.wrong += [f"lance: {row}" for row in found.keys() - expected]
    verdict.double += [f"lance: {row}" for row, count in found.items() if count > 1]


def judge_files(place: Place, sink: str, verdict: Verdict) -> None:
    """Adds what is wrong to the verdict."""
    folder = Path(f"{place.site.results}.{sink}")
    expected = {
        Path(inbox, os.fsdecode(path)).with_suffix("").as_posix() + SUFFIXES[sink]: document
        for (inbox, path), document in verdict.results.items()
    }
    found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if not file.is_dir()}
    verdict.lost += [f"{sink}: {name}" for name in expected.keys() - found.keys()]
    verdict.double += [f"{sink}: {name}" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        path, caption = expected[name]["source"]["path"], expected[name]["caption"]["text"]
        try:
            said = read_file(found[name], sink)
        except (ElementTree.ParseError, ValueError) as error:
            verdict.torn.append(f"{sink}: {name}: {error}")
            continue
        if said != (caption if sink in ("captions", "xmp", "xmp-adobe") else path):
            verdict.wrong.append(f"{sink}: {name} is of another image: {said}")


def read_file(file: Path, sink: str) -> str:
    """The caption that it has, or the name of its image. Raises ParseError, ValueError."""
    text = file.read_text("utf-8")
    if sink == "captions":
        return text.removesuffix("\n")
    if sink == "label-studio":
        return Path(json.loads(text)["meta"]["visiond"]["path"]).name
    found = ElementTree.fromstring(text).find(f".//{LINE[sink.removesuffix('-adobe')]}")
    return (found.text or "").rpartition("/")[2] if found is not None else ""
