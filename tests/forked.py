"""Starts `visiond` in a process that begins with everything imported.

Most of a short command's time goes into its imports, and a daemon's take half a second; the tests start more than a
thousand of both. A server of this test process imports them once and forks for each (tests/forking.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.forking import NUMBER

TOKEN = "VISIOND_TEST_TOKEN"  # names, in the environment of each process, the place that it was started for
TOKEN_BYTES = 8
END_SECONDS = 60  # after a kill
# What commands import that open models: most of the five seconds of CPU that each takes.
WITH_MODELS = ["stages.blip.captioner", "stages.clip.embeddings", "stages.yolo.detr"]
OPENING = {("models", name) for name in ("add", "bundle", "pull")}
TRAINING = ["visiond.training.run"]  # seven seconds of CPU
ENVIRONMENT = dict(os.environ)  # before a test changes it


class Forked:
    """A `visiond` that is running, with the methods of subprocess.Popen. It is a child of the server.

    At the end of its context it is killed, and what it wrote to `stderr`, a named file, is printed: pytest shows that when
    a test fails."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: str | Path,
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        *,
        session: bool = False,
        supervisor: str | Path = "",
        plugins: str | Path = "",
        program: str = "",
    ) -> None:
        """plugins: a folder in which some are installed; they are imported by a server of their own.
        program: Python for a process of a training, which runs in place of `visiond` and gets the arguments."""
        self.args = ["visiond", *arguments]
        self.returncode: int | None = None
        self._errors = Path(stderr.name)
        self._reports, report = os.pipe()
        self._ending = threading.Lock()
        request = {
            "arguments": [*arguments],
            "folder": str(folder),
            "environment": {**environment},
            "session": session,
            "supervisor": str(supervisor),
            "program": program,
        }
        with open(os.devnull, "rb") as stdin:
            streams = [stdin.fileno(), stdout.fileno(), stderr.fileno(), report]
            with_models = arguments[0] == "setup" or tuple(arguments[:2]) in OPENING
            imported = TRAINING if program else WITH_MODELS if with_models else []
            server = _server(*imported, plugins=str(plugins))
            socket.send_fds(server, [json.dumps(request).encode()], streams)
        os.close(report)
        self.pid = self._read_report()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        status = self.wait(END_SECONDS)
        print(
            f"{self.args} ended with {status}; its errors:\n{self._errors.read_text(errors='replace')[-6000:]}"
        )

    def poll(self) -> int | None:
        return self._end_within(0)

    def wait(self, timeout: float) -> int:
        """Raises TimeoutExpired."""
        if self._end_within(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the report is on its way
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end_within(self, seconds: float) -> int | None:
        with self._ending:
            if self.returncode is None:
                reports = select.poll()
                reports.register(self._reports, select.POLLIN)
                if reports.poll(1000 * seconds):
                    self.returncode = self._read_report()
                    os.close(self._reports)
            return self.returncode

    def _read_report(self) -> int:
        report = os.read(self._reports, NUMBER.size)
        assert report, "the server of forked processes has ended"
        return int(NUMBER.unpack(report)[0])


def run_forked(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    timeout: float,
    stdout: IO[bytes] | None = None,
    supervisor: str | Path = "",
    plugins: str | Path = "",
) -> subprocess.CompletedProcess[str]:
    """`visiond` with these arguments in a folder, until it ends. output: a path for its output, which is removed
    afterwards. stdout: where its standard output goes instead.
    supervisor: the path of one that is asked about its system calls (tests/faults/syscalls.py)."""
    files = {name: output.with_suffix(f".{name}") for name in ("stdout", "stderr")}
    if stdout is not None:
        del files["stdout"]
    with contextlib.ExitStack() as stack:
        streams = {name: stack.enter_context(file.open("wb")) for name, file in files.items()}
        outputs = stdout or streams["stdout"], streams["stderr"]
        process = Forked(arguments, folder, environment, *outputs, supervisor=supervisor, plugins=plugins)
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout)
        so_far = {name: file.read_bytes() for name, file in files.items()}
        raise subprocess.TimeoutExpired(
            process.args, timeout, so_far.get("stdout"), so_far["stderr"]
        ) from None
    said = {name: file.read_text() for name, file in files.items()}
    for file in files.values():
        file.unlink()
    return subprocess.CompletedProcess(process.args, status, said.get("stdout"), said["stderr"])


@functools.cache
def _server(*imported: str, plugins: str) -> socket.socket:
    """A socket to the server, which ends when this process does. imported: modules besides those that all import."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = Path(__file__).with_name("forking.py")
    with its:
        server = subprocess.Popen(
            [sys.executable, "-P", program, str(its.fileno()), TOKEN, *imported],
            env={**ENVIRONMENT, TOKEN: "0" * 2 * TOKEN_BYTES} | ({"PYTHONPATH": plugins} if plugins else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours
