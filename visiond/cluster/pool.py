"""Runs units on a fixed pool of actors, by Ray Data.

What users of Ray Data complain of, and what is done about it here:
- A bad row fails its block, or drops it (max_errored_blocks). Here a bad image is a row, and no block may fail.
- A pool can wait for ever for an actor that died (ray #62746). Here a wave that makes no progress is given up, and
  what is left is run by a new pool of as many actors as the cluster has room for.
- A resume loads every id into every reader (ray #60200). Here the driver alone knows them: plans.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec

from daemon.config.loading import Config
from daemon.core.errors import MissingLibrary, VisiondError
from daemon.core.jobs import JobStatus
from daemon.workers.pool import SLOWER
from visiond.cluster.actor import ActorChain
from visiond.cluster.job import ClusterJob
from visiond.cluster.planning import Unit, to_table
from visiond.cluster.reading.keeping import Kept

THREADS = 3  # of an actor: for the unit that is read, the one that is annotated, and the one that is written
SPARE_SECONDS = 60.0  # for Ray to start or replace an actor


class ChainUnusable(VisiondError):
    """An actor cannot load or run the stages, or write its part; another one could not either."""

    def __init__(self, problem: str, exit_status: int) -> None:
        super().__init__(problem)
        self.exit_status = exit_status


class WaveLost(Exception):
    """The pool was lost, and what is left can be run again."""


def check_installed() -> None:
    """Raises MissingLibrary."""
    if missing := [name for name in ("ray", "pyarrow", "obstore") if find_spec(name) is None]:
        raise MissingLibrary(
            f"`visiond ray` needs {' and '.join(missing)}. Install the extra ray: pip install 'visiond[ray]'."
        )


class ActorPool:
    """A connection to a cluster, or a cluster of its own on this machine. As a context."""

    def __init__(self, job: ClusterJob, output: str, root: str, kept: Kept) -> None:
        """output: a folder as a path that all machines have, or a URL. root: what names are relative to. kept: as in
        ActorChain."""
        import ray
        import ray.data

        self._ray: Any = ray
        self._job, self._output, self._root, self._kept = job, output, root, kept
        self._is_ours = not ray.is_initialized()
        self.chains = 0

    def __enter__(self) -> ActorPool:
        """Connect, if this process is not connected yet. Raises ClusterAway."""
        if self._is_ours:
            self._connect()
        _quieten()
        self.chains = self._count_chains()
        return self

    def _connect(self) -> None:
        # Ray puts the working directory on the search path of its workers, and it may be an inbox.
        os.chdir("/")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        local = self._job.address == "local"
        if local:  # by default the processes of actors give way to all others on the machine
            os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            with _silence():
                self._ray.init(
                    address=self._job.address,
                    include_dashboard=False if local else None,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ClusterAway(f"There is no Ray cluster at {self._job.address}: {first}") from error

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[str, Counter[JobStatus]]]:
        """Run units, in any order; the name of each, and its images by state. Raises WaveLost, ChainUnusable."""
        ray = self._ray
        self.chains = self._count_chains()
        size = max(1, min(self.chains, len(units)))
        sharers = partial(count_sharers, size, self._job.gpus_per_chain if self._has_gpus else 0.0)
        pool = ray.data.ActorPoolStrategy(
            size=size,
            max_concurrent_calls_per_actor=THREADS,
            enable_true_multi_threading=True,
            max_tasks_in_flight_per_actor=THREADS + 1,
        )
        try:
            self._set_limits()
            dataset = ray.data.from_arrow([to_table(unit) for unit in units]).map_batches(
                ActorChain,
                fn_constructor_args=(
                    self._config(),
                    self._output,
                    self._root,
                    self._job.shards,
                    sharers,
                    self._kept,
                    self._job.float16,
                ),
                batch_size=1,  # a unit; Ray needs a number if GPUs are requested
                batch_format="pyarrow",
                compute=pool,
                **self._needs(),
            )
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in table.to_pylist():
                    if row["problem"]:
                        raise ChainUnusable(row["problem"], row["status"])
                    counts = msgspec.json.decode(row["counts"], type=dict[str, int])
                    yield row["unit"], Counter({JobStatus[name]: count for name, count in counts.items()})
        except VisiondError:
            raise
        except Exception as error:  # Ray raises its own errors, and those of the actors inside them
            raise WaveLost(" ".join(str(error).split())[:300] or type(error).__name__) from error

    @property
    def _has_gpus(self) -> bool:
        return bool(self._job.gpus_per_chain) and bool(self._ray.cluster_resources().get("GPU"))

    def _count_chains(self) -> int:
        """As many as are asked for and as the cluster has room for."""
        total = self._ray.cluster_resources()
        if self._has_gpus:
            room = total["GPU"] / self._job.gpus_per_chain
        else:
            room = total.get("CPU", 1.0) / max(self._job.cpus_per_chain, 1e-3)
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        wanted = self._job.chains or (math.inf if self._has_gpus else len(nodes))
        return max(1, int(min(room, wanted)))

    def _needs(self) -> dict[str, float]:
        gpus = {"num_gpus": self._job.gpus_per_chain} if self._has_gpus else {}
        return {"num_cpus": self._job.cpus_per_chain} | gpus

    def _config(self) -> bytes:
        """The configuration for an actor, which sees no other GPUs than its own."""
        config: Config = self._job.config
        if not config.pipeline.segment:
            devices = [] if self._has_gpus else ["cpu"]
            pipeline = config.pipeline.model_copy(update={"devices": devices})
            config = config.model_copy(update={"pipeline": pipeline, "second_look": []})
        return config.model_dump_json().encode()

    def _set_limits(self) -> None:
        """For this process's datasets. A pool may load its models and run one long batch without any other sign."""
        pipeline = self._job.config.pipeline
        context = self._ray.data.DataContext.get_current()
        context.max_errored_blocks = 0
        context.max_consecutive_actor_init_deaths = (
            0  # running.py starts the pool again, unless a stage is unusable
        )
        context.execution_no_progress_timeout_s = (
            pipeline.load_timeout_seconds + SLOWER * pipeline.batch_timeout_seconds + SPARE_SECONDS
        )
        context.enable_progress_bars = context.print_on_execution_start = False


class ClusterAway(VisiondError):
    """There is no cluster at this address."""

    exit_status = os.EX_UNAVAILABLE


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without standard error: Ray's own code logs there that it was asked to log less."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _quieten() -> None:
    """What Ray prints is for those who debug Ray: pages about each lost actor. Its log files have it all."""
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # There is no option for what a driver prints about nodes and actors that are gone. Without this name it is printed.
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


def count_sharers(chains: int, gpus_per_chain: float) -> int:
    """In an actor: how many actors this machine has when all have started. Each sees all cores and all memory, and takes its
    share of them. gpus_per_chain: 0: on the CPU."""
    import ray

    return share_out(ray.nodes(), ray.get_runtime_context().get_node_id(), chains, gpus_per_chain)


def share_out(nodes: Sequence[Mapping[str, Any]], own: str, chains: int, gpus_per_chain: float) -> int:
    """nodes: as Ray lists them. own: the NodeID of this machine. Without GPUs, Ray may put actors on any machine; this
    assumes that it spreads them evenly."""
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    if gpus_per_chain:
        room = int(alive[own].get("GPU", 0.0) / gpus_per_chain)
        return max(1, min(chains, room))
    machines = sum(bool(resources.get("CPU")) for resources in alive.values())
    return max(1, math.ceil(chains / max(1, machines)))
