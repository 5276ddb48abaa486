"""Starts a process for each GPU of a training, and starts them again with less where memory is short."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from daemon.core.errors import VisiondError
from stages.contract.processes import count_cores, describe_end, environment, python
from visiond.training.children import Child, end_children, locked, start_child, stopped_in_order
from visiond.training.data import Data
from visiond.training.job import (
    JOB,
    LOST,
    OUT_OF_MEMORY,
    TOO_SMALL,
    TrainingJob,
    read_training_job,
    write_job,
)
from visiond.training.log import read_log
from visiond.training.settings import CHECKPOINTS, LOG, TrainingPlace, find_checkpoint

POLL_SECONDS = 0.5
LAST_CHARACTERS = 3000
COMMAND = python("-m", "visiond.training.run")

Say = Callable[[str], None]


class TrainingFailed(VisiondError):
    """A process of a training ended with an error."""


def train(
    job: TrainingJob,
    data: Data,
    places: Sequence[TrainingPlace],
    say: Say,
    command: Sequence[str] = COMMAND,
) -> None:
    """Run a training, in as many processes as there are places. command: of a process, which gets the job's file. Raises
    TrainingFailed, InUse."""
    work = Path(job.work)
    with locked(work) as lock, stopped_in_order():
        if not job.resume:
            forget(work)
        elif not find_checkpoint(work):
            say("There is no checkpoint yet, so the training begins with its first step.")
        write_job(job, data)
        while any(ended := _run_once(job, places, say, (*command, str(work / JOB)), lock)):
            short = [place for place, status in zip(places, ended, strict=True) if status == TOO_SMALL]
            if 0 < len(short) < len(places):
                for place in short:
                    say(f"{place.name} is left out: its memory is too small for a batch of one.")
                places = [place for place, status in zip(places, ended, strict=True) if status != TOO_SMALL]
            elif OUT_OF_MEMORY in ended and (halved := read_training_job(work / JOB)) != job:
                job = halved
                say(f"Memory ran out: the training goes on with {job.settings.micro_batch} images at once.")
            else:
                raise TrainingFailed(_describe_failure(work, ended))


def prepare_for_torchrun(job: TrainingJob, data: Data) -> Path:
    """Write a job that goes on from its last checkpoint whenever it is started. Returns its file. Raises InUse."""
    work = Path(job.work)
    with locked(work):
        if not job.resume:
            forget(work)
        return write_job(msgspec.structs.replace(job, resume=True), data)


def forget(work: Path) -> None:
    """Remove the log and the checkpoints of an earlier training."""
    shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)
    (work / LOG).unlink(missing_ok=True)


def _run_once(
    job: TrainingJob, places: Sequence[TrainingPlace], say: Say, command: Sequence[str], lock: int
) -> list[int]:
    """How each process ended; 0 for those that were stopped because of another."""
    children: list[Child] = []
    try:
        port = _free_port()
        for rank in range(len(places)):
            variables = environment(_variables(rank, port, places))
            children.append(start_child(command, _output(Path(job.work), rank), variables, lock))
        return _watch(job, children, say)
    finally:
        end_children(children)


def _variables(rank: int, port: int, places: Sequence[TrainingPlace]) -> Mapping[str, str]:
    """As torchrun sets them, if there are several processes."""
    gpus, count = [place.uuid for place in places], len(places)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = max(count_cores() // count, 1)
    return {
        **({name: str(value) for name, value in (ranks | address).items()} if count > 1 else {}),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus) if all(gpus) else "",
        "ACCELERATE_USE_CPU": "false" if all(gpus) else "true",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
    }


def _watch(job: TrainingJob, children: Sequence[Child], say: Say) -> list[int]:
    told, printed = _count_kept(Path(job.work)) if job.resume else 0, 0
    while True:
        told = _tell(Path(job.work) / LOG, told, say)
        printed = _repeat(_output(Path(job.work), 0), printed, say)
        ended = [child.poll() for child in children]
        if any(ended):
            time.sleep(POLL_SECONDS)  # others may end by themselves, and for the same reason
            return [child.poll() or 0 for child in children]
        alive = [child for child in children if child.returncode is None]
        if not alive:
            _tell(Path(job.work) / LOG, told, say)
            return [0] * len(children)
        with contextlib.suppress(subprocess.TimeoutExpired):
            alive[0].wait(POLL_SECONDS)


def _count_kept(work: Path) -> int:
    """The lines of the log up to the last checkpoint."""
    checkpoint = find_checkpoint(work)
    last = int(checkpoint.name.partition("-")[2]) if checkpoint else 0
    return sum(entry["step"] <= last for entry in read_log(work / LOG))


def _tell(log: Path, told: int, say: Say) -> int:
    """Say what was logged since. Returns how many lines were."""
    entries = read_log(log)
    for entry in entries[told:]:
        say(describe(entry))
    return max(told, len(entries))


def _repeat(output: Path, printed: int, say: Say) -> int:
    """Say what a process has printed for people since: sentences about its start. Returns up to where."""
    text = output.read_text(errors="replace") if output.is_file() else ""
    for line in text[printed:].splitlines():
        if line.startswith("NCCL does not work"):
            say(line)
    return len(text)


def describe(entry: Mapping[str, Any]) -> str:
    """A line of the log, for people."""
    if scores := entry.get("scores"):
        figures = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if value is not None)
        return f"epoch {entry['epoch']:.2f}: on held-out images {figures or 'no score, as nothing is labelled in them'}"
    memory = f", {entry['memory_bytes'] / 2**30:.1f} GiB" if entry["memory_bytes"] else ""
    progress = min(max(entry["progress"], 1e-6), 1)
    # elapsed: in all runs, with scoring
    left = timedelta(seconds=round(entry["elapsed"] * (1 / progress - 1)))
    return (
        f"{progress:4.0%}  epoch {entry['epoch']:.2f}  loss {entry['loss']:.4f}  "
        f"{entry['images_per_second']:.1f} images/s{memory}, {left} to go"
    )


def _output(work: Path, rank: int) -> Path:
    return work / f"output-{rank}.txt"


def _describe_failure(work: Path, ended: Sequence[int]) -> str:
    """By the process that failed for a reason of its own."""
    failed = sorted((status == LOST, rank) for rank, status in enumerate(ended) if status)[0][1]
    output = _output(work, failed)
    end = output.read_text(errors="replace")[-LAST_CHARACTERS:].strip()
    how = describe_end(ended[failed], "was killed by")
    return f"the training failed: process {failed} {how}, and {output} ends with:\n{end}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
