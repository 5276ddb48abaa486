"""The search by meaning, with the text encoder of the mini pack in its real process."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.core.errors import SearchUnusable
from daemon.search import searcher
from daemon.search.encoder import EncoderProcess
from daemon.search.index import SQL
from daemon.search.query import parse
from daemon.search.searcher import By, Hit
from stages.clip.descriptor import TOWERS
from stages.clip.embeddings import TextEncoder
from stages.contract.base import StageSpec
from stages.pretrained.checkpoints import load_known
from stages.weights.packs import MINI
from tests.daemon.search.place import Place
from tests.daemon_process import PATIENCE

MODEL = MINI / "clip"
SENTENCES = ("a red circle", "a page of text", "two blue squares")


@pytest.fixture(scope="module")
def embedded() -> list[Any]:
    """The sentences' own embeddings, as if they were those of three images."""
    with torch.inference_mode():
        encoder = TextEncoder(load_known(TOWERS, str(MODEL), torch.float32, "cpu"), str(MODEL))
        vectors = encoder.embed_texts(SENTENCES)
    encoded = [base64.b64encode(each.numpy().astype("<f2").tobytes()).decode() for each in vectors]
    return [{"dim": vectors.shape[1], "dtype": "float16", "base64": each} for each in encoded]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A link to the model, which a test can take away."""
    link = tmp_path_factory.mktemp("models") / "clip"
    link.symlink_to(MODEL)
    return link


@pytest.fixture(scope="module")
def spec(model: Path) -> StageSpec:
    return StageSpec("clip", "transformers", {"model": str(model)}, "clip-1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, embedded: list[Any], spec: StageSpec) -> Iterator[Place]:
    with closing(Place(tmp_path_factory.mktemp("state"), spec)) as opened:
        for number, embedding in enumerate(embedded):
            opened.add(f"{number}.jpg", f"number{number}", clip={"embedding": embedding, "tags": []})
        opened.search.catch_up()
        yield opened


# These two come first: afterwards the process has loaded the model, which takes longest.


def test_a_process_that_was_killed_is_started_again(place: Place) -> None:
    encoder = place.search._encoder
    assert encoder is not None
    assert place.search.like(1).hits
    assert encoder._child is not None
    os.kill(encoder._child.pid, signal.SIGKILL)
    assert place.search.like(1).hits


def test_a_model_that_is_away_is_named_and_used_once_it_is_back(place: Place, model: Path) -> None:
    away = model.rename(model.with_name("away"))
    with pytest.raises(SearchUnusable, match="sentences cannot be compared with images"):
        place.search.best(parse("a circle"), By.meaning)
    away.rename(model)
    assert place.search.best(parse("a circle"), By.meaning).hits


def test_near_duplicates_are_found_by_meaning_however_many_images_are_nearer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "BEST", 1)
    with place.search.index.lend() as connection:
        for image, at in ((2, 0), (3, 1)):
            connection.execute(SQL["add_duplicate"], (image, image, 0, at, 1.0))
    try:
        for query, images in (("group:2", [2]), ("group:others", [3]), ("group:best", [1])):
            found = place.search.best(parse(f"a red circle {query}"), By.meaning)
            assert [hit.image for hit in found.hits] == images
    finally:
        with place.search.index.lend() as connection:
            connection.execute(SQL["drop_duplicates"])


def test_that_no_image_has_a_result_is_said_rather_than_that_results_are_stale(
    tmp_path: Path, model: Path
) -> None:
    changed = StageSpec("clip", "transformers", {"model": str(model)}, "clip-2")
    with closing(Place(tmp_path, changed)) as empty:
        assert empty.search.best(parse("a circle")).problem.startswith("no image has a result yet")
        empty.add("a.jpg", "word")
        empty.search.catch_up()
        assert "redo --stale" in empty.search.best(parse("a circle")).problem


def test_a_sentence_finds_the_image_that_shows_it(place: Place) -> None:
    for image, sentence in enumerate(SENTENCES, 1):
        best = place.search.best(parse(sentence), By.meaning).hits[0]
        assert (best.image, best.score) == pytest.approx((image, 1), abs=1e-3)


def test_filters_and_words_in_one_field_narrow_what_a_sentence_finds(place: Place) -> None:
    found = place.search.best(parse(f"{SENTENCES[0]} text:number1"), By.meaning).hits
    assert [hit.image for hit in found] == [2]


def test_each_image_says_how_it_was_found_and_what_both_ways_have_found_comes_first(place: Place) -> None:
    best, *others = place.search.best(parse("number1")).hits
    assert (best.image, best.by) == (2, By.both)
    assert {hit.by for hit in others} == {By.meaning}
    assert [hit.by for hit in place.search.best(parse("number1"), By.words).hits] == [By.words]
    assert [hit.by for hit in place.search.newest(parse("number1")).hits] == [By.words]
    assert {hit.by for hit in place.search.newest(parse("state:done")).hits} == {None}


@pytest.fixture
def changing(tmp_path: Path, embedded: list[Any], place: Place, spec: StageSpec) -> Iterator[Place]:
    """A state folder of its own, which is changed. The process with the model is that of the others."""
    with closing(Place(tmp_path, spec)) as opened:
        assert opened.search._encoder
        opened.search._encoder.close()
        opened.search._encoder = place.search._encoder
        for number, embedding in enumerate(embedded):
            opened.add(f"{number}.jpg", f"number{number}", clip={"embedding": embedding, "tags": []})
        opened.search.catch_up()
        yield opened
        opened.search._encoder = None


def test_images_that_were_redone_do_not_hide_others_that_fit(
    changing: Place, embedded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries of earlier results are nearer than the other images, and as many as are ever asked for."""
    for _ in range(9):
        changing.put_back(1)
        changing.annotate("number0", clip={"embedding": embedded[0], "tags": []})
        changing.search.catch_up()
    monkeypatch.setattr(searcher, "MOST_ASKED", 4)
    monkeypatch.setattr(searcher, "BEST", 2)
    for query in (SENTENCES[0], f"{SENTENCES[0]} bin:A"):
        found = changing.search.best(parse(query), By.meaning).hits
        assert len(found) == 2
        assert found[0].image == 1


def test_a_filter_that_was_asked_before_also_finds_what_came_since(
    changing: Place, embedded: list[Any]
) -> None:
    query = parse(f"{SENTENCES[0]} text:new -number7")
    assert not changing.search.best(query, By.meaning).hits
    changing.add("new.jpg", "new", clip={"embedding": embedded[1], "tags": []})
    changing.add("other.jpg", "new number7", clip={"embedding": embedded[0], "tags": []})
    changing.search.catch_up()
    assert [hit.image for hit in changing.search.best(query, By.meaning).hits] == [4]


def test_an_image_that_both_searches_find_comes_first(place: Place) -> None:
    assert place.search.best(parse("number2")).hits[0].image == 3


def test_words_are_looked_for_while_the_process_looks_for_the_meaning(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE)

    def meeting(work: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_work(*given: Any) -> Any:
            both.wait()
            return work(*given)

        return wait_and_work

    monkeypatch.setattr(place.search.index, "best", meeting(place.search.index.best))
    monkeypatch.setattr(EncoderProcess, "ask", meeting(EncoderProcess.ask))
    assert place.search.best(parse(SENTENCES[0])).hits[0].image == 1


def test_more_like_an_image_leaves_itself_out(place: Place) -> None:
    found = place.search.like(1).hits
    assert sorted(hit.image for hit in found) == [2, 3]
    assert found == sorted(found, key=lambda hit: -(hit.score or 0))
    assert place.search.like(77).hits == list[Hit]()
