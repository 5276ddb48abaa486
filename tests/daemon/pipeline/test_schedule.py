"""Who has an image: each condition of `take`, and what becomes of jobs when an executor is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from daemon.core.jobs import GONE, Failure, Job, Read
from daemon.pipeline.schedule import REST_SECONDS, TRIES, Schedule
from stages.contract.base import Reason
from tests.makers import done, make_job, postponed

INBOXES = {1, 2}
NOBODY = frozenset[int]()


def image(number: int, path: bytes | None = None, **fields: Any) -> Job:
    return make_job(path or b"%d.jpg" % number, id=number, **fields)


def offered(*jobs: Job, limit: int | None = None) -> Schedule:
    schedule = Schedule(limit, found_all=True)
    schedule.offer(jobs)
    return schedule


def take(schedule: Schedule, executor: object = "a", most: int = 9, now: float = 0.0) -> list[int]:
    return [job.id for job in schedule.take(executor, most, INBOXES, now)]


def end(schedule: Schedule, *numbers: int, newest: bool = True) -> None:
    endings = [done(schedule.entries[number].job) for number in numbers]
    schedule.end(endings, set(numbers) if newest else NOBODY)


def finish(schedule: Schedule, *numbers: int) -> None:
    end(schedule, *numbers)
    schedule.publish(numbers)
    schedule.confirm(numbers)


def known(schedule: Schedule, now: float = 0.0) -> frozenset[int]:
    question = schedule.ask(9, INBOXES, now)
    assert question
    return question.known


# What is taken


def test_the_highest_priority_is_first_and_the_oldest_within_it() -> None:
    schedule = offered(image(3), image(2, priority=5), image(1), image(4, priority=5))
    assert (take(schedule, most=3), take(schedule)) == ([2, 4, 1], [3])


def test_a_job_is_given_to_one_executor() -> None:
    schedule = offered(image(1))
    assert (take(schedule), take(schedule, "b")) == ([1], [])


def test_what_is_in_memory_is_not_asked_for_and_not_offered_twice() -> None:
    schedule = offered(image(1), image(2))
    take(schedule, most=1)
    schedule.offer([image(1), image(2)])
    assert known(schedule) == {1, 2}
    assert take(schedule) == [2]
    finish(schedule, 1, 2)
    assert (take(schedule), known(schedule)) == ([], NOBODY)


def test_of_a_file_one_version_is_in_hand_until_it_is_on_the_disk() -> None:
    schedule = offered(image(1, b"a"), image(2, b"a"))
    steps: list[Callable[[], object]] = [
        lambda: end(schedule, 1),
        lambda: schedule.publish([1]),
        lambda: schedule.confirm([1]),
    ]
    assert take(schedule) == [1]
    for step in steps:
        assert take(schedule) == []
        step()
    assert take(schedule) == [2]


def test_an_inbox_that_does_not_answer_holds_up_no_other() -> None:
    schedule = offered(image(1, inbox=2), image(2, inbox=1))
    assert [job.id for job in schedule.take("a", 9, {1}, 0.0)] == [2]


# When an executor is lost, or gives back


def test_what_a_lost_executor_had_waits_again_as_if_nobody_had_begun_it() -> None:
    schedule = offered(image(1), image(2))
    [first, _] = schedule.take("a", 9, INBOXES, 0.0)
    schedule.blame(first.id, 1)
    assert schedule.lose("a") == []
    [again, _] = schedule.take("b", 9, INBOXES, 0.0)
    assert again == msgspec.structs.replace(image(1), deaths=1), "the workers that it killed are counted"


def test_what_a_lost_executor_had_ended_is_owed_and_keeps_its_file() -> None:
    schedule = offered(image(1, b"a"), image(2, b"b"), image(3, b"a"))
    take(schedule)
    end(schedule, 1)
    assert [entry.job.id for entry in schedule.lose("a")] == [1]
    owed = schedule.entries[1]
    assert schedule.owed() == [owed]
    assert take(schedule, "b") == [2], "not the later version"
    assert schedule.hold_each({(1, b"a"), (1, b"b")}, "publisher") == {(1, b"a")}
    schedule.settle({owed.job.inbox}, [owed])
    assert (schedule.owed(), take(schedule, "b")) == ([], [3])


def test_an_inbox_is_settled_when_what_is_owed_of_it_is_published_and_no_executor_was_lost_meanwhile() -> (
    None
):
    schedule = offered(image(1), image(2))
    assert schedule.unsettled(INBOXES) == INBOXES, "what the last daemon owed"
    schedule.settle(INBOXES, ())
    take(schedule)
    end(schedule, 1, 2)
    assert schedule.unsettled(INBOXES) == NOBODY
    [first, second] = schedule.lose("a")
    assert schedule.unsettled(INBOXES) == {first.job.inbox}
    schedule.settle(INBOXES, [first])
    assert schedule.unsettled(INBOXES) == {second.job.inbox}
    schedule.settle(INBOXES, [second])
    schedule.settle(INBOXES, [second])  # by two at once
    assert schedule.unsettled(INBOXES) == NOBODY
    schedule.unsettle()
    assert schedule.unsettled(INBOXES) == INBOXES


def test_a_version_that_was_replaced_is_not_owed() -> None:
    schedule = offered(image(1))
    schedule.settle(INBOXES, ())
    take(schedule)
    end(schedule, 1, newest=False)
    schedule.lose("a")
    assert schedule.unsettled(INBOXES) == NOBODY


def test_a_file_that_is_no_container_after_all_still_counts_once_in_a_limit() -> None:
    schedule = Schedule(1, found_all=True)
    schedule.offer([image(1)], containers=True)
    [job] = schedule.take("unpacker", 9, INBOXES, 0.0, containers=True)
    schedule.forget(job.id)
    schedule.offer([job])
    assert schedule.left == 1
    assert take(schedule) == [1]
    finish(schedule, 1)
    assert schedule.left == 0


def test_what_a_lost_executor_had_published_is_left_to_who_confirms_it() -> None:
    schedule = offered(image(1))
    take(schedule)
    end(schedule, 1)
    schedule.publish([1])
    assert schedule.lose("a") == []
    assert [entry.job.id for entry in schedule.confirm([1])] == [1]


def test_an_attempt_without_a_result_is_not_owed() -> None:
    schedule = offered(image(1))
    [job] = schedule.take("a", 9, INBOXES, 0.0)
    schedule.end([postponed(job, 5.0)], NOBODY)
    assert [entry.job.id for entry in schedule.lose("a")] == [1]
    assert (schedule.owed(), schedule.in_hand, known(schedule)) == ([], 0, NOBODY)


def test_what_may_be_lost_with_its_folder_is_owed() -> None:
    schedule = offered(image(1), image(2))
    take(schedule)
    end(schedule, 1)
    end(schedule, 2, newest=False)
    schedule.publish([1, 2])
    assert [entry.job.id for entry in schedule.owe([1, 2])] == [1, 2]
    assert [entry.job.id for entry in schedule.owed()] == [1]


def test_an_executor_is_free_when_its_last_job_is_published_or_given_back() -> None:
    schedule = offered(image(1), image(2))
    first, second = schedule.take("a", 9, INBOXES, 0.0)
    end(schedule, first.id)
    assert schedule.has("a") == 2
    schedule.publish([first.id])
    schedule.give_back([second.id])
    assert schedule.has("a") == 0


# Files held by others


def test_files_are_held_together_or_not_at_all() -> None:
    schedule = offered(image(1, b"a"))
    take(schedule)
    assert not schedule.hold({(1, b"a"), (1, b"b")}, "look")
    assert schedule.hold({(1, b"b")}, "look")
    schedule.release({(1, b"a"), (1, b"b")}, "look")
    assert not schedule.hold({(1, b"a")}, "look"), "that is the job's"
    assert schedule.hold({(1, b"b")}, "another")


def test_a_second_look_holds_up_no_new_version_while_it_is_at_work() -> None:
    schedule = offered(image(2, b"a"))
    schedule.take_look("again", [image(1, b"a")])
    assert take(schedule) == [2]
    assert (schedule.looked_at("again"), schedule.in_hand) == ({1}, 1)
    assert schedule.ask_look("again", 9, INBOXES, 0.0).known == {1}
    schedule.forget_look("again")
    assert schedule.looked_at("again") == set()


# A limit


def test_with_a_limit_nothing_begins_before_all_files_are_found() -> None:
    schedule = offered(image(1), limit=5)
    schedule.found_all = False
    assert (schedule.ask(9, INBOXES, 0.0), take(schedule)) == (None, [])


def test_a_limit_counts_images_with_all_their_attempts() -> None:
    schedule = offered(*map(image, (1, 2, 3)), limit=2)
    assert take(schedule) == [1, 2]
    schedule.end([postponed(schedule.entries[1].job, 5.0)], NOBODY)
    schedule.publish([1])
    schedule.confirm([1])
    finish(schedule, 2)
    question = schedule.ask(9, INBOXES, 0.0)
    assert question
    assert (question.only, schedule.left) == (frozenset({1}), 1)
    assert not schedule.is_over(0.0, later=True)
    schedule.offer([image(1)])
    assert take(schedule) == [1]
    finish(schedule, 1)
    assert schedule.is_over(0.0, later=True), "others are due, and are left to the next run"
    assert (schedule.left, schedule.ask(9, INBOXES, 0.0)) == (0, None)


def test_a_lost_executor_costs_a_limit_nothing() -> None:
    schedule = offered(*map(image, (1, 2)), limit=1)
    assert take(schedule) == [1]
    schedule.lose("a")
    assert (take(schedule, "b"), schedule.left) == ([1], 1)


def test_with_a_limit_only_its_images_get_second_looks() -> None:
    schedule = offered(*map(image, (1, 2)), limit=1)
    take(schedule)
    finish(schedule, 1)
    assert schedule.ask_look("again", 9, INBOXES, 0.0).only == frozenset({1})


def test_a_second_look_that_ends_makes_no_room_for_another_image_in_a_limit() -> None:
    schedule = offered(*map(image, (1, 2)), limit=1)
    [job] = schedule.take("a", 9, INBOXES, 0.0)
    finish(schedule, 1)
    schedule.take_look("again", [job])
    schedule.leave_look("again", [job.id])
    assert (take(schedule), schedule.left) == ([], 0)


# Inboxes that are away


def unread(inbox: int = 1) -> tuple[int, Read]:
    return inbox, Read(failure=Failure(Reason.UNREADABLE, "no answer", transient=True, away=True))


READ = Read(b"read")


def test_an_inbox_that_is_away_rests_and_is_reported_once() -> None:
    schedule = Schedule()
    notes = [schedule.note_read([unread(1), (2, READ)], now) for now in (0.0, 0.1)]
    assert [note.away for note in notes] == [{1: "no answer"}, {}]
    assert (schedule.resting(0.2), schedule.away()) == (frozenset({1}), {1: "no answer"})


def test_it_is_tried_after_its_rest_and_is_back_with_the_first_image_that_can_be_read() -> None:
    schedule = Schedule()
    schedule.note_read([unread()], 0.0)
    assert schedule.resting(REST_SECONDS) == NOBODY
    assert schedule.note_read([(1, READ)], REST_SECONDS).back == {1}
    assert schedule.away() == {}


def test_a_run_that_is_to_end_waits_for_a_few_tries() -> None:
    schedule, now = Schedule(found_all=True), 0.0
    for lasting in [NOBODY] * (TRIES - 1) + [{1}]:
        for late in (0.0, 0.1):  # images that are taken up together are one try
            schedule.note_read([unread()], now + late)
        assert schedule.lasting() == lasting
        assert schedule.is_over(now + 1, later=False) == bool(lasting)
        now += REST_SECONDS + 1


def test_a_file_that_is_to_blame_itself_is_no_absence() -> None:
    schedule = Schedule()
    schedule.note_read([(1, Read(failure=Failure(Reason.UNREADABLE, "Permission denied")))], 0.0)
    assert schedule.away() == {}


def test_while_an_inbox_is_tried_no_more_of_its_images_follow() -> None:
    """A store may take long to answer, and other inboxes must not wait for it."""
    schedule = offered(image(1), image(2), image(3, inbox=2))
    schedule.note_read([unread()], 0.0)
    later = REST_SECONDS + 1
    assert take(schedule, most=1, now=later) == [1]
    assert take(schedule, now=later) == [3]
    schedule.note_read([(1, GONE)], later)  # that says nothing about the others
    assert take(schedule, now=later) == [2]


def test_an_inbox_of_which_some_images_can_be_read_is_away_and_never_given_up() -> None:
    schedule, now = Schedule(), 0.0
    for _ in range(2 * TRIES):
        schedule.note_read([unread(), (1, READ)], now)
        now += REST_SECONDS + 1
    assert ({*schedule.away()}, schedule.lasting()) == ({1}, NOBODY)


# The end


def test_a_run_is_over_when_nothing_is_in_hand_waits_or_is_due_later() -> None:
    schedule = offered(image(1))
    assert not schedule.is_over(0.0, later=False)
    take(schedule)
    assert not schedule.is_over(0.0, later=False)
    finish(schedule, 1)
    assert (schedule.is_over(0.0, later=True), schedule.is_over(0.0, later=False)) == (False, True)
    schedule.found_all = False
    assert not schedule.is_over(0.0, later=False)


def test_what_nobody_has_is_left_to_the_ledger() -> None:
    schedule = offered(image(1), image(2))
    take(schedule, most=1)
    schedule.forget_waiting()
    assert (take(schedule), known(schedule)) == ([], frozenset({1}))
