"""A process that has imported what visiond needs, and forks for each `visiond` that a test starts.

Run as a program by tests/forked.py, which sends it over a socket what to start. Each fork then does what
`python -P -m daemon` does from its first line on, or `python -P -c` with a program, with an environment, folder and
streams of its own; a daemon has its own session too, and ends as an interpreter ends. Only the imports are shared.
/proc shows this program's command line for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.syscalls import submit

# What commands, and the libraries that they use, import when they are called.
IMPORTED = [
    "anyio._backends._asyncio",
    "daemon.cli.check",
    "daemon.cli.commands",
    "daemon.server.control",
    "daemon.maintenance.rebuild",
    "daemon.results.folder_locks",
    "daemon.server.page.process",
    "daemon.service.lifecycle",
    "daemon.core.sidecar",
    "daemon.system.printed",
    "daemon.terminal.progress",
    "daemon.workers.tryout",
    "pydantic.type_adapter",
    "rich._emoji_codes",
    "stages.registry.fake",
    "uvicorn.lifespan.off",
    "uvloop",
]
PAUSES = "VISIOND_TEST_PAUSES"  # in the environment of a daemon: as JSON, pauses of another length by module and name
CHILDREN_PATH = "VISIOND_TEST_CHILDREN_PATH"  # in the same: PYTHONPATH of the processes that it starts
REQUEST_BYTES = 1 << 18
NUMBER = struct.Struct("i")  # how a report is sent: the process id, and at the end the exit status


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    token = sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then close the socket
    gc.disable()
    for name in IMPORTED + sys.argv[3:]:
        importlib.import_module(name)
    sys.modules["daemon.cli.commands"].command_tree()
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1, "a process with threads must not be forked"
    if request := serve(requests):
        program = request.pop("program")
        become(token, **request)
        if program:
            sys.argv[0] = "-c"
            run_command(lambda: exec(program, {"__name__": "__main__"}))
        elif request["session"]:
            run_visiond()
        else:
            run_command(run_visiond)
    else:
        os._exit(0)  # the interpreter's cleanup takes seconds


def run_visiond() -> None:
    runpy.run_module("daemon", run_name="__main__", alter_sys=True)


def run_command(command: Callable[[], None]) -> None:
    """End without the interpreter's cleanup, which takes as long as most commands."""
    status = 0
    try:
        command()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else bool(ending.code)
    except BaseException:  # noqa: BLE001 - the top of a process: as the interpreter would
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in each fork, and None in this process when the tests have ended."""
    events = selectors.DefaultSelector()
    events.register(requests, selectors.EVENT_READ)
    running: dict[
        int, tuple[int, int]
    ] = {}  # by the descriptor of a process: its id, and where to report its end
    while True:
        for key, _ in events.select():
            if key.fileobj is not requests:
                events.unregister(key.fd)
                os.close(key.fd)
                pid, report = running.pop(key.fd)
                tell(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(report)
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 4)
            if not message:
                return None
            *streams, report = descriptors
            if not (pid := os.fork()):
                events.close()  # or the garbage collector would, when its descriptor is another file's
                requests.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
                return dict(json.loads(message))
            for stream in streams:
                os.close(stream)
            tell(report, pid)
            ended = os.pidfd_open(pid)
            running[ended] = pid, report
            events.register(ended, selectors.EVENT_READ)


def tell(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test does not wait any more
        os.write(report, NUMBER.pack(number))


def become(
    token: str,
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    *,
    session: bool,
    supervisor: str,
) -> None:
    """Give this process what it would have got from its parent.
    supervisor: the path of one that is asked about its system calls (tests/faults/syscalls.py), if any."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session:
        os.setsid()
    if (
        token in environment
    ):  # written in place, as /proc/PID/environ shows that memory, where tests look for it
        find = ctypes.CDLL(None).getenv
        find.restype = ctypes.c_void_p
        value = os.fsencode(environment[token])
        assert len(value) == len(os.environ[token])
        ctypes.memmove(find(os.fsencode(token)), value, len(value))
    if (modules := environment.get("PYTHONPATH")) != os.environ.get("PYTHONPATH"):
        sys.path[:0] = filter(None, (modules or "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(environment)
    if hub := sys.modules.get("huggingface_hub.constants"):
        importlib.reload(hub)  # it has read the hub's address from the environment
    if CHILDREN_PATH in environment:
        os.environ["PYTHONPATH"] = environment[CHILDREN_PATH]
    os.chdir(folder)
    sys.argv = [str(Path(sys.modules["daemon"].__path__[0], "__main__.py")), *arguments]
    for name, seconds in json.loads(environment.get(PAUSES, "{}")).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(sys.modules[module], constant, seconds)
    if supervisor:
        submit(supervisor)


if __name__ == "__main__":
    main()
