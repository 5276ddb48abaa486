"""Files that are pending or skipped, which the index does not have, and failures by reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from daemon.core.jobs import JobStatus
from daemon.ledger.publications import LOOKED_AT, read_unpublished
from daemon.ledger.statements import SQL
from daemon.search.query import QueryError, parse
from tests.daemon.search.place import Place
from tests.makers import make_file


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path)) as place:
        place.add("done.jpg", "words")
        place.add("failed.jpg")
        place._run(place.ledger.admit([make_file(b"Link-%d.txt" % n, regular=False) for n in range(5)]))
        place._run(place.ledger.admit([make_file(b"waits-%d.jpg" % n) for n in range(3)]))
        yield place


def names(place: Place, state: str, text: str = "", **options: int) -> tuple[list[str], int]:
    found = place.search.unpublished(parse(text), state, **options)
    records = place.reader.find_numbers([hit.image for hit in found.hits])
    return [record.path.decode() for record in records], found.following


def test_pending_and_skipped_files_are_listed_newest_first(place: Place) -> None:
    assert names(place, "pending") == (["waits-2.jpg", "waits-1.jpg", "waits-0.jpg"], 0)
    assert names(place, "skipped")[0] == [f"Link-{n}.txt" for n in (4, 3, 2, 1, 0)]


def test_what_follows_goes_on_where_the_first_answer_ended(place: Place) -> None:
    first, following = names(place, "skipped", limit=2)
    second, _ = names(place, "skipped", before=following, limit=2)
    assert [*first, *second] == [f"Link-{n}.txt" for n in (4, 3, 2, 1)]


def test_words_of_the_path_narrow_them_and_case_does_not_count(place: Place) -> None:
    assert names(place, "skipped", "lINK name:4.txt")[0] == ["Link-4.txt"]
    assert names(place, "skipped", "link nothing")[0] == []


def test_the_inbox_narrows_them(place: Place) -> None:
    assert len(names(place, "pending", "inbox:/srv/inbox")[0]) == 3
    assert names(place, "pending", "inbox:/srv/other")[0] == []


@pytest.mark.parametrize("text", ["tag:dog", "-draft", "text:total", "after:2026-11-01", "bin:A"])
def test_what_only_a_result_has_is_refused(place: Place, text: str) -> None:
    with pytest.raises(QueryError, match="files that are pending have no result"):
        place.search.unpublished(parse(text).narrowed(state=["pending"]), "pending")


def test_the_words_of_a_state_name_the_filter_that_has_it() -> None:
    with pytest.raises(QueryError, match="visiond list --status skipped"):
        parse("state:skipped")


def test_an_older_version_is_not_listed(place: Place) -> None:
    place._run(place.ledger.admit([make_file(b"Link-0.txt", size=9)]))
    assert "Link-0.txt" not in names(place, "skipped")[0]
    assert "Link-0.txt" in names(place, "pending")[0]


def test_a_search_among_many_others_stops_in_time_and_goes_on(place: Place) -> None:
    last = 3 * LOOKED_AT
    copy = "INSERT INTO image (id, inbox, path, device, inode, size, mtime_ns, ctime_ns, priority, status, seen_at) "
    copy += "VALUES (?, 1, 'x', 0, 1, 1, 1, 1, 0, 4, 1.0)"
    place._run(place.ledger.run(lambda connection: connection.execute(copy, (last,))))
    with place.reader.lend() as connection:
        found, following = read_unpublished(connection, JobStatus.SKIPPED, 1 << 62, 9, seconds=0)
        assert (found, following) == ([], last + 1 - LOOKED_AT)
        assert len(read_unpublished(connection, JobStatus.SKIPPED, following, 9)[0]) == 5
        plan = connection.execute(
            f"EXPLAIN QUERY PLAN {SQL['unpublished']}",
            {"first": 1, "before": 9, "status": 3, "inboxes": None, "words": "[]", "limit": 9},
        ).fetchall()
    assert plan[0]["detail"] == "SEARCH image USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"


def test_failures_are_counted_by_reason_as_they_are_shown(place: Place) -> None:
    place.search.catch_up()
    assert place.search.reasons() == ({"truncated": 1}, False)
    assert place.search.reasons(most=1) == ({"truncated": 1}, True)
    place.add("failed.jpg", "better now", size=4)
    assert place.search.reasons() == ({}, False), "its newer version is done"
