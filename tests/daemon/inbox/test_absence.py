from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from daemon.inbox import absence
from daemon.inbox.absence import Absences
from daemon.jobs import Failure, Job
from stages.base import Reason
from tests.makers import make_job


def unread(inbox: int) -> Job:
    return make_job(
        inbox=inbox, failure=Failure(Reason.UNREADABLE, "Connection timed out", transient=True, away=True)
    )


@pytest.fixture
def absences() -> Absences:
    return Absences({1: b"/srv/one", 2: b"/srv/two"})


def test_an_inbox_that_is_away_rests_and_is_reported_once(absences: Absences) -> None:
    with capture_logs() as logs:
        for _ in range(3):
            absences.note([unread(1), unread(1), make_job(inbox=2, digest=b"read")])
    assert absences.resting() == {1}
    assert absences.held_back() == [
        "images of inbox /srv/one cannot be read: Connection timed out; they wait"
    ]
    assert [entry["event"] for entry in logs] == ["images of an inbox cannot be read; they wait"]


def test_it_is_tried_again_after_its_rest_and_is_back_with_the_first_image_that_can_be_read(
    absences: Absences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "REST_SECONDS", 0.0)
    absences.note([unread(1)])
    assert absences.resting() == set()
    assert absences.held_back()
    with capture_logs() as logs:
        absences.note([make_job(inbox=1, digest=b"read")])
    assert absences.held_back() == []
    assert [entry["event"] for entry in logs] == ["inbox can be read again"]


def test_a_run_that_is_to_end_waits_for_a_few_tries(
    absences: Absences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "REST_SECONDS", 0.0)
    for lasting in (set(), set(), {2}):
        absences.note([unread(2)])
        assert absences.lasting() == lasting


def test_images_that_are_taken_up_together_are_one_try(absences: Absences) -> None:
    for _ in range(5):
        absences.note([unread(2)])
    assert absences.lasting() == set()


def test_a_file_that_is_to_blame_itself_is_no_absence(absences: Absences) -> None:
    absences.note([make_job(inbox=1, failure=Failure(Reason.UNREADABLE, "Permission denied"))])
    assert absences.held_back() == []


def test_while_an_inbox_is_tried_no_more_of_its_images_follow(
    absences: Absences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may take long to answer, and other inboxes must not wait for it."""
    monkeypatch.setattr(absence, "REST_SECONDS", 0.0)
    absences.note([unread(1)])
    absences.begin({1, 2})
    assert absences.resting() == {1}
    absences.note([make_job(inbox=1, gone=True)])  # that says nothing about the others
    assert absences.resting() == set()
    absences.begin({1})
    absences.note([unread(1)])
    assert absences.lasting() == set()
    absences.begin({1})
    absences.note([unread(1)])
    assert absences.lasting() == {1}
    absences.begin({1})
    absences.note([make_job(inbox=1, digest=b"read")])
    assert absences.away() == set()


def test_an_inbox_of_which_some_images_can_be_read_is_not_back_and_not_given_up(
    absences: Absences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "REST_SECONDS", 0.0)
    with capture_logs() as logs:
        for _ in range(5):
            absences.note([unread(1), make_job(inbox=1, digest=b"read")])
    assert absences.away() == {1}
    assert absences.lasting() == set()
    assert [entry["event"] for entry in logs] == ["images of an inbox cannot be read; they wait"]
