"""The least probability of a search by meaning, with small models: SigLIP 2 in its real process, and others in this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
from typer.testing import CliRunner

from daemon.cli.commands import app
from daemon.config.loading import parse as parse_config
from daemon.search.child import Comparer
from daemon.search.encoder import Answer, Ask, EncoderProcess
from daemon.search.opening import make_searcher
from daemon.search.query import parse
from daemon.search.searcher import UNCUT, By, Found, Hit, Searcher
from stages.clip.descriptor import Clip
from stages.contract.base import Image, StageSpec
from stages.registry.registry import build
from stages.weights.packs import MINI, open_pack, resolve
from tests.daemon.search.place import Place
from tests.stages import checkpoints
from tests.stages.pictures import draw_image

SENTENCE = "two blue tree"
SCALE, BIAS = 20.0, -3.0  # so that the probabilities of these images differ by much


@pytest.fixture(scope="module")
def images() -> list[Image]:
    return [draw_image(60 + 20 * number, 200 - 20 * number) for number in range(6)]


def make_spec(kind: str, folder: Path) -> StageSpec:
    """Of a small model of this type, with another scale and bias than all new ones have."""
    checkpoints.TOWERS[kind](folder)
    model = AutoModel.from_pretrained(folder)
    model.logit_scale.data.fill_(torch.tensor(SCALE).log())
    model.logit_bias.data.fill_(BIAS)
    model.save_pretrained(folder)
    return read_spec(folder)


def read_spec(pack: Path) -> StageSpec:
    return resolve(open_pack(pack, pack.parent), "clip", {"batch_size": 6, "options": {"labels": []}})


def embed(spec: StageSpec, images: list[Image]) -> list[Clip]:
    stage = build(spec, "cpu")
    stage.load()
    answers = stage.run(images)
    assert all(isinstance(answer, Clip) for answer in answers)
    return answers  # type: ignore[return-value]


def stock_probabilities(folder: str, images: list[Image]) -> list[float]:
    """What transformers' own model says of each image and the sentence."""
    kinds: Any = (AutoModel, AutoTokenizer, AutoImageProcessor)
    model, tokenizer, processor = (kind.from_pretrained(folder) for kind in kinds)
    tokens = tokenizer([SENTENCE], padding="max_length", max_length=16, return_tensors="pt")
    with torch.inference_mode():
        logits = [
            model(**tokens, **processor(images=[image.pixels], return_tensors="pt")).logits_per_image
            for image in images
        ]
    return torch.cat(logits)[:, 0].sigmoid().tolist()


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageSpec:
    return make_spec(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def known(spec: StageSpec, images: list[Image]) -> list[float]:
    return stock_probabilities(spec.files["model"], images)


class EncoderHere(EncoderProcess):
    """Does in this process what the child does."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self._comparer = Comparer(spec)

    def _ask_child(self, question: Ask) -> Answer:
        return self._comparer.answer(question)


@contextmanager
def filled(
    state: Path,
    spec: StageSpec,
    images: list[Image],
    least: float,
    encoder: type[EncoderProcess] = EncoderHere,
) -> Iterator[Place]:
    """A search of these images, with the fingerprint by which the place's ledger knows the embeddings."""
    spec = msgspec.structs.replace(spec, fingerprint="clip-1")
    with closing(Place(state, spec, least)) as place:
        place.search._encoder = encoder(spec)
        for number, answer in enumerate(embed(spec, images)):
            place.add(f"{number}.jpg", f"number{number}", clip=msgspec.to_builtins(answer))
        place.search.catch_up()
        yield place


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, spec: StageSpec, images: list[Image], known: list[float]
) -> Iterator[Place]:
    """The least probability is between those of the third and the fourth image."""
    third, fourth = sorted(known)[-3], sorted(known)[-4]
    assert third > 1.1 * fourth, "they must differ"
    encoder = EncoderProcess if spec.files["model"].endswith("siglip2") else EncoderHere
    least = (third * fourth) ** 0.5
    with filled(tmp_path_factory.mktemp("state"), spec, images, least, encoder) as opened:
        yield opened


def test_siglips_probabilities_are_those_of_transformers_and_images_below_the_least_are_not_found(
    place: Place, known: list[float]
) -> None:
    found = place.search.best(parse(SENTENCE), By.meaning)
    best = {1 + number: chance for number, chance in enumerate(known) if chance in sorted(known)[-3:]}
    assert {hit.image: hit.probability for hit in found.hits} == pytest.approx(best, rel=0.02)
    assert not found.is_uncut
    assert place.search.best(parse(SENTENCE), By.meaning, limit=2).following == 2
    assert place.search.best(parse(SENTENCE), By.meaning, skip=2, limit=1).following == 0, (
        "no fourth is counted"
    )


def test_a_filter_does_not_bring_back_what_does_not_fit(place: Place, known: list[float]) -> None:
    name = f"name:{known.index(min(known))}.jpg"
    assert place.search.newest(parse(name)).hits
    assert not place.search.best(parse(f"{SENTENCE} {name}"), By.meaning).hits


def test_without_a_least_probability_all_images_are_ranked(
    place: Place, known: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.search, "_least", 0.0)
    found = place.search.best(parse(SENTENCE), By.meaning)
    assert [hit.image for hit in found.hits] == sorted(range(1, 7), key=lambda image: -known[image - 1])
    assert found.is_uncut


def test_images_that_are_like_another_have_no_probability_and_are_all_ranked(place: Place) -> None:
    assert [hit.probability for hit in place.search.like(1).hits] == 5 * [None]


def test_the_configuration_says_the_least_probability(place: Place, tmp_path: Path) -> None:
    stages = {"clip": {"backend": "fake"}}
    settings = {
        "state": {"path": str(place.state)},
        "search": {"probability_threshold": 0.25},
        "stages": stages,
    }
    with closing(make_searcher(parse_config(settings, tmp_path), place.reader)) as found:
        assert found._least == 0.25


@pytest.mark.parametrize("is_uncut", [True, False])
def test_the_command_says_that_all_images_are_ranked(
    is_uncut: bool, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit = Hit(1, 1, 0.9, By.meaning, None if is_uncut else 0.25)
    monkeypatch.setattr(Searcher, "best", lambda *_, **__: Found([hit], is_uncut=is_uncut))
    file = tmp_path / "daemon.toml"
    file.write_text(f'[state]\npath = "{place.state}"\n[stages]\nclip.backend = "fake"\n')
    command = ["search", "cars", "--config", str(file)]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    assert (UNCUT in answer.stderr.replace("\n", " ")) == is_uncut
    [found] = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["probability"] == hit.probability


def test_what_has_the_words_is_found_however_improbable_its_picture(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.search, "_least", 1.0)
    [hit] = place.search.best(parse("number0")).hits
    assert (hit.image, hit.by, hit.probability) == (1, By.words, None)


def test_clip_has_no_least_probability_and_says_so(tmp_path: Path, images: list[Image]) -> None:
    with filled(tmp_path, read_spec(MINI), images, 0.9) as place:
        found = place.search.best(parse(SENTENCE), By.meaning)
        assert [hit.probability for hit in found.hits] == 6 * [None]
        assert found.is_uncut
        assert not place.search.best(parse("number0"), By.words).is_uncut
