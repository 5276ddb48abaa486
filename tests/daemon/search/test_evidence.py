"""Images ordered by what disagrees, from real ledgers and labels."""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import daemon.search.evidence
from daemon.core.errors import LedgerUnusable
from daemon.core.labels import Kind, Label, ObjectLabel
from daemon.core.messages import Output
from daemon.labels.store import LabelStore
from daemon.search.disagreement import measure
from daemon.search.evidence import (
    BLOCK,
    NAMES,
    Columns,
    Evidence,
    Ranking,
    list_orders,
    parse_order,
    write,
    write_all,
)
from daemon.search.opening import keep_up_to_date
from daemon.search.query import parse
from daemon.search.searcher import Found
from tests.daemon.search.place import Place
from tests.daemon.search.test_disagreement import objects, tags
from tests.daemon_process import until
from tests.makers import make_record


def test_another_model_is_not_said_to_be_a_former_one_as_it_may_only_have_been_tried() -> None:
    said = Evidence("models", "yolo", 0.5).sentence
    assert said == "this model and a former or tried one differ: objects, 0.50"


def look(place: Place, order: str = "disagreement", query: str = "", **options: Any) -> Found:
    place.search.catch_up()
    return place.search.disagreeing(parse(query), order, **options)


def images(place: Place, order: str = "disagreement", query: str = "", **options: Any) -> list[int]:
    return [hit.image for hit in look(place, order, query, **options).hits]


def caption(text: str, similarity: float | None = None) -> dict[str, Any]:
    return {"text": text, "similarity": similarity}


def digest_of(name: str, size: int = 3) -> bytes:
    """Of an image of `Place`."""
    return hashlib.sha256(name.encode() + bytes([size])).digest()


def say(place: Place, origin: str = "me", **captions: str) -> None:
    said = [(digest_of(f"{name}.jpg"), Kind.CAPTION, [text], origin) for name, text in captions.items()]
    LabelStore(place.state).keep(said)


def test_an_order_names_a_signal_a_stage_or_both_in_any_order() -> None:
    assert parse_order("disagreement") == NAMES
    assert (
        parse_order("disagreement:yolo:labels") == parse_order("disagreement:labels:yolo") == ("labels:yolo",)
    )
    assert {*(parse_order("disagreement:scores") or ())} == {
        name for name in NAMES if name.startswith("scores:")
    }
    assert [
        parse_order(each) for each in ("disagreement:dogs", "newest", "disagreement:labels:looks", "")
    ] == [None] * 4
    assert all(map(parse_order, list_orders()))


def test_what_disagrees_most_comes_first_and_says_what_it_is(place: Place) -> None:
    for number, similarity in enumerate((0.9, 0.1, 0.5)):
        place.add(f"{number}.jpg", "text", blip=caption("a dog", similarity))
    found = look(place, "disagreement:scores:blip")
    assert [hit.image for hit in found.hits] == [2, 3, 1]
    assert (evidence := found.hits[0].evidence)
    assert evidence == Evidence("scores", "blip", evidence.score)
    assert evidence.score == pytest.approx(0.9, abs=0.003)
    assert images(place, "disagreement:labels") == [], "nobody has labelled anything"


def test_a_filter_and_words_narrow_the_order_and_a_page_goes_on(place: Place) -> None:
    for number in range(6):
        place.add(f"{number}.jpg", "odd" if number % 2 else "even", blip=caption("a dog", 0.1 * number))
    assert images(place, "disagreement:scores:blip", "odd") == [2, 4, 6]
    assert images(place, "disagreement:scores:blip", "-odd state:done") == [1, 3, 5]
    first = look(place, "disagreement:scores:blip", limit=2)
    rest = look(place, "disagreement:scores:blip", skip=first.following, limit=9)
    assert [hit.image for hit in (*first.hits, *rest.hits)] == [1, 2, 3, 4, 5, 6]
    assert rest.following == 0


def test_of_an_image_that_was_published_again_only_the_present_answers_count(place: Place) -> None:
    place.add("0.jpg", "text", blip=caption("a dog", 0.1))
    place.add("1.jpg", "text", blip=caption("a dog", 0.5))
    assert images(place, "disagreement:scores:blip") == [1, 2]
    place.begin_with("blip-2", "blip")
    place.put_back(1)
    place.annotate("text", blip=caption("a dog", 0.9))
    assert images(place, "disagreement:scores:blip") == [2, 1]


