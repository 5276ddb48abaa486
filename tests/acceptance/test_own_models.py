"""Models of one's own beside the fake stages, which a rule of bins reads: two captioners, one small chat model that is asked
with two prompts, and two classifiers."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from daemon.core.sidecar import json_schema, parse_sidecar
from tests.daemon_process import PATIENCE, STAGES, Daemon, Place, to_toml
from tests.stages import classifiers
from tests.stages.blip import stock
from tests.stages.captioners import CAPTIONERS
from tests.stages.pictures import draw_image

PROMPTS = {"blip_alt": "What does the image describe ?", "blip_long": "Describe this photo ."}
CLASSIFIERS = ("classifier_rating", "classifier_safety")
LISTENS = {"listen": "127.0.0.1:0"}
RULE = """def choose(record):
    safety, rating = record["classifier_safety"], record["classifier_rating"]
    told = len(record["blip_long"]["text"]) > 3 and record["caption"]["text"]
    return "top" if told and rating["score"] > -1e9 and safety["scores"]["safe"] < 1 else "rest"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """It has processed two images."""
    folder = tmp_path_factory.mktemp("models")
    CAPTIONERS["qwen2_vl"](folder / "chat")
    classifiers.save("vit", folder / "safety")
    classifiers.save("resnet", folder / "rating", id2label={0: "rating"}, problem_type="regression")
    tables: dict[str, Any] = {
        name: {"model": "./chat", "options": {"prompt": prompt, "max_new_tokens": stock.NEW_TOKENS}}
        for name, prompt in PROMPTS.items()
    }
    tables |= {name: {"model": f"./{name.partition('_')[2]}"} for name in CLASSIFIERS}
    settings = {
        "pipeline": {"stages": [*PROMPTS, *STAGES, *CLASSIFIERS]},
        "stages": tables,
        "binning": {"rules": "my_rules:choose"},
        "http": LISTENS,
        "page": LISTENS,
    }
    place = Place(folder, settings)
    (folder / "my_rules.py").write_text(RULE)
    pixels = draw_image(70, 90).pixels
    assert isinstance(pixels, torch.Tensor)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / "a.png")
    Image.new("RGB", (90, 70), "red").save(folder / "red.png")
    for name in ("a.png", "red.png"):
        place.drop(name, (folder / name).read_bytes())
    environment = {"PYTHONPATH": str(folder)}  # the rule's module is there
    with Daemon(place, ready=False, environment=environment) as daemon:
        daemon.wait_ready(5 * PATIENCE)
        daemon.wait_idle(2, 5 * PATIENCE)
        yield daemon


@pytest.fixture(scope="module")
def place(daemon: Daemon) -> Place:
    return daemon.place


@pytest.fixture(scope="module")
def texts(place: Place) -> dict[str, str]:
    """What each says, by the record."""
    document = place.sidecar("a.png")
    return {name: document[name]["text"] for name in PROMPTS}


def test_each_says_what_the_model_answers_to_its_prompt(
    place: Place, texts: dict[str, str], tmp_path: Path
) -> None:
    for name, prompt in PROMPTS.items():
        alone = stock.make_stage(place.folder / "chat", tmp_path, prompt=prompt)
        assert stock.run(alone, [draw_image(70, 90)]) == [texts[name]]
    assert len({*texts.values()}) == 2


def test_each_has_its_scores_in_the_sidecar_under_its_own_name(place: Place) -> None:
    drawn, red = (place.sidecar(name) for name in ("a.png", "red.png"))
    safety, rating = red["classifier_safety"], red["classifier_rating"]
    assert {*safety["scores"]} == {*classifiers.LABELS.values()}
    assert safety["label"] == next(iter(safety["scores"]))
    assert rating == {"label": "rating", "score": rating["score"], "scores": {"rating": rating["score"]}}
    assert (rating["score"], safety) != (drawn["classifier_rating"]["score"], drawn["classifier_safety"])


def test_each_has_its_place_in_the_sidecar_after_the_results_that_there_were(place: Place) -> None:
    document = place.sidecar("a.png")
    assert document["caption"]["text"].startswith("a picture of")
    keys = ["ocr", "objects", "clip", "caption", *PROMPTS, "bin"]
    assert [key for key in document if key in keys] == keys
    models = [*STAGES, *PROMPTS, *CLASSIFIERS]
    assert [name for name in document["models"] if name not in CLASSIFIERS] == models[:-2]
    assert document["models"].keys() == document["timings"].keys() == {*models}
    assert document["provenance"]["blip_alt"]["options"]["prompt"] == PROMPTS["blip_alt"]


def test_a_rule_reads_them(place: Place) -> None:
    assert [place.sidecar(name)["bin"]["name"] for name in ("a.png", "red.png")] == ["top", "top"]


def test_the_published_schema_has_each_of_them(place: Place) -> None:
    """An additional key must be one of the schema's, as it forbids others."""
    sidecar = json.loads(json_schema())["$defs"]["Sidecar"]
    more = {key for key in place.sidecar("a.png") if key not in sidecar["properties"]}
    assert more == {*PROMPTS, *CLASSIFIERS}
    for name in more:
        kinds = [kind for pattern, kind in sidecar["patternProperties"].items() if re.search(pattern, name)]
        assert kinds == [{"$ref": f"#/$defs/{'Caption' if name in PROMPTS else 'Classes'}"}]
    assert not any(re.search(pattern, "classifier_not_this") for pattern in sidecar["patternProperties"])


