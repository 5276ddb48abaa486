"""Signals that ask the daemon to stop or to reload, handled from the first line of `visiond run` to its last; and
`interruptible` and `noting_stop`, for other commands that work until they are stopped.

SIGHUP from a terminal means that it was closed: the daemon stops. A daemon without a terminal, as systemd starts it,
takes SIGHUP as a reload, and remembers one that comes too early. The others stop it.

Before there is work in flight they end the process at once. While `listening` they are passed to the service. After that they
change nothing, as the shutdown has begun. A signal that was ignored at the start stays ignored (nohup and SIGHUP).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TERMINAL = "/dev/tty"  # of this process; it can only be opened if there is one
SHELL_OFFSET = 128  # added by a shell to the number of the signal that ended a program
INTERRUPTED = SHELL_OFFSET + signal.SIGINT  # the exit status after Ctrl-C


_early: list[signal.Signals] = []  # reloads from before `listening`


def is_reload(*, once: bool) -> bool:
    """Whether SIGHUP is a reload: nobody can have closed a terminal, and the daemon is not run for one pass."""
    if once:
        return False
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


@contextlib.contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once, unless it is handled or ignored already. For imports: nothing is in
    flight, and some libraries make an ImportError of a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _frame: os._exit(SHELL_OFFSET + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_at_once(*, once: bool) -> None:
    """From now on a stop signal ends the process: with status 0 or, for `run --once`,
    whose work is not finished, with the shell's status for the signal."""

    def leave(number: int, _frame: FrameType | None) -> None:
        # Write the log first. The signal may come in the middle of that module's import.
        if drain := getattr(sys.modules.get("daemon.system.lines"), "drain", None):
            drain()
        os._exit(SHELL_OFFSET + number if once else os.EX_OK)

    def note(number: int, _frame: FrameType | None) -> None:
        _early[:] = [signal.Signals(number)]

    for order in _obeyed():
        signal.signal(order, leave)
    if signal.SIGHUP in _obeyed() and is_reload(once=once):
        signal.signal(signal.SIGHUP, note)


@contextlib.contextmanager
def listening() -> Iterator[asyncio.Queue[signal.Signals]]:
    """The signals that arrive within the context, in a queue of the running event loop.
    Afterwards they are ignored if `leave_at_once` was called, otherwise handled as before."""
    import asyncio  # slow to import, and `leave_at_once` comes first

    loop, orders = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()

    def take(number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(orders.put_nowait, signal.Signals(number))

    handlers = {order: signal.signal(order, take) for order in _obeyed()}
    while _early:
        orders.put_nowait(_early.pop())
    try:
        yield orders
    finally:
        for order, handler in handlers.items():
            ours = getattr(handler, "__module__", "") == __name__
            signal.signal(order, signal.SIG_IGN if ours else handler)


@contextlib.contextmanager
def interruptible(*stops: signal.Signals) -> Iterator[Callable[[], None]]:
    """Within the context these signals raise KeyboardInterrupt, as Ctrl-C does. Yields a check, to be called in each round
    of a long loop: it raises KeyboardInterrupt if a signal has come whose exception is gone. Python drops an
    exception that a handler raises while an object's destructor runs."""
    has_come = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        raise KeyboardInterrupt

    def check() -> None:
        if has_come:
            raise KeyboardInterrupt

    with _handled(interrupt, stops):
        yield check


@contextlib.contextmanager
def noting_stop() -> Iterator[list[signal.Signals]]:
    """Within the context the first of these signals is only put into the list that is yielded, so that what was done until then
    can be kept. The next one does what it does outside of the context."""
    noted: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(signal.Signals(number))
        restore()

    with _handled(note, ORDERS) as restore:
        yield noted


@contextlib.contextmanager
def _handled(
    handle: Callable[[int, FrameType | None], None], stops: Collection[signal.Signals]
) -> Iterator[Callable[[], None]]:
    """Within the context these signals, unless they are ignored, are handled in this way. Yields what ends that sooner."""

    def restore() -> None:
        for stop, handler in before.items():
            signal.signal(stop, handler)

    before = {stop: signal.signal(stop, handle) for stop in stops if stop in _obeyed()}
    try:
        yield restore
    finally:
        restore()


def _obeyed() -> list[signal.Signals]:
    return [order for order in ORDERS if signal.getsignal(order) != signal.SIG_IGN]
