"""Runs the files of tests in several processes: `--processes 5`.

They are forked when all tests are collected: a process that starts empty imports and collects everything again,
which takes it ten seconds of a core. Each takes the next file when it has finished one, and sends its reports to the
first process, which prints them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import struct
import threading
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

NUMBER = struct.Struct("i")  # how a file is named in the pipe that the processes take the next one from
Location = tuple[str, int | None, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=0, metavar="N", help="run the files of tests in N processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("processes"):
        # A process that has asked CUDA itself whether there is a GPU leaves it unusable for its forks.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    count = config.getoption("processes")
    if not count or config.getoption("collectonly") or session.testsfailed:  # a file could not be imported
        return None
    assert threading.active_count() == 1, "a process with threads must not be forked"
    files = [[*items] for _, items in itertools.groupby(session.items, lambda item: item.path)]
    todo, filled = os.pipe()
    os.write(filled, b"".join(map(NUMBER.pack, range(len(files)))))  # less than the pipe holds
    os.close(filled)
    folder = config._tmp_path_factory.getbasetemp()
    workers: dict[Connection, int] = {}
    for number in range(count):
        reports, ours = Pipe(duplex=False)
        if not (pid := os.fork()):
            for connection in (*workers, reports):
                connection.close()
            become_worker(config, ours, folder / str(number))
            run_files(session, files, todo)
            end(session)
        ours.close()
        workers[reports] = pid
    os.close(todo)
    try:
        ended = print_reports(session, workers)
    finally:
        for pid in workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            os.waitpid(pid, 0)
    if left := len(session.items) - ended:
        raise session.Failed(f"{left} tests were not run to their end")
    return True


def become_worker(config: pytest.Config, reports: Connection, folder: Path) -> None:
    """folder: for the files of this process's tests."""
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Reporter(config, reports))
    capture: Any = plugins.getplugin("capturemanager")  # into files of its own
    capture.stop_global_capturing()
    capture.start_global_capturing()


def run_files(session: pytest.Session, files: list[list[pytest.Item]], todo: int) -> None:
    run = session.config.hook.pytest_runtest_protocol
    while number := os.read(todo, NUMBER.size):
        items = files[NUMBER.unpack(number)[0]]
        for item, after in itertools.zip_longest(items, items[1:]):
            # After the last test of a file, only what belongs to the session is kept.
            run(item=item, nextitem=after or session)
            if session.shouldfail:  # as --exitfirst asks for
                raise session.Failed(session.shouldfail)


def end(session: pytest.Session) -> None:
    """As pytest does, but for the interpreter's cleanup, which takes four seconds with what is imported here."""
    status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=status)
    session.config._ensure_unconfigure()
    atexit._run_exitfuncs()
    os._exit(status)


class Reporter:
    """Sends to the first process which test begins here, and the reports of it."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._config = config
        self._reports = reports

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._reports.send((nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        convert = self._config.hook.pytest_report_to_serializable
        self._reports.send(convert(config=self._config, report=report))


def print_reports(session: pytest.Session, workers: dict[Connection, int]) -> int:
    """Until all workers have ended; each leaves `workers` then. Returns how many tests ran to their end."""
    hook = session.config.hook
    running: dict[Connection, tuple[str, Location]] = {}
    # A process that a test left behind may keep a connection open: what counts is the end of the worker.
    ends = {os.pidfd_open(pid): reports for reports, pid in workers.items()}
    ended = 0
    while workers:
        ready = wait([*workers, *(end for end, reports in ends.items() if reports in workers)])
        for reports in {ends.get(one, one) for one in ready}:
            message: Any = None  # it has ended
            with contextlib.suppress(EOFError, OSError):
                message = reports.recv() if reports.poll() else None
            if isinstance(message, tuple):
                running[reports] = message
            elif message:
                report = hook.pytest_report_from_serializable(config=session.config, data=message)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    del running[reports]
                    ended += 1
            else:
                status = os.waitstatus_to_exitcode(os.waitpid(workers.pop(reports), 0)[1])
                reports.close()
                expected = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
                if reports in running or status not in (pytest.ExitCode.OK, expected):
                    name, location = running.get(reports, ("no test", ("", None, "")))
                    text = f"the process crashed while running {name!r}: exit status {status}"
                    crash = pytest.TestReport(name, location, {}, "failed", text, "call")
                    hook.pytest_runtest_logreport(report=crash)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    for end in ends:
        os.close(end)
    return ended