def test_a_sidecar_with_something_else_in_the_place_of_a_caption_is_refused(place: Place) -> None:
    document = place.sidecar("a.png")
    parse_sidecar(json.dumps(document).encode())
    with pytest.raises(ValueError, match="Expected"):
        parse_sidecar(json.dumps(document | {"blip_alt": {"text": 3}}).encode())


def test_show_and_exports_have_them(place: Place, texts: dict[str, str]) -> None:
    shown = " ".join(place.command("show", "a.png").stdout.split())
    assert all(f"{name} {text}" in shown for name, text in texts.items())
    assert "classifier_safety" in shown
    rows = {row["path"]: row for row in csv.DictReader(io.StringIO(place.command("export", "-").stdout))}
    row, document = rows["a.png"], place.sidecar("a.png")
    assert {name: row[f"{name}_text"] for name in PROMPTS} == texts
    assert row["caption"].startswith("a picture of")
    safety, rating = (document[name] for name in ("classifier_safety", "classifier_rating"))
    assert row["classifier_safety_label"] == safety["label"]
    assert float(row["classifier_rating_score"]) == rating["score"]
    assert json.loads(row["classifier_safety_scores"]) == safety["scores"]
    parquet = place.folder / "all.parquet"
    assert place.command("export", parquet).returncode == 0
    table = pyarrow.parquet.read_table(parquet).to_pylist()
    [found] = [dict(each["classifier_safety_scores"]) for each in table if each["path"] == "a.png"]
    assert found == safety["scores"]
    assert place.command("export", "coco", "--format", "coco").returncode == 0
    coco = json.loads((place.folder / "coco" / "captions.json").read_bytes())
    [number] = [image["id"] for image in coco["images"] if image["file_name"] == "a.png"]
    told = [
        (each["captioner"], each["caption"]) for each in coco["annotations"] if each["image_id"] == number
    ]
    assert told == [("blip", row["caption"]), *texts.items()]
    assert place.command("export", "captions", "--format", "captions").returncode == 0
    assert (place.folder / "captions" / "a.txt").read_text() == f"{row['caption']}\n"


def test_the_page_shows_them_and_finds_images_by_their_words(daemon: Daemon, texts: dict[str, str]) -> None:
    document = daemon.place.sidecar("a.png")
    word = min({*texts["blip_long"].split()} - {*texts["blip_alt"].split(), "a"})
    address = daemon.wait_event("page")["address"]
    with urlopen(f"{address}/images/{document['id']}") as answer:
        shown = answer.read().decode()
    found = daemon.place.command("search", f"caption:{word}").stdout
    with urlopen(f"{address}/?q=caption:{word}") as answer:
        listed = answer.read().decode()
    for name, text in texts.items():
        assert f'<th scope="row">{name}</th><td dir="auto">{text}</td>' in shown
    safety = document["classifier_safety"]
    first = f"<bdi>{safety['label']}</bdi> {safety['scores'][safety['label']]:.3g}"
    assert f'<th scope="row">classifier_safety</th><td>{first}' in shown
    assert "a.png" in found
    assert "Has the words in its further captions." in listed
    assert f"<mark>{word}</mark>" in listed


def test_check_names_a_rule_that_reads_a_label_which_the_model_does_not_have(place: Place) -> None:
    (place.folder / "misspelt.py").write_text(RULE.replace('"safe"', '"saef"'))
    # without a result: a sample has the labels of the model
    changed = {"binning": {"rules": "misspelt:choose"}, "state": {"path": "elsewhere"}}
    (place.folder / "other.toml").write_text(to_toml(place.settings | changed | {"http": {"listen": ""}}))
    told = place.command("check", "--quick", "--config", place.folder / "other.toml", modules=place.folder)
    assert told.returncode == os.EX_CONFIG
    assert (
        'binning] rules = "misspelt:choose" fails on a sample record: it reads the label "saef", which the model of '
        'classifier_safety does not have; did you mean "safe"?' in told.stdout
    )
    words = "models: classifier_safety: ViT (ViTForImageClassification), backend transformers, float32"
    assert words in told.stdout


def test_a_changed_option_repeats_one_of_them_alone_and_metrics_have_each(tmp_path: Path) -> None:
    tables = {name: {"backend": "fake"} for name in CLASSIFIERS}
    place = Place(tmp_path, {"pipeline": {"stages": [*STAGES, *CLASSIFIERS]}, "stages": tables})
    place.drop_many(range(2))
    assert place.run_once().returncode == 0
    first = place.sidecar("00000.ppm")
    place.configure({"stages": {"classifier_safety": {"options": {"salt": 1}}}})
    assert place.command("redo", "--stale").returncode == 0
    with Daemon(place) as daemon:
        daemon.wait_idle(2)
        counts = {name: daemon.metric("visiond_stage_images_total", stage=name) for name in CLASSIFIERS}
    assert counts == {"classifier_rating": 0, "classifier_safety": 2}
    again = place.sidecar("00000.ppm")
    changed = {name for name in again["models"] if again["models"][name] != first["models"][name]}
    assert changed == {"classifier_safety"}
    assert again["classifier_safety"] != first["classifier_safety"]
    assert again["classifier_rating"] == first["classifier_rating"]
