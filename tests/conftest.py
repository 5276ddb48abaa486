"""Fixtures of several test modules: the event loop that the daemon runs on, and a ledger with an inbox."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest
import structlog

from daemon.ledger.ledger import Ledger
from daemon.system import log
from daemon.workers.child import keep_memory
from daemon.workers.pool import Pool
from daemon.workers.worker import Worker
from tests.daemon_process import GLANCE
from tests.makers import MODELS, Commits

# Folders whose tests compute, the one with the longest files first. Tests in the other folders wait.
COMPUTING = ("acceptance", "minipack", "stages")
LONGEST = ("faults", "visiond")

# As in the Makefile, and for whoever calls pytest: otherwise all processes compile what they import, each time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would compute while they wait
gc.disable()  # while the tests are collected: what a module makes stays
keep_memory()  # as in workers, whose stages the tests run
# Under nohup the daemons of the tests would ignore it, as they should.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script, the same
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not Path("/dev/nvidiactl").exists():
    # read when Triton is imported, which torch may do; only the tests of kernels see it
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("visiond", database=None, deadline=None)
hypothesis.settings.load_profile("visiond")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If several processes run the tests, files whose tests compute alternate with files whose tests wait, so that
    one process computes while another waits. The folders with the longest files come first, so that at the end no
    process works alone."""
    if not hasattr(config, "workerinput"):
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    folders = {path: path.relative_to(config.rootpath).parts[1] for path in files}
    computing = [path for name in COMPUTING for path in files if folders[path] == name]
    waiting = sorted(
        (path for path in files if path not in computing), key=lambda p: folders[p] not in LONGEST
    )
    shares = [
        ((place + 0.5) / len(paths), path)
        for paths in (computing, waiting)
        for place, path in enumerate(paths)
    ]
    items[:] = [item for _, path in sorted(shares) for item in files[path]]


def pytest_collection_finish() -> None:
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        # It would look for an overflow in every sum of integers, which takes longer than the sums.
        # The tests of kernels see one in the answers.
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    gc.freeze()  # and later collections pass over it
    atexit.register(gc.unfreeze)  # or libraries report leaks at the end
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for which reason. A reason that ends in `make tools` names something to install."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if not reasons or terminalreporter.verbosity < -1:  # then pytest prints no summary either
        return
    terminalreporter.write_sep("-", f"{reasons.total()} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:6} {reason}")
    if missing := sum(count for reason, count in reasons.items() if reason.endswith("make tools")):
        terminalreporter.write_line(f"`make tools` installs what {missing} of them need.")


def pytest_runtest_setup() -> None:
    """Torch's chance is the same for a test and its fixtures, whatever ran in this process before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def _unconfigured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of this process goes to the streams of the current test,
    not to those of an earlier test that ran a daemon here."""
    structlog.reset_defaults()
    monkeypatch.setattr(log, "_as_json", False)


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
def humble() -> list[str]:
    """The start of a command line that takes away the right to read all files."""
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if prefix and not shutil.which(prefix[0]):
        pytest.skip(
            "setpriv is not installed, which takes from root the right to read everything: make tools"
        )
    return prefix


@pytest.fixture
def lend_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Pool], object]], None]:
    """Pools in this process lend no worker before a condition is true."""

    def hold_back(condition: Callable[[Pool], object]) -> None:
        lend = Pool.reserve

        async def reserve(pool: Pool) -> Worker:
            while not condition(pool):  # noqa: ASYNC110 - a condition sends no word
                await anyio.sleep(GLANCE)
            return await lend(pool)

        monkeypatch.setattr(Pool, "reserve", reserve)

    return hold_back


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture
async def ledger(tmp_path: Path, inbox: Path, commits: Commits) -> AsyncIterator[Ledger]:
    """A new ledger whose inbox 1 is `inbox`, with a model for each stage."""
    opened = Ledger(tmp_path / "state" / "ledger.sqlite", lambda seconds: commits.observe(seconds))
    assert await opened.register([(inbox, 0)], MODELS) == [1]
    yield opened
    opened.close()
