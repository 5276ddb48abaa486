"""NVIDIA's Multi-Process Service (MPS): a GPU's workers run side by side, where without it the driver lets them take turns.

A process that is killed leaves those of the same server in a state that nobody vouches for (NVIDIA, Multi-Process Service,
"Client Early Termination"), and an error that loses the device is told to all of them. So a pool has a server of its own on
each GPU, and does without for good once a worker is lost.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import anyio
import anyio.abc
import structlog

from stages.processes import die_with

log = structlog.get_logger()

CONTROL = "nvidia-cuda-mps-control"  # of the driver; it starts the server itself
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
TRIAL_SECONDS = 30.0
END_SECONDS = 5.0


def is_installed() -> bool:
    """False where an administrator's own server is named: CUDA's processes find that one by themselves."""
    return PIPES not in os.environ and shutil.which(CONTROL) is not None


class Server:
    """One GPU's, which runs from the first that wants to share it until it is stopped."""

    def __init__(self, gpu: str) -> None:
        """gpu: its UUID."""
        self.shared: dict[str, str] = {}  # the environment of those that share the GPU; empty while nobody does
        self._gpu = gpu
        self._works = True
        self._starting = anyio.Lock()
        self._process: anyio.abc.Process | None = None

    async def share(self) -> dict[str, str]:
        """The environment of a process that is to share the GPU; empty where MPS does not work, and once it was stopped."""
        async with self._starting:
            if self._works and not self.shared:
                await self._start()
            return self.shared

    async def stop(self) -> None:
        """Whoever shares the GPU loses it."""
        shared, self.shared, self._works = self.shared, {}, False
        with anyio.CancelScope(shield=True):
            for signum in (signal.SIGTERM, signal.SIGKILL):
                if self._process and self._process.returncode is None:
                    self._process.send_signal(signum)
                    with anyio.move_on_after(END_SECONDS):
                        await self._process.wait()
        if shared:
            shutil.rmtree(shared[PIPES], ignore_errors=True)

    async def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="visiond-mps-")  # short: sockets lie in it
        self.shared = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **self.shared, "CUDA_VISIBLE_DEVICES": self._gpu}
        program = [sys.executable, "-m", "daemon.mps"]
        try:
            self._process = await anyio.open_process(
                [*program, "serve", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            with anyio.fail_after(TRIAL_SECONDS):
                await anyio.run_process([*program, "try"], env=environment)
            log.info("workers share the GPU", gpu=self._gpu, by=CONTROL)
        except (OSError, subprocess.CalledProcessError) as error:  # a TimeoutError is an OSError
            log.warning("workers take turns on the GPU, as MPS does not work here", gpu=self._gpu, error=repr(error))
            await self.stop()
        except BaseException:
            await self.stop()
            raise


def main() -> None:
    """`python -m daemon.mps serve PARENT` becomes the server's control process; `… try` makes a context by it once."""
    if sys.argv[1] == "serve":
        die_with(int(sys.argv[2]), signal.SIGTERM)
        os.execvp(CONTROL, [CONTROL, "-f"])
    sys.exit(try_out())


def try_out() -> int:
    """CUDA's status, 0 for success. Where the server cannot be reached CUDA would quietly do without, so it is waited for."""
    while not os.path.exists(os.path.join(os.environ[PIPES], "control")):
        time.sleep(0.01)
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    return int(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))


if __name__ == "__main__":
    main()