def test_the_answers_of_two_models_are_compared_after_a_redo(place: Place) -> None:
    for name in ("0.jpg", "1.jpg"):
        place.add(name, "text", blip=caption("a dog on a lawn"))
    assert images(place, "disagreement:models") == []
    place.begin_with("blip-2", "blip")
    place.put_back(1)
    place.annotate("text", blip=caption("a ship at sea"))
    place.put_back(2)
    place.annotate("text", blip=caption("a dog on a lawn"))
    assert images(place, "disagreement:models") == [1], "of the other both models say the same"


def test_labels_count_that_come_change_and_go_after_the_image(place: Place) -> None:
    for name in ("a", "b", "c"):
        place.add(f"{name}.jpg", "text", blip=caption("a dog on a lawn"))
    assert images(place, "disagreement:labels") == []
    say(place, a="a dog on a lawn", b="a ship at sea", c="a dog at sea")
    assert images(place, "disagreement:labels") == [2, 3]
    say(place, b="a dog on a lawn", c="the night")
    assert images(place, "disagreement:labels") == [3]
    say(place, "others", a="something else")
    LabelStore(place.state).forget("me")
    assert images(place, "disagreement:labels") == [1]
    place.state.joinpath("labels.sqlite").unlink()
    assert images(place, "disagreement:labels") == []


@pytest.mark.anyio
async def test_the_page_measures_new_labels_before_anybody_searches(place: Place) -> None:
    place.add("a.jpg", "text", blip=caption("a dog on a lawn"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_up_to_date, place.search)
        await until(lambda: place.search.behind() == 0)
        say(place, a="a ship at sea")
        await until(lambda: "labels:blip" in place.search.index.evidence_in(NAMES).values)
        tasks.cancel_scope.cancel()
    assert [hit.image for hit in place.search.disagreeing(parse(""), "disagreement:labels").hits] == [1]


def test_labels_that_are_there_before_the_image_count_too(place: Place) -> None:
    say(place, a="a ship at sea")
    place.add("a.jpg", "text", blip=caption("a dog on a lawn"))
    assert images(place, "disagreement:labels") == [1]


def test_labels_that_a_disk_did_not_give_once_are_measured_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(place, a="a ship at sea")
    assert images(place, "disagreement:labels") == [], "its labels are known"
    place.add("a.jpg", "text", blip=caption("a dog on a lawn"))

    def fail(store: LabelStore) -> None:
        raise LedgerUnusable("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(LabelStore, "_open", fail)
        assert look(place, "disagreement:labels").hits == []
    assert images(place, "disagreement:labels") == [1]


def test_labels_that_cannot_be_read_stop_no_search_and_are_measured_later(place: Place) -> None:
    file = place.state / "labels.sqlite"
    say(place, a="a ship at sea")
    assert images(place, "disagreement:labels") == [], "its labels are known"
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + b"damaged!" * 600)
    place.add("a.jpg", "text", blip=caption("a dog on a lawn"))
    found = look(place, "disagreement:labels")
    assert found.hits == []
    assert "labels.sqlite is damaged" in found.problem
    assert place.find("text") == [1]
    file.write_bytes(whole)
    assert images(place, "disagreement:labels") == [1]


def test_nothing_is_left_of_the_images_of_a_ledger_that_a_backup_has_replaced(
    place: Place, tmp_path: Path
) -> None:
    place.add("a.jpg", "text", blip=caption("a dog"))
    (tmp_path / "copy").mkdir()
    place.reader.back_up(tmp_path / "copy" / "ledger.sqlite")
    place.add("b.jpg", "text", blip=caption("a dog", 0.1))
    assert images(place, "disagreement:scores:blip") == [2]
    shutil.copytree(tmp_path / "search", tmp_path / "copy" / "search")
    with closing(Place(tmp_path / "copy")) as restored:
        restored.add("c.jpg", "text", blip=caption("a dog"))
        assert images(restored, "disagreement:scores:blip") == []


def make_columns(**values: Mapping[int, int]) -> Columns:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE evidence (name, block, part, PRIMARY KEY (name, block))")
        for name, some in values.items():
            write(connection, name.replace("_", ":"), some)
        return Columns.read(connection, NAMES)


def test_a_rare_score_counts_for_more_than_a_high_one_that_all_have() -> None:
    usual = dict.fromkeys(range(100), 250)
    ranking = Ranking(
        make_columns(scores_clip=usual, scores_ocr={number: 100 * (number == 7) + 2 for number in range(100)})
    )
    places = next(ranking.in_order(1))
    assert next(iter(places)) == 7
    assert ranking.evidence_at(places[7]).stage == "ocr"


def test_of_equally_rare_scores_those_against_a_person_come_first() -> None:
    some = {number: 2 + number % 100 for number in range(100)}
    other = {number: 2 + (number + 50) % 100 for number in range(100)}
    ranking = Ranking(make_columns(scores_clip=some, labels_yolo=other))
    signals = [ranking.evidence_at(at).signal for part in ranking.in_order(99) for at in part.values()]
    assert signals[:20] == ["labels"] * 20
    assert "scores" in signals


def test_images_in_which_nothing_disagrees_are_not_in_the_order_and_the_newest_of_equals_is_first() -> None:
    far = 3 * BLOCK + 5
    [found] = Ranking(make_columns(labels_yolo={1: 1, 2: 9, 3: 9, far: 9, far + 1: 1})).in_order(10)
    assert [*found] == [far, 3, 2]
    allowed = np.packbits(np.arange(8) == 3, bitorder="little")
    [found] = Ranking(make_columns(labels_yolo={2: 9, 3: 9, far: 9})).in_order(10, allowed)
    assert [*found] == [3]


def test_an_order_has_each_image_once_however_few_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.search.evidence, "PART", 5)
    chance = random.Random(1)
    ranking = Ranking(
        make_columns(
            **{n: {k: chance.randrange(256) for k in range(300)} for n in ("scores_clip", "labels_yolo")}
        )
    )
    whole, few = ([n for part in ranking.in_order(count) for n in part] for count in (1 << 62, 1))
    assert whole == few
    assert len({*whole}) == len(whole) > 290


