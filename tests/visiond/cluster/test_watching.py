"""The process that watches the driver of `visiond ray run`: what is sent to it, and how both end. Needs no Ray."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.contract.processes import environment
from tests.daemon_process import PATIENCE, wait_for

# Prints the driver's process id, then a line for each SIGINT that the driver gets; ends when a pipe is closed.
# With a terminal as input it is what a shell has started in the foreground.
PROGRAM = """\
import os, signal, sys
from visiond.cluster.watching import DriverEnded, become_driver

if os.isatty(0):
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # from now on its signals come here

def note(number, frame):
    signal.signal(signal.SIGTERM, lambda number, frame: (end(), os._exit(number)))
    print("SIGINT", flush=True)

try:
    end = become_driver()
except DriverEnded as ended:
    sys.exit(ended.status)
signal.signal(signal.SIGINT, note)
print(os.getpid(), flush=True)
if os.isatty(0):
    os.write(0, b"progress")
os.read(int(sys.argv[1]), 1)
end()
sys.exit(5)
"""


class Watched:
    """A watcher and its driver, which ends when the pipe let_end is closed."""

    def __init__(self, process: subprocess.Popen[bytes], let_end: int) -> None:
        assert process.stdout
        self.process, self._let_end = process, let_end
        self.driver = int(process.stdout.readline())

    def end(self) -> tuple[int, list[bytes]]:
        """Let the driver end; the exit status, and the SIGINTs that the driver has had and that were not read yet."""
        os.close(self._let_end)
        assert self.process.stdout
        return self.process.wait(PATIENCE), self.process.stdout.read().splitlines()

    def wait_sigint(self) -> None:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], "no SIGINT"
        assert self.process.stdout.readline() == b"SIGINT\n"


def state(pid: int) -> str:
    """Of a process, as in ps; empty when it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
        return "" if found == "Z" else found
    return ""


@contextlib.contextmanager
def watching(terminal: int = subprocess.DEVNULL) -> Iterator[Watched]:
    reads, let_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(reads)],
        env=environment(),
        stdin=terminal,
        stdout=subprocess.PIPE,
        bufsize=0,
        pass_fds=[reads],
        process_group=None if terminal >= 0 else 0,
    )
    os.close(reads)
    with process:
        try:
            yield Watched(process, let_end)
        finally:
            process.kill()


@pytest.fixture
def watched() -> Iterator[Watched]:
    with watching() as found:
        yield found


@pytest.fixture
def terminal() -> Iterator[tuple[int, Watched]]:
    """The terminal's side where a user types, and what runs in its foreground."""
    typed, shown = pty.openpty()
    modes = termios.tcgetattr(shown)
    modes[3] |= termios.TOSTOP  # stops what writes from the background
    termios.tcsetattr(shown, termios.TCSANOW, modes)
    with watching(shown) as found:
        os.close(shown)
        yield typed, found


def test_sigint_to_the_process_that_users_see_reaches_the_driver(watched: Watched) -> None:
    watched.process.send_signal(signal.SIGINT)
    watched.wait_sigint()
    assert watched.end() == (5, [])


def test_sigint_to_the_process_group_reaches_the_driver_once(watched: Watched) -> None:
    os.killpg(watched.process.pid, signal.SIGINT)
    watched.wait_sigint()
    assert watched.end() == (5, [])


def test_ctrl_c_in_a_terminal_reaches_the_driver_once(terminal: tuple[int, Watched]) -> None:
    typed, watched = terminal
    os.write(typed, b"\x03")
    watched.wait_sigint()
    os.write(typed, b"\x03")
    watched.wait_sigint()
    assert watched.end() == (5, [])
    os.close(typed)


def test_a_closed_terminal_ends_the_driver(terminal: tuple[int, Watched]) -> None:
    typed, watched = terminal
    os.close(typed)
    assert watched.process.wait(PATIENCE) == -signal.SIGHUP
    wait_for(lambda: not state(watched.driver), "the driver's end")


def test_the_driver_ends_with_the_process_that_watches_it(watched: Watched) -> None:
    watched.process.kill()
    wait_for(lambda: not state(watched.driver), "the driver's end")


def test_sigterm_ends_both(watched: Watched) -> None:
    watched.process.terminate()
    assert watched.process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not state(watched.driver)


def test_the_status_after_sigterm_is_that_of_a_shell_also_when_the_driver_ends_in_its_own_way(
    watched: Watched,
) -> None:
    """Ray's handler ends it with the status 15."""
    watched.process.send_signal(signal.SIGINT)
    watched.wait_sigint()  # from now on it has a handler of SIGTERM
    watched.process.terminate()
    assert watched.process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_ctrl_z_pauses_both_until_the_shell_lets_them_go_on(watched: Watched) -> None:
    both = (watched.process.pid, watched.driver)
    for _ in range(2):
        watched.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: [state(pid) for pid in both] == ["T", "T"], "both to pause")
        watched.process.send_signal(signal.SIGCONT)
        wait_for(lambda: [state(pid) for pid in both] == ["S", "S"], "both to go on")
    assert watched.end() == (5, [])
