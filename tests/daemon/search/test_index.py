"""The index of words, made from real ledgers."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from daemon.core.errors import SearchUnusable
from daemon.search import index, searcher
from daemon.search.following import NumberUnknown, encode_events
from daemon.search.index import Index, check_ledger
from daemon.search.query import parse
from daemon.search.searcher import By, Searcher
from tests.daemon.search.place import Place


def test_images_are_found_by_all_words_on_them_newest_first(place: Place) -> None:
    place.add("a.jpg", "Invoice 17\nCafé")
    place.add("b.jpg", "an INVOICE, total")
    assert place.find("invoice") == [2, 1]
    assert place.find("invoice cafe") == [1]
    assert place.find("invoice -total") == [1]
    assert place.find('"17 invoice"') == []
    assert place.find("inv*") == [2, 1]
    assert place.find("caption:invoice") == []
    assert place.find("name:b.jpg") == [2]


def test_a_part_of_a_sentence_without_spaces_is_found(place: Place) -> None:
    place.add("a.jpg", "电子发票金额")
    place.add("b.jpg", "票发")
    assert place.find("发票") == [1]


def test_filters_ask_for_bins_tags_objects_states_and_days(place: Place) -> None:
    tags = [{"label": "sports car", "score": 0.9}, {"label": "dog", "score": 0.01}]
    clip = {"embedding": {"dim": 2, "dtype": "float16", "base64": "AAAAPA=="}, "tags": tags}
    place.add("a.jpg", "x", clip=clip)
    place.add("b.jpg")
    assert place.find("tag:dog") == []
    assert place.find('tag:"sports car"') == [1]
    assert place.find("inbox:/srv/inbox") == [2, 1]
    assert place.find("state:failed") == [2]
    assert place.find("before:2020-01-01") == []
    assert place.find(f"bin:{place.reader.find_numbers([1])[0].bin}") == [1]


def test_only_the_present_result_of_the_present_version_is_found(place: Place) -> None:
    place.add("a.jpg", "first")
    place.add("b.jpg", "other")
    assert place.find("first") == [1]
    place.add("a.jpg", "second", size=4)
    assert place.find("first") == []
    place.put_back(2)
    assert place.find("other") == [2], "an image that waits for a new result still has its old one"
    place.annotate("the same bytes have the same text")
    assert place.find("other") == [2]
    assert place.find("") == [2, 3]


def test_a_page_goes_on_where_the_last_one_ended_although_images_came_since(place: Place) -> None:
    for number in range(5):
        place.add(f"{number}.jpg", "word")
    place.search.catch_up()
    for text in ("word", ""):
        first = place.search.newest(parse(text), limit=2)
        place.add(f"{text}new.jpg", "word")
        place.search.catch_up()
        rest = place.search.newest(parse(text), first.following, 9)
        assert [hit.image for hit in (*first.hits, *rest.hits)][-4:] == [4, 3, 2, 1]
        assert rest.following == 0


def test_who_searches_waits_for_another_that_adds_a_few_images_and_not_for_one_that_adds_many(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("a.jpg", "word")
    begun, go_on = threading.Event(), threading.Event()

    def note(_place: int, _last: int) -> None:
        begun.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(place.search.catch_up, note)
        assert begun.wait(60)
        place.add("b.jpg", "word")
        with monkeypatch.context() as many:
            many.setattr(searcher, "FEW", 0)
            assert place.find("word") == [1]
        searching = pool.submit(place.find, "word")
        assert not wait([searching], timeout=0.2).done
        go_on.set()
        assert searching.result() == [2, 1]
        assert adding.result() == 2


def test_the_index_is_made_again_after_a_backup_was_restored(place: Place, tmp_path: Path) -> None:
    place.add("a.jpg", "before")
    (tmp_path / "copy").mkdir()
    place.reader.back_up(tmp_path / "copy" / "ledger.sqlite")
    place.add("b.jpg", "lost")
    place.search.catch_up()
    shutil.copytree(tmp_path / "search", tmp_path / "copy" / "search")
    with closing(Place(tmp_path / "copy")) as restored:
        restored.add("c.jpg", "after")
        found = [restored.find(word) for word in ("lost", "before", "after")]
        assert found == [[], [1], [2]], "number 2 was given twice"


def test_an_index_that_is_damaged_is_made_again(place: Place, tmp_path: Path) -> None:
    place.add("a.jpg", "word")
    place.find("word")
    place.search.close()
    for file in (tmp_path / "search").glob("index.sqlite*"):
        file.write_bytes(b"no database at all" * 100)
    place.search = Searcher(tmp_path, place.reader, None)
    assert place.find("word") == [1]


def test_two_processes_may_bring_the_index_up_to_date(place: Place, tmp_path: Path) -> None:
    other = Index(tmp_path / "search")
    for number in range(3):
        place.add(f"{number}.jpg", "word")
        (other if number % 2 else place.search.index).catch_up(place.reader)
    other.close()
    assert place.find("word") == [3, 2, 1]
    assert place.search.index.about().entries == 3


def test_after_a_redo_of_all_images_the_index_drops_what_is_no_longer_shown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MOST_STALE", 1)
    place.add("a.jpg", "word")
    place.find("word")
    for _ in range(4):
        place.put_back(1)
        place.annotate("word")
        place.search.index.catch_up(place.reader)
    assert place.search.index.about().entries == 5
    place.search.index._looked_at = -index.LOOK_SECONDS
    assert place.find("word") == [1]
    assert place.search.index.about().entries == 1


def test_an_index_of_an_earlier_version_is_made_again_and_has_no_signs(place: Place, tmp_path: Path) -> None:
    sign = {"text": "OVO", "score": 0.58, "box": [[0, 0], [1, 0], [1, 1], [0, 1]]}
    place.add("a.jpg", "word", ocr={"lines": [sign], "count": 1, "area_ratio": 0.1})
    place.add("b.jpg", "word")
    place.find("word")
    place.search.close()
    with closing(sqlite3.connect(tmp_path / "search" / "index.sqlite")) as connection:
        connection.execute("DROP TABLE entry")
        connection.execute(f"PRAGMA user_version = {index.VERSION - 1}")
    place.search = Searcher(tmp_path, place.reader, None)
    assert [place.find(words) for words in ("word", "OVO", "")] == [[2], [], [2, 1]]


def test_an_older_ledger_is_refused_with_what_to_do(place: Place) -> None:
    with closing(sqlite3.connect(place.ledger.path)) as connection:
        connection.execute("PRAGMA user_version = 6")
    with pytest.raises(SearchUnusable, match="Start the daemon once"):
        check_ledger(place.reader)


def test_without_a_text_encoder_the_words_alone_answer_and_say_so(place: Place) -> None:
    place.add("a.jpg", "word")
    place.search.catch_up()
    found = place.search.best(parse("word"))
    assert [hit.image for hit in found.hits] == [1]
    assert "search by words" in found.problem
    with pytest.raises(SearchUnusable, match="search by words"):
        place.search.best(parse("word"), By.meaning)


def test_the_best_images_are_found_although_most_of_the_index_is_stale(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "BEST", 2)
    place.add("a.jpg", "word")
    place.search.catch_up()
    for _ in range(9):
        place.put_back(1)
        place.annotate("word")
        place.search.catch_up()
    assert [hit.image for hit in place.search.best(parse("word"), By.words).hits] == [1]


def test_an_index_that_somebody_deletes_is_made_again(place: Place, tmp_path: Path) -> None:
    place.add("a.jpg", "word")
    assert place.find("word") == [1]
    shutil.rmtree(tmp_path / "search")
    assert place.find("word") == [1]


def test_embeddings_of_two_models_are_never_compared_with_each_other(place: Place) -> None:
    clip = {"embedding": {"dim": 2, "dtype": "float16", "base64": "AAAAPA=="}, "tags": []}
    place.add("a.jpg", "one", clip=clip)
    place.add("b.jpg", "two", clip=clip)
    place.begin_with("clip-2", "clip")
    place.add("c.jpg", "three", clip=clip)
    place.search.catch_up()
    before, after = (place.search.index.matrix(maker) for maker in ("clip-1", "clip-2"))
    assert before is not None
    assert after is not None
    assert before[0] != after[0]
    assert (before[1:], after[1:]) == ((2, 2), (1, 2)), "rows and size"


def test_images_of_a_model_that_came_later_are_found(place: Place) -> None:
    place.find("")
    place.begin_with("ocr-2")
    place.add("a.jpg", "word")
    assert place.find("word") == [1]


def test_names_and_reasons_in_scripts_without_spaces_are_found(place: Place) -> None:
    place.add("电子发票.jpg")
    assert place.find("发票") == [1]


def test_who_follows_behind_the_last_number_is_told(place: Place) -> None:
    place.add("a.jpg", "word")
    assert [number for number, _ in encode_events(place.reader, 0)[0]] == [1]
    with pytest.raises(NumberUnknown, match="has the number 1, not 2"):
        encode_events(place.reader, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_makes_belongs_to_the_owner_of_the_state_folder(tmp_path: Path) -> None:
    """Otherwise a search by root leaves an index that the daemon cannot bring up to date."""
    os.chown(tmp_path, 12345, 12346)
    with closing(Place(tmp_path)) as place:
        place.add("a.jpg", "word")
        assert place.find("word") == [1]
        made = [tmp_path / "search", *(tmp_path / "search").rglob("*")]
        assert {(file.stat().st_uid, file.stat().st_gid) for file in made} == {(12345, 12346)}
        assert {"index.sqlite", "index.sqlite-wal", "int8"} <= {file.name for file in made}
