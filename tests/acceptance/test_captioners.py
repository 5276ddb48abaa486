"""Two captions more beside those of the fake captioner: one small chat model, asked with two prompts."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from PIL import Image

from daemon.core.sidecar import json_schema, parse_sidecar
from tests.daemon_process import PATIENCE, STAGES, Daemon, Place
from tests.stages.blip import stock
from tests.stages.captioners import CAPTIONERS
from tests.stages.pictures import draw_image

PROMPTS = {"blip_alt": "What does the image describe ?", "blip_long": "Describe this photo ."}
LISTENS = {"listen": "127.0.0.1:0"}
RULE = """def choose(record):
    return "long" if len(record["blip_long"]["text"]) > 3 and record["caption"]["text"] else "rest"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """It has processed an image."""
    folder = tmp_path_factory.mktemp("captioners")
    CAPTIONERS["qwen2_vl"](folder / "chat")
    tables: dict[str, Any] = {
        name: {"model": "./chat", "options": {"prompt": prompt, "max_new_tokens": stock.NEW_TOKENS}}
        for name, prompt in PROMPTS.items()
    }
    settings = {
        "pipeline": {"stages": [*PROMPTS, *STAGES]},
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
    place.drop("a.png", (folder / "a.png").read_bytes())
    environment = {"PYTHONPATH": str(folder)}  # the rule's module is there
    with Daemon(place, ready=False, environment=environment) as daemon:
        daemon.wait_ready(5 * PATIENCE)
        daemon.wait_idle(1, 5 * PATIENCE)
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


def test_each_has_its_place_in_the_sidecar_after_the_results_that_there_were(place: Place) -> None:
    document = place.sidecar("a.png")
    assert document["caption"]["text"].startswith("a picture of")
    keys = ["ocr", "objects", "clip", "caption", *PROMPTS, "bin"]
    assert [key for key in document if key in keys] == keys
    assert list(document["models"]) == [*STAGES, *PROMPTS]
    assert document["provenance"]["blip_alt"]["options"]["prompt"] == PROMPTS["blip_alt"]
    assert document["bin"]["name"] == "long"


def test_the_published_schema_has_them(place: Place) -> None:
    patterns = json.loads(json_schema())["$defs"]["Sidecar"]["patternProperties"]
    found = [kind for pattern, kind in patterns.items() if re.search(pattern, "blip_alt")]
    assert found == [{"$ref": "#/$defs/Caption"}]


def test_a_sidecar_with_something_else_in_the_place_of_a_caption_is_refused(place: Place) -> None:
    document = place.sidecar("a.png")
    parse_sidecar(json.dumps(document).encode())
    with pytest.raises(ValueError, match="Expected"):
        parse_sidecar(json.dumps(document | {"blip_alt": {"text": 3}}).encode())


def test_show_and_exports_have_them(place: Place, texts: dict[str, str]) -> None:
    shown = " ".join(place.command("show", "a.png").stdout.split())
    assert all(f"{name} {text}" in shown for name, text in texts.items())
    [row] = csv.DictReader(io.StringIO(place.command("export", "-").stdout))
    assert {name: row[f"{name}_text"] for name in PROMPTS} == texts
    assert row["caption"].startswith("a picture of")
    assert place.command("export", "coco", "--format", "coco").returncode == 0
    captions = json.loads((place.folder / "coco" / "captions.json").read_bytes())["annotations"]
    told = [(each["captioner"], each["caption"]) for each in captions]
    assert told == [("blip", row["caption"]), *texts.items()]
    assert place.command("export", "captions", "--format", "captions").returncode == 0
    assert (place.folder / "captions" / "a.txt").read_text() == f"{row['caption']}\n"


def test_the_page_shows_them_and_finds_images_by_their_words(daemon: Daemon, texts: dict[str, str]) -> None:
    word = min({*texts["blip_long"].split()} - {*texts["blip_alt"].split(), "a"})
    address = daemon.wait_event("page")["address"]
    with urlopen(f"{address}/images/1") as answer:
        shown = answer.read().decode()
    found = daemon.place.command("search", f"caption:{word}").stdout
    with urlopen(f"{address}/?q=caption:{word}") as answer:
        listed = answer.read().decode()
    for name, text in texts.items():
        assert f'<th scope="row">{name}</th><td dir="auto">{text}</td>' in shown
    assert "a.png" in found
    assert "Has the words in its further captions." in listed
    assert f"<mark>{word}</mark>" in listed
