"""Stop signals before, during and after the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import anyio
import pytest

from daemon.system import signals
from tests.daemon_process import ON_A_TERMINAL, PATIENCE

pytestmark = pytest.mark.anyio

PROGRAM = (
    "import os, signal, time\nfrom daemon.system import signals\nsignals.leave_at_once(once={once})\n{then}"
)
KILL = "os.kill(os.getpid(), signal.{name})\ntime.sleep(30)"
LISTEN = """
import anyio

async def listen():
    with signals.listening() as orders:
        os.kill(os.getpid(), signal.SIGTERM)
        print((await orders.get()).name)

anyio.run(listen, backend_options={"use_uvloop": True})
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
EARLY = """
import sys
from daemon.system import signals
from daemon.cli import main

def note(*, once):
    print(once, *sys.modules)
    sys.exit()

signals.leave_at_once, sys.argv = note, {argv}
main()
"""


def run(then: str, *prefix: str, once: bool = False) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(once=once, then=then)
    return subprocess.run(
        [*prefix, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_before_the_work_a_signal_ends_the_daemon_with_success(name: str) -> None:
    assert run(KILL.format(name=name), *ON_A_TERMINAL).returncode == 0


def test_without_a_terminal_a_hangup_is_a_reload_also_if_it_comes_early() -> None:
    early = KILL.format(name="SIGHUP").replace("time.sleep(30)", "print(signals.is_reload(once=False))")
    ended = run(early + LISTEN.replace("os.kill(os.getpid(), signal.SIGTERM)\n        ", ""), "setsid", "-w")
    assert ended.stdout == "True\nSIGHUP\nstill here\n"


def test_for_run_once_a_hangup_is_never_a_reload() -> None:
    assert run(KILL.format(name="SIGHUP"), "setsid", "-w", once=True).returncode == 128 + signal.SIGHUP


def test_a_signal_may_come_while_the_module_of_the_log_is_imported() -> None:
    half = "import sys, types\nsys.modules['daemon.system.lines'] = types.ModuleType('lines')\n"
    ended = run(half + KILL.format(name="SIGTERM"))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_before_the_work_of_run_once_it_ends_with_the_shells_status(name: str, status: int) -> None:
    assert run(KILL.format(name=name), once=True).returncode == status


def test_during_the_work_signals_are_passed_on_and_after_it_they_change_nothing() -> None:
    ended = run(LISTEN)
    assert (ended.returncode, ended.stdout) == (0, "SIGTERM\nstill here\n")


def test_signals_that_were_ignored_at_the_start_stay_ignored() -> None:
    ended = run(
        LISTEN.replace("SIGTERM)", "SIGTERM); os.kill(os.getpid(), signal.SIGHUP)") + "\nprint('and here')",
        "nohup",
    )
    assert ended.stdout == "SIGTERM\nstill here\nand here\n"


def test_a_thread_that_hangs_does_not_delay_the_exit() -> None:
    program = "import threading, time\nfrom daemon import cli\ncli.LEAVE_SECONDS = 0.1\n"
    program += "threading.Thread(target=time.sleep, args=(600,)).start()\nprint('said')\ncli.leave_threads(3)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "said\n")


@pytest.mark.parametrize(
    "moment",
    [
        "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'typer': interrupt()\n"
        "sys.meta_path.insert(0, Finder())",
        "import typer.main\ntyper.main.get_command = lambda app: interrupt()",
    ],
    ids=["while modules are imported", "before the command begins"],
)
def test_an_interrupt_in_the_first_moment_of_a_command_prints_no_traceback(moment: str) -> None:
    program = "import os, signal, sys\ndef interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
    program += f"{moment}\nfrom daemon.cli import main\nsys.argv[1:] = ['gpus']\nmain()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (signals.INTERRUPTED, "", "")


def test_signals_have_handlers_before_anything_slow_is_imported() -> None:
    program = EARLY.format(argv=["visiond", "run", "--once"])
    once, *modules = subprocess.check_output(
        [sys.executable, "-c", program], text=True, timeout=PATIENCE
    ).split()
    assert once == "True"
    assert {"asyncio", "typer", "pydantic", "structlog"}.isdisjoint(modules)


async def test_without_an_early_exit_the_earlier_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals.listening() as orders:
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(PATIENCE):
            assert await orders.get() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


class Dying:
    """Gets SIGTERM in its destructor, where Python drops what the signal's handler raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_whose_exception_is_dropped_interrupts_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: dropped.append(args.exc_type))
    before = signal.getsignal(signal.SIGTERM)
    with signals.interruptible(signal.SIGTERM) as check:
        check()
        Dying()
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGTERM) is before
