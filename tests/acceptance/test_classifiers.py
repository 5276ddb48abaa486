"""Two classifiers of one's own beside the fake stages: small models of transformers, which a rule of bins reads."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
from PIL import Image

from daemon.core.sidecar import json_schema
from tests.daemon_process import PATIENCE, STAGES, Daemon, Place
from tests.stages import classifiers

NAMES = ("red.png", "blue.png")
OURS = ("classifier_rating", "classifier_safety")
LISTENS = {"listen": "127.0.0.1:0"}
RULE = """def choose(record):
    safety, rating = record["classifier_safety"], record["classifier_rating"]
    return "top" if rating["score"] >= LIMIT and safety["scores"]["SAFE"] < 1 else "rest"
"""


def write_rule(place: Place, safe: str = "safe", limit: float = -1e9) -> None:
    (place.folder / "my_rules.py").write_text(RULE.replace("SAFE", safe).replace("LIMIT", str(limit)))


def run(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    """In a new Python, as the rule's module is on its path."""
    return place.command(*words, prefix=["env", f"PYTHONPATH={place.folder}"], timeout=5 * PATIENCE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place where two images have been processed."""
    folder = tmp_path_factory.mktemp("classifiers")
    classifiers.save("vit", folder / "safety")
    classifiers.save("resnet", folder / "rating", id2label={0: "rating"}, problem_type="regression")
    tables = {
        "classifier_safety": {"model": "./safety"},
        "classifier_rating": {"model": "./rating"},
    }
    place = Place(
        folder,
        {"pipeline": {"stages": [*STAGES, *OURS]}, "stages": tables, "binning": {"rules": "my_rules:choose"}},
    )
    write_rule(place)
    for name in NAMES:
        Image.new("RGB", (90, 70), name.removesuffix(".png")).save(folder / "picture.png")
        place.drop(name, (folder / "picture.png").read_bytes())
    ended = run(place, "run", "--once")
    assert ended.returncode == 0, ended.stderr
    return place


def test_each_has_its_scores_in_the_sidecar_under_its_own_name(place: Place) -> None:
    red, blue = (place.sidecar(name) for name in NAMES)
    assert red["models"].keys() == red["timings"].keys() == {*STAGES, *OURS}
    safety, rating = red["classifier_safety"], red["classifier_rating"]
    assert {*safety["scores"]} == {*classifiers.LABELS.values()}
    assert safety["label"] == next(iter(safety["scores"]))
    assert rating == {"label": "rating", "score": rating["score"], "scores": {"rating": rating["score"]}}
    assert (rating["score"], safety) != (blue["classifier_rating"]["score"], blue["classifier_safety"])


def test_the_published_schema_has_each_of_them(place: Place) -> None:
    """An additional key must be one of the schema's, as it forbids others."""
    sidecar = json.loads(json_schema())["$defs"]["Sidecar"]
    [(pattern, kind)] = [each for each in sidecar["patternProperties"].items() if "classifier" in each[0]]
    document = place.sidecar("red.png")
    assert [key for key in document if key not in sidecar["properties"]] == list(OURS)
    assert all(re.search(pattern, name) for name in OURS)
    assert kind == {"$ref": "#/$defs/Classes"}
    assert not re.search(pattern, "classifier_not_this")


def test_a_rule_reads_them(place: Place) -> None:
    assert [place.sidecar(name)["bin"]["name"] for name in NAMES] == ["top", "top"]


def test_show_exports_and_the_page_have_them(place: Place) -> None:
    assert "classifier_safety" in run(place, "show", "red.png").stdout
    rows = {row["path"]: row for row in csv.DictReader(io.StringIO(run(place, "export", "-").stdout))}
    safety, rating = (place.sidecar("red.png")[name] for name in ("classifier_safety", "classifier_rating"))
    row = rows["red.png"]
    assert (row["classifier_safety_label"], float(row["classifier_rating_score"])) == (
        safety["label"],
        rating["score"],
    )
    assert json.loads(row["classifier_safety_scores"]) == safety["scores"]
    parquet = place.folder / "all.parquet"
    assert run(place, "export", str(parquet)).returncode == 0
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(parquet).to_pylist()
    [found] = [dict(each["classifier_safety_scores"]) for each in table if each["path"] == "red.png"]
    assert found == safety["scores"]


def test_check_names_a_rule_that_reads_a_label_which_the_model_does_not_have(place: Place) -> None:
    write_rule(place, safe="saef")
    place.configure(
        {"state": {"path": "elsewhere"}}
    )  # without a result: a sample has the labels of the model
    try:
        told = run(place, "check", "--quick")
    finally:
        place.configure({"state": {"path": "state"}})
    assert told.returncode == os.EX_CONFIG
    assert (
        'binning] rules = "my_rules:choose" fails on a sample record: it reads the label "saef", which the model of '
        'classifier_safety does not have; did you mean "safe"?' in told.stdout
    )
    assert (
        "models: classifier_safety: ViT (ViTForImageClassification), backend transformers, float32"
        in told.stdout
    )


def test_a_changed_option_repeats_one_of_them_alone_and_metrics_and_the_page_have_each(
    tmp_path: Path,
) -> None:
    tables = {name: {"backend": "fake"} for name in OURS}
    place = Place(
        tmp_path,
        {"pipeline": {"stages": [*STAGES, *OURS]}, "stages": tables, "http": LISTENS, "page": LISTENS},
    )
    place.drop_many(range(2))
    assert place.run_once().returncode == 0
    first = json.loads(next(place.site.results.glob("*.json")).read_bytes())
    place.configure({"stages": {"classifier_safety": {"options": {"salt": 1}}}})
    assert place.command("redo", "--stale").returncode == 0
    with Daemon(place) as daemon:
        daemon.wait_idle(2)
        address = daemon.wait_event("page")["address"]
        with urlopen(f"{address}/images/{first['id']}") as answer:
            shown = answer.read().decode()
        counts = {name: daemon.metric("visiond_stage_images_total", stage=name) for name in OURS}
    assert counts == {"classifier_rating": 0, "classifier_safety": 2}
    again = json.loads((place.site.results / (first["source"]["path"] + ".json")).read_bytes())
    changed = {name for name in again["models"] if again["models"][name] != first["models"][name]}
    assert changed == {"classifier_safety"}
    assert again["classifier_safety"] != first["classifier_safety"]
    assert again["classifier_rating"] == first["classifier_rating"]
    label = again["classifier_safety"]["label"]
    assert f'<th scope="row">classifier_safety</th><td><bdi>{label}</bdi> 0.75' in shown
