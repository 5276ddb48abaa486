"""The budget of a second look."""

from __future__ import annotations

from daemon.pipeline.look_coordinator import Budget


def test_a_rate_allows_that_many_images_in_a_second() -> None:
    now = [100.0]
    budget, taken = Budget(4.0, lambda: now[0]), 0
    for _ in range(40):  # 10 s
        taken += (room := budget.room(16))
        budget.take(room)
        now[0] += 0.25
    assert 40 <= taken <= 44  # it begins with those of one second


def test_a_rate_below_one_takes_single_images() -> None:
    now = [0.0]
    budget = Budget(0.5, lambda: now[0])
    budget.take(budget.room(16))
    assert (budget.room(16), budget.seconds_to(1)) == (0, 2.0)
    now[0] = 2.0
    assert budget.room(16) == 1


def test_no_more_images_are_taken_at_once_than_the_rate_allows_in_a_second() -> None:
    now = [0.0]
    budget = Budget(5.5, lambda: now[0])
    budget.take(budget.room(16))
    assert (budget.most(16), budget.most(2)) == (5, 2)
    now[0] = budget.seconds_to(5)
    assert budget.room(16) == 5


def test_without_a_rate_there_is_no_limit() -> None:
    budget = Budget(0.0)
    budget.take(1000)
    assert (budget.room(16), budget.most(16), budget.seconds_to(16)) == (16, 16, 0.0)
