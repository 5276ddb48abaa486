"""How much memory images in flight may take."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from daemon.config.loading import Config
from daemon.core.errors import ConfigError
from daemon.core.slab import Slab
from daemon.layout.devices import used_gpus
from daemon.system.gpus import Gpu
from daemon.system.host import Host

CPU_SLAB = 256 << 20  # bytes, without a GPU
GPU_SLAB, MOST_SLAB = 1 << 30, 12 << 30  # bytes for each GPU, at least and at most
SLAB_SHARE = 8  # part of the free memory that slabs may take; what no image needs is never touched


def size_slab(config: Config, gpus: Sequence[Gpu]) -> int:
    """Bytes, as configured or by the free memory of this machine. A GPU works off photographs of 12 megapixels at its own
    rate only if full batches of them fit."""
    used = len(used_gpus(config, gpus))
    if config.pipeline.slab_bytes or not used:
        return config.pipeline.slab_bytes or CPU_SLAB
    share = Host.here().free_bytes // SLAB_SHARE // used >> 20 << 20
    return used * min(max(share, GPU_SLAB), MOST_SLAB)


def size_slabs(config: Config, gpus: Sequence[Gpu], executors: int) -> int:
    """Bytes of each executor's slab. Raises ConfigError if this machine does not have that much memory."""
    size = config.pipeline.slab_bytes or size_slab(config, gpus) // executors
    if size * executors > psutil.virtual_memory().total:
        raise ConfigError([_too_much(size, executors)])
    return size


def open_slab(config: Config, gpus: Sequence[Gpu]) -> Slab:
    """Raises ConfigError if this machine does not have that much memory."""
    size = size_slabs(config, gpus, 1)
    try:
        return Slab(size)
    except OSError as error:
        raise ConfigError([f"{_too_much(size, 1)} ({error.strerror})"]) from error


def _too_much(size: int, executors: int) -> str:
    for_each = f" for each of {executors} executors" if executors > 1 else ""
    has = f"this machine has {psutil.virtual_memory().total >> 20:,} MiB of memory"
    return f"pipeline.slab_bytes: {size >> 20:,} MiB{for_each} is too much; {has}. Set a smaller value."