SCENES = 1000
LABELS = ("dog", "cat", "boat", "car", "tree", "cup", "fish", "bird")


def make_scene(chance: random.Random) -> tuple[dict[str, Any], dict[Kind, Any]]:
    """Answers that are right, as far as models are, and what a person would say."""
    named = [chance.choice(LABELS) for _ in range(chance.randint(1, 4))]
    boxes = [
        (x := 100.0 * at, y := 300 * chance.random(), x + 50 + 40 * chance.random(), y + 60)
        for at, _ in enumerate(named)
    ]
    found = [[side + chance.gauss(0, 2) for side in box] for box in boxes]
    words = [
        chance.choice(("total", "invoice", "street", "number", "please", "17", "4.50")) for _ in range(8)
    ]
    read = "".join(chance.choice("aeiou") if chance.random() < 0.03 else letter for letter in " ".join(words))
    sure = chance.uniform(0.4, 0.95)
    others = [label for label in LABELS if label not in named]
    answers = {
        "yolo": objects(
            *[(n, chance.uniform(0.4, 0.98), tuple(b)) for n, b in zip(named, found, strict=True)]
        ),
        "ocr": {"lines": [{"text": read, "score": chance.uniform(0.6, 1)}], "text": None},
        "clip": tags(**{named[0]: sure, others[0]: (1 - sure) / 2, others[1]: (1 - sure) / 4}),
        "blip": {
            "text": f"{chance.choice(('a', 'the'))} {named[0]} on a lawn",
            "similarity": chance.uniform(0.2, 0.35),
        },
    }
    said = {
        Kind.OBJECTS: [ObjectLabel(n, b) for n, b in zip(named, boxes, strict=True)],
        Kind.TEXT: " ".join(words),
        Kind.TAGS: [named[0]],
        Kind.CAPTION: [f"a {named[0]} on a lawn"],
    }
    return answers, said


def plant(answers: dict[str, Any], number: int) -> None:
    """An error of one of four kinds."""
    match number % 4:
        case 0:
            box = answers["yolo"]["detections"][0]
            box["label"] = LABELS[LABELS.index(box["label"]) - 1]
        case 1:
            answers["ocr"]["lines"] = []
        case 2:
            answers["blip"]["text"] = "an empty street at night"
        case 3:
            shown = answers["clip"]["tags"]
            shown[0]["label"], shown[1]["label"] = shown[1]["label"], shown[0]["label"]


@pytest.mark.parametrize("seed", range(3))
def test_of_planted_errors_in_one_of_a_hundred_images_the_first_two_hundredths_have_four_of_five(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    planted, scores = {*chance.sample(range(SCENES), SCENES // 100)}, {}
    for number in range(SCENES):
        answers, said = make_scene(chance)
        if number in planted:
            plant(answers, sorted(planted).index(number))
        outputs = {stage: Output(msgspec.json.encode(answer), 0.1) for stage, answer in answers.items()}
        record = replace(make_record(tmp_path), outputs=outputs)
        scores[number] = measure(record, {}, {kind: Label(value, "me", 1.0) for kind, value in said.items()})
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE evidence (name, block, part, PRIMARY KEY (name, block))")
        write_all(connection, scores)
        ranked = Ranking(Columns.read(connection, NAMES)).in_order(SCENES)
    found = {*[number for part in ranked for number in part][: SCENES // 50]}
    assert len(found & planted) >= 0.8 * len(planted)
