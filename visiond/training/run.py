"""One process of a training: `python -m visiond.training.run JOB.json`. `visiond train` starts one for each GPU; for GPUs of
several hosts, torchrun starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from daemon.core.errors import VisiondError
from daemon.labels.metrics import Measure, interval
from stages.contract.base import Limits
from stages.contract.processes import count_cores, die_with
from stages.images.decoder import Decoders
from stages.images.devices import split_batches
from visiond.training.captioner import CaptionLearner
from visiond.training.card import publish
from visiond.training.data import Data
from visiond.training.detector import DetectorLearner
from visiond.training.hardware import join_processes, make_deterministic, measure_batch
from visiond.training.job import (
    BATCH,
    FINAL,
    OUT_OF_MEMORY,
    RANGES,
    TOO_SMALL,
    Task,
    TrainingJob,
    read_job,
)
from visiond.training.learning import Learner, TrainingImages
from visiond.training.tagger import TagLearner
from visiond.training.trainer import ResumeError, Trainer

LEARNERS: Mapping[Task, Any] = {
    "detector": DetectorLearner,
    "tags": TagLearner,
    "captions": CaptionLearner,
}
SCORED_AT_ONCE = 16  # images


def run(job: Path, say: Callable[[str], None]) -> None:
    """Raises VisiondError; MemoryError if not even a batch of one fits; torch.OutOfMemoryError."""
    order, data = read_job(job)
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = max(count_cores() // beside, 1)
    torch.set_num_threads(cores)
    torch.backends.cuda.matmul.allow_tf32 = True
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    with closing(Decoders(cores, Limits())) as decoders:
        learner = _make_learner(order, data, device)
        batches = learner.batches(TrainingImages(data.learnt, device, decoders), flip=order.flip)
        settings = order.settings
        if cuda and not settings.micro_batch:
            # Before the processes are connected: the losses of some models exchange something.
            most = min(settings.batch_size or len(batches), len(batches))
            learner.train()
            micro = measure_batch(learner, batches, device, settings.precision, settings.probe_from, most)
            settings = msgspec.structs.replace(settings, micro_batch=micro)
        join_processes(say if rank == 0 else _ignore)
        trainer = Trainer(learner, batches, settings, Path(order.work))
        held_out = TrainingImages(data.held_out, device, decoders)
        last, scored = list[Measure](), False

        def score() -> dict[str, float]:
            nonlocal scored
            scored = True
            answers = answer_all(learner, held_out, rank, processes)
            last[:] = [learner.measure(data.held_out, answers)] if rank == 0 else []
            return last[0](np.ones(len(answers))) if last else {}

        try:
            trainer.run(resume=order.resume, score=score if data.held_out else None)
            if data.held_out and not scored:  # a training that was killed after its last step
                learner.eval()
                score()
        except torch.OutOfMemoryError:
            (Path(order.work) / BATCH).write_text(str(trainer.micro_batch))
            raise
        if rank == 0:
            _finish(order, data, learner, last)
    if dist.is_initialized():
        dist.destroy_process_group()


def _make_learner(job: TrainingJob, data: Data, device: torch.device) -> Learner:
    if job.settings.deterministic:
        make_deterministic()
    torch.manual_seed(job.settings.seed)  # a new head is the same in all processes
    learner: Learner = LEARNERS[job.task](Path(job.base), data.names, device)
    if job.head_only:
        learner.freeze_body()
    if job.gradient_checkpointing:
        learner.save_memory()
    return learner


def _finish(job: TrainingJob, data: Data, learner: Learner, measures: Sequence[Measure]) -> None:
    """Save the model, and put it into the place of the result. measures: the last one, if there is one."""
    learner.save(Path(job.base), Path(job.work) / FINAL)
    ranges = [interval(measure, len(data.held_out)) for measure in measures]
    (Path(job.work) / RANGES).write_bytes(msgspec.json.encode(ranges[0] if ranges else {}))
    publish(job, data)


def answer_all(learner: Learner, pictures: TrainingImages, rank: int, processes: int) -> list[Any]:
    """The answers for all images, of which each process has its share. In all processes."""
    own = range(rank, len(pictures), processes)
    parts = (learner.answer(pictures.read(places)) for places in split_batches(own, SCORED_AT_ONCE))
    found = dict(zip(own, (answer for part in parts for answer in part), strict=True))
    everyone = [found]
    if processes > 1:
        everyone = [{} for _ in range(processes)]
        dist.all_gather_object(everyone, found)
    answers = {place: answer for part in everyone for place, answer in part.items()}
    return [answers[place] for place in range(len(pictures))]


def _ignore(_: str) -> None: ...


def main() -> None:
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
    ):  # otherwise the processes would go on when their launcher is killed
        die_with(os.getppid())
    try:
        run(Path(sys.argv[1]), lambda text: print(text, flush=True))
    except (VisiondError, ResumeError, ValueError) as error:  # sentences for people
        print(error, file=sys.stderr, flush=True)
        _leave(1)
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        _leave(OUT_OF_MEMORY)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        why = str(error).split(", but you set")[0]
        print(f"{why}: train this model without --deterministic.", file=sys.stderr, flush=True)
        _leave(1)
    except MemoryError as error:
        print(error, file=sys.stderr, flush=True)
        _leave(TOO_SMALL)


def _leave(status: int) -> None:
    """At once: the other processes wait for this one in an exchange that never comes, and so would its end."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
