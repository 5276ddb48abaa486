from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from daemon.inbox.settle import TOUCHED_SECONDS, Patience, Settling
from tests.makers import make_file

LOCAL = Patience(settle_seconds=2.0, trusts_clock=True)
MOUNT = Patience(settle_seconds=2.0, trusts_clock=False)
NOON = 1_000_000.0  # Unix seconds


@dataclass
class Watch:
    """A Settling with its clocks: both are at 0 seconds after noon until `at` sets them."""

    settling: Settling = field(default_factory=lambda: Settling(limit=10))
    patience: Patience = LOCAL
    now: float = 0.0
    ahead: float = 0.0  # of the clock, since it was set

    def at(self, now: float) -> Watch:
        self.now = now
        return self

    def sees(
        self,
        path: bytes = b"a.jpg",
        *,
        size: int = 1,
        changed: float = 0.0,
        renamed: bool = False,
        regular: bool = True,
        touched: bool = False,
        reading: float = 0.0,
    ) -> bool:
        file = make_file(path, size=size, ctime_ns=int((NOON + changed) * 1e9), regular=regular)
        now = 50.0 + self.now
        clock, read_by = NOON + self.now + self.ahead, now + reading
        return self.settling.is_whole(
            file, self.patience, now, clock, renamed=renamed, touched=touched, read_by=read_by
        )

    def due(self) -> list[bytes]:
        return self.settling.due(50.0 + self.now)

    def pause(self) -> float | None:
        return self.settling.seconds_to_next(50.0 + self.now)


def test_a_growing_file_is_not_whole_however_long_it_grows() -> None:
    watch = Watch()
    for second in range(10):
        assert not watch.at(second).sees(size=second, changed=second)
    assert not watch.at(10.9).sees(size=9, changed=9)
    assert watch.at(11.0).sees(size=9, changed=9)


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("trusts_clock", [True, False])
@pytest.mark.parametrize(("settle_seconds", "wait"), [(0.0, TOUCHED_SECONDS), (3.0, 3.0)])
def test_a_file_of_which_only_the_change_time_is_new_waits_a_second_or_as_long_as_others(
    settle_seconds: float, wait: float, trusts_clock: bool, renamed: bool
) -> None:
    watch = Watch(patience=Patience(settle_seconds, trusts_clock))
    assert not watch.sees(renamed=renamed, touched=True)
    assert watch.pause() == wait
    assert not watch.at(wait - 0.1).sees(renamed=renamed, touched=True)
    assert watch.at(wait).sees(renamed=renamed, touched=True)


def test_a_file_that_has_been_quiet_long_enough_is_whole_at_first_sight() -> None:
    assert Watch().sees(changed=-2.0)
    assert not Watch().sees(changed=-1.9)


def test_a_file_that_arrived_by_rename_is_whole_at_once() -> None:
    assert Watch().sees(renamed=True)


def test_an_irregular_file_need_not_settle() -> None:
    assert Watch().sees(regular=False)


def test_another_machines_clock_proves_nothing() -> None:
    watch = Watch(patience=MOUNT)
    assert not watch.sees(changed=-3600)
    assert not watch.at(1.9).sees(changed=-3600)
    assert watch.at(2.0).sees(changed=-3600)


def test_a_file_is_watched_only_from_when_its_status_has_been_read() -> None:
    watch = Watch(patience=MOUNT)
    assert not watch.sees(reading=1.5)
    assert not watch.at(2.0).sees()
    assert watch.at(3.5).sees()


@pytest.mark.parametrize("patience", [LOCAL, MOUNT])
def test_a_change_time_in_the_future_delays_no_file_for_ever(patience: Patience) -> None:
    watch = Watch(patience=patience)
    assert not watch.sees(changed=3600)
    assert watch.at(2.0).sees(changed=3600)


def test_with_settle_seconds_0_every_file_is_whole() -> None:
    assert Watch(patience=Patience(0.0, trusts_clock=False)).sees()


def test_a_file_is_due_when_it_may_have_settled() -> None:
    watch = Watch()
    assert watch.pause() is None
    watch.sees(b"early.jpg", changed=-1.5)
    watch.sees(b"late.jpg")
    assert watch.pause() == pytest.approx(0.5)
    assert watch.at(0.6).due() == [b"early.jpg"]
    assert watch.at(2.0).due() == [b"early.jpg", b"late.jpg"]
    assert watch.pause() == 0.0


def test_a_whole_or_vanished_file_is_waited_for_no_longer() -> None:
    watch = Watch()
    watch.sees(b"whole.jpg")
    watch.sees(b"vanished.jpg")
    assert watch.at(2.0).sees(b"whole.jpg")
    watch.settling.forget(b"vanished.jpg")
    watch.settling.forget(b"never seen.jpg")
    assert len(watch.settling) == 0


def test_files_that_do_not_fit_are_left_to_the_next_scan_and_that_is_reported() -> None:
    watch = Watch(Settling(limit=2))
    watch.sees(b"1.jpg")
    watch.sees(b"2.jpg")
    assert not watch.settling.overflowed
    assert (watch.sees(b"3.jpg"), watch.settling.overflowed, len(watch.settling)) == (False, True, 2)
    assert watch.sees(b"3.jpg", changed=-2.0)  # a file that is whole at first sight takes no room


def test_there_is_room_again_for_what_did_not_fit_once_half_has_settled_or_gone() -> None:
    watch = Watch(Settling(limit=2))
    watch.sees(b"1.jpg")
    watch.sees(b"2.jpg")
    watch.sees(b"3.jpg")
    had_room = watch.settling.has_room_again
    watch.settling.forget(b"1.jpg")
    assert (had_room, watch.settling.has_room_again) == (False, True)
    watch.settling.overflowed = False
    assert not watch.settling.has_room_again


def test_a_full_table_still_follows_the_files_in_it() -> None:
    watch = Watch(Settling(limit=1))
    watch.sees(size=1)
    assert not watch.at(1.0).sees(size=2, changed=1.0)
    assert not watch.settling.overflowed
    assert not watch.at(2.5).sees(size=2, changed=1.0)
    assert watch.at(3.0).sees(size=2, changed=1.0)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_after_the_clock_was_set_a_file_that_grows_is_not_taken_for_an_old_one(ahead: float) -> None:
    watch = Watch()
    assert watch.sees(b"before.jpg", changed=-2.0)
    watch.ahead = ahead
    assert not watch.at(1.0).sees(size=1, changed=0.9)  # written just before
    assert not watch.at(2.0).sees(size=2, changed=2.0 + ahead)
    assert not watch.at(3.9).sees(size=2, changed=2.0 + ahead)
    assert watch.at(4.0).sees(size=2, changed=2.0 + ahead)


def test_once_it_has_been_quiet_since_the_clock_was_set_first_sight_is_enough_again() -> None:
    watch = Watch()
    assert watch.sees(changed=-2.0)
    watch.ahead = 3600.0
    assert not watch.at(1.0).sees(b"young.jpg", changed=0.5)
    assert watch.at(3.1).sees(b"old.jpg", changed=-1.0)


def test_a_clock_that_is_nudged_is_trusted() -> None:
    watch = Watch()
    for second in range(60):
        watch.ahead = 0.1 * second
        assert watch.at(second).sees(changed=second + watch.ahead - 2.5)
