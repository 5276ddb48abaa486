"""NVIDIA's Multi-Process Service (MPS): a GPU's workers run side by side, where without it the driver lets them take turns.

A process that is killed leaves those of the same server in a state that nobody vouches for (NVIDIA, Multi-Process Service,
"Client Early Termination"), and an error that loses the device is told to all of them. So a pool has a server of its own on
each GPU, and does without for good once a worker is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import anyio.abc
import structlog

from daemon.workers.worker import end
from stages.processes import die_with, environment, locked_folder, python

log = structlog.get_logger()

CONTROL = "nvidia-cuda-mps-control"  # of the driver; it starts the server itself
FOLDERS = "visiond-mps-"  # in /tmp: a short path, as sockets lie in them
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
ADMINISTRATORS = Path("/tmp/nvidia-mps/control")  # where one is that CUDA's processes find by themselves
TRIAL_SECONDS = 30.0
END_SECONDS = 1.0
GLANCE_SECONDS = 0.01


def is_installed() -> bool:
    """False where an administrator has a server: that one is used then."""
    return PIPES not in os.environ and not ADMINISTRATORS.exists() and shutil.which(CONTROL) is not None


class Server:
    """One GPU's, which runs from the first that wants to share it until it is stopped."""

    def __init__(self, gpu: str) -> None:
        """gpu: its UUID."""
        self.shared: dict[str, str] = {}  # the environment of those that share the GPU; empty while nobody does
        self._gpu = gpu
        self._works = True
        self._starting = anyio.Lock()
        self._process: anyio.abc.Process | None = None
        self._folder = contextlib.ExitStack()  # removes it

    async def share(self) -> dict[str, str]:
        """The environment of a process that is to share the GPU; empty where MPS does not work, and once it was closed."""
        async with self._starting:
            if self._works and not self.shared:
                await self._start()
            return self.shared

    def close(self) -> bool:
        """Nobody shares the GPU from here on. Whether somebody did."""
        shared, self.shared, self._works = self.shared, {}, False
        return bool(shared)

    async def stop(self) -> None:
        """Close it and end its process: whoever shared the GPU loses it."""
        self.close()
        if self._process:
            await end(self._process, END_SECONDS)
        self._folder.close()

    async def _start(self) -> None:
        try:
            remove_leftovers()
            folder = tempfile.mkdtemp(prefix=FOLDERS)
            self._folder.callback(shutil.rmtree, folder, ignore_errors=True)
            self._folder.enter_context(locked_folder(folder))
            shared = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
            with anyio.fail_after(TRIAL_SECONDS):
                await self._serve(environment(shared | {"CUDA_VISIBLE_DEVICES": self._gpu}))
        except (OSError, subprocess.CalledProcessError) as error:  # a TimeoutError is an OSError
            last = (getattr(error, "stderr", None) or b"").strip().rpartition(b"\n")[2].decode(errors="replace")
            log.warning("workers take turns on the GPU, as MPS does not work here", gpu=self._gpu, error=last or repr(error))
            await self.stop()
        except BaseException:
            await self.stop()
            raise
        else:
            self.shared = shared if self._works else {}
            log.info("workers share the GPU", gpu=self._gpu, by=CONTROL)

    async def _serve(self, settings: dict[str, str]) -> None:
        """In sessions of their own: a Ctrl-C reaches the whole group, and the daemon decides what it means."""
        parent = str(os.getpid())
        self._process = await anyio.open_process(
            python("-m", "stages.processes", parent, CONTROL, "-f"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=settings,
            start_new_session=True,
        )
        control = anyio.Path(settings[PIPES], "control")  # where CUDA cannot reach it, it quietly does without
        while not await control.exists():
            if self._process.returncode is not None:
                raise OSError(f"{CONTROL} left with status {self._process.returncode}")
            await anyio.sleep(GLANCE_SECONDS)
        await anyio.run_process(python("-m", "daemon.workers.mps", "try", parent), env=settings, start_new_session=True)


def remove_leftovers() -> None:
    """The folders of daemons that were killed: nobody has their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError), locked_folder(folder):
            shutil.rmtree(folder)


def main() -> None:
    """`python -m daemon.workers.mps try PARENT` makes a context by the server once."""
    die_with(int(sys.argv[2]))
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    if status := cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        sys.exit(f"CUDA error {status}")


if __name__ == "__main__":
    main()
