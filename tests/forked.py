"""Runs a command of visiond in a process that starts with everything imported.

Most of a short command's time goes into its imports, and the tests run a thousand of them. A server of this
test process imports them once and forks for each command; from `main` on this is what `visiond` does, in a
separate process. Daemons of the tests, and commands with a prefix, start without it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# What commands import when they are called, in addition to what the module of the commands imports itself.
PRELOADED = [
    "daemon.cli.commands",
    "daemon.terminal.progress",
    "daemon.service",
    "daemon.sidecar",
    "daemon.system.stray",
]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`visiond` with these arguments in a folder, until it ends. output: a path for its output,
    which is removed afterwards."""
    streams = [output.with_suffix(f".{name}") for name in ("stdout", "stderr")]
    process = _server.Process(target=_be_visiond, args=(arguments, folder, dict(environment), streams))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(
            ["visiond", *arguments], timeout, *(stream.read_bytes() for stream in streams)
        )
    stdout, stderr = (stream.read_text() for stream in streams)
    for stream in streams:
        stream.unlink()
    return subprocess.CompletedProcess(["visiond", *arguments], process.exitcode, stdout, stderr)


def _be_visiond(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[Path]
) -> None:
    import daemon
    from daemon import cli

    assert threading.active_count() == 1, "what has threads may not be forked"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, stream in enumerate(streams, 1):
        descriptor = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # as by `python -m daemon`
    sys.argv = [os.path.join(os.path.dirname(daemon.__file__), "__main__.py"), *arguments]
    cli.main()
