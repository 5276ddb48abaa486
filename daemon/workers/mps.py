"""NVIDIA's Multi-Process Service (MPS), with which a GPU's workers run at the same time. Without it, they take turns.

When one client is killed, the state of the server's other clients is undefined (NVIDIA, Multi-Process
Service, "Client Early Termination"), and an error that loses the device is reported to all of them. So each
pool starts its own server on each GPU, and stops using MPS for good once a worker is lost.
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

from daemon.system.children import end
from stages.contract.processes import die_with, environment, locked_folder, python

log = structlog.get_logger()

CONTROL = "nvidia-cuda-mps-control"  # comes with the driver; it starts the server by itself
FOLDERS = "visiond-mps-"  # in /tmp, because the paths of sockets must be short
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
ADMINISTRATORS = Path("/tmp/nvidia-mps/control")  # the default place, where CUDA finds a server by itself
TRIAL_SECONDS = 30.0
END_SECONDS = 1.0
GLANCE_SECONDS = 0.01


def is_installed() -> bool:
    """False where an administrator runs a server: CUDA then uses that one."""
    return PIPES not in os.environ and not ADMINISTRATORS.exists() and shutil.which(CONTROL) is not None


class MpsServer:
    """The MPS server of one GPU. It runs from the first call of `share` until it is stopped."""

    def __init__(self, gpu: str) -> None:
        """gpu: its UUID."""
        # The environment of processes that share the GPU; empty while none does.
        self.shared: dict[str, str] = {}
        self._gpu = gpu
        self._works = True
        self._starting = anyio.Lock()
        self._process: anyio.abc.Process | None = None
        self._folder = contextlib.ExitStack()  # removes it

    async def share(self) -> dict[str, str]:
        """The environment for a process that shares the GPU; empty where MPS does not work or the server is closed."""
        async with self._starting:
            if self._works and not self.shared:
                await self._start()
            return self.shared

    def close(self) -> bool:
        """Let nobody share the GPU from now on. Returns whether somebody did."""
        shared, self.shared, self._works = self.shared, {}, False
        return bool(shared)

    async def stop(self) -> None:
        """Close the server and end its process. Processes that shared the GPU lose it."""
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
            last = (
                (getattr(error, "stderr", None) or b"").strip().rpartition(b"\n")[2].decode(errors="replace")
            )
            log.warning(
                "workers take turns on the GPU, because MPS does not work here",
                gpu=self._gpu,
                error=last or repr(error),
            )
            await self.stop()
        except BaseException:
            await self.stop()
            raise
        else:
            self.shared = shared if self._works else {}
            log.info("workers share the GPU", gpu=self._gpu, by=CONTROL)

    async def _serve(self, settings: dict[str, str]) -> None:
        """Start the server and try it, each in its own session: only the daemon obeys a Ctrl-C, which reaches a whole group."""
        parent = str(os.getpid())
        self._process = await anyio.open_process(
            python("-m", "stages.contract.processes", parent, CONTROL, "-f"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=settings,
            start_new_session=True,
        )
        control = anyio.Path(settings[PIPES], "control")  # without it, CUDA silently does not use MPS
        while not await control.exists():
            if self._process.returncode is not None:
                raise OSError(f"{CONTROL} exited with status {self._process.returncode}")
            await anyio.sleep(GLANCE_SECONDS)
        await anyio.run_process(
            python("-m", "daemon.workers.mps", "try", parent), env=settings, start_new_session=True
        )


def remove_leftovers() -> None:
    """Remove the folders of killed daemons: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError), locked_folder(folder):
            shutil.rmtree(folder)


def main() -> None:
    """`python -m daemon.workers.mps try PARENT` creates one CUDA context through the server."""
    die_with(int(sys.argv[2]))
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    if status := cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        sys.exit(f"CUDA error {status}")


if __name__ == "__main__":
    main()
