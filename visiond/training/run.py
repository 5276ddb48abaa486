"""One process of a training: `python -m visiond.training.run JOB.json`. `visiond train` starts one for each GPU; for GPUs of
several hosts, torchrun starts them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import chain
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
from visiond.training.hardware import (
    TrainingBatches,
    is_of_peer,
    join_processes,
    make_deterministic,
    measure_batch,
)
from visiond.training.job import (
    FINAL,
    LOST,
    OUT_OF_MEMORY,
    RANGES,
    TOO_SMALL,
    Task,
    TrainingJob,
    halve_batch,
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
PEER_LOST = (
    "Another process of this training has ended, or cannot be reached; its output says why. "
    "Start all of them again: the training goes on from its last checkpoint."
)


def run(file: Path, say: Callable[[str], None]) -> None:
    """Raises VisiondError; MemoryError if not even a batch of one fits; torch.OutOfMemoryError."""
    job, data = read_job(file)
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
        learner = _make_learner(job, data, device)
        batches = learner.batches(TrainingImages(data.learnt, device, decoders), flip=job.flip)
        # Before the processes are connected: the losses of some models exchange something.
        micro = _find_micro_batch(job, learner, batches, device)
        settings = msgspec.structs.replace(job.settings, micro_batch=micro)
        join_processes(say if rank == 0 else lambda _: None)
        trainer = Trainer(learner, batches, settings, Path(job.work))
        exam = Exam(learner, TrainingImages(data.held_out, device, decoders), rank, processes)
        try:
            trainer.run(resume=job.resume, score=exam.score if data.held_out else None)
            if data.held_out and not exam.is_over:  # a training that was killed after its last step
                learner.eval()
                exam.score()
        except torch.OutOfMemoryError:
            _halve(job, trainer.micro_batch)
            raise
        if rank == 0:
            _finish(job, data, learner, exam.measure)
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


def _find_micro_batch(
    job: TrainingJob, learner: Learner, batches: TrainingBatches, device: torch.device
) -> int:
    """As many examples in a pass as fit into a GPU's memory, unless the job says how many."""
    settings = job.settings
    if settings.micro_batch or device.type != "cuda":
        return settings.micro_batch
    most = min(settings.batch_size or len(batches), len(batches))
    learner.train()
    return measure_batch(learner, batches, device, settings.precision, settings.probe_from, most)


def _halve(job: TrainingJob, had: int) -> None:
    if had > 1:
        halve_batch(job, had)
        print(
            f"Memory ran out. Start the training again: it goes on with {had // 2} images at once.",
            file=sys.stderr,
        )


def _finish(job: TrainingJob, data: Data, learner: Learner, measure: Measure | None) -> None:
    """Save the model, and put it into the place of the result. measure: of the last scores, if there are any."""
    learner.save(Path(job.base), Path(job.work) / FINAL)
    ranges = interval(measure, len(data.held_out)) if measure else {}
    (Path(job.work) / RANGES).write_bytes(msgspec.json.encode(ranges))
    publish(job, data)


class Exam:
    """Scores a model on the images that are held out. measure: of the last time, in the first process."""

    def __init__(self, learner: Learner, pictures: TrainingImages, rank: int, processes: int) -> None:
        self.learner, self.pictures, self.rank, self.processes = learner, pictures, rank, processes
        self.is_over = False
        self.measure: Measure | None = None

    def score(self) -> dict[str, float]:
        """Called in all processes. Figures by name, in the first process."""
        self.is_over = True
        answers = self._answer_all()
        if self.rank:
            return {}
        self.measure = self.learner.measure(self.pictures.samples, answers)
        return self.measure(np.ones(len(answers)))

    def _answer_all(self) -> list[Any]:
        """The answers for all images, of which each process has its share. In all processes."""
        own = range(self.rank, len(self.pictures), self.processes)
        batches = map(self.pictures.read, split_batches(own, SCORED_AT_ONCE))
        found = dict(zip(own, chain.from_iterable(map(self.learner.answer, batches)), strict=True))
        everyone = [found]
        if self.processes > 1:
            everyone = [{} for _ in range(self.processes)]
            dist.all_gather_object(everyone, found)
        answers = {place: answer for part in everyone for place, answer in part.items()}
        return [answers[place] for place in range(len(self.pictures))]


def main() -> None:
    # Otherwise the processes would go on when their launcher is killed.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    try:
        run(Path(sys.argv[1]), lambda text: print(text, flush=True))
    except (VisiondError, ResumeError, ValueError) as error:  # sentences for people
        _leave(error, 1)
    except torch.OutOfMemoryError as error:
        _leave(error, OUT_OF_MEMORY)
    except RuntimeError as error:
        _leave_for(error)
        raise
    except MemoryError as error:
        _leave(f"{socket.gethostname()}, GPU {os.environ.get('LOCAL_RANK', '0')}: {error}", TOO_SMALL)


def _leave_for(error: RuntimeError) -> None:
    """If people can do something about it."""
    if is_of_peer(error):
        _leave(f"{PEER_LOST}\n({str(error).splitlines()[0]})", LOST)
    if "deterministic" in str(error):
        why = str(error).split(", but you set")[0]
        _leave(f"{why}: train this model without --deterministic.", 1)


def _leave(why: object, status: int) -> None:
    """At once: the other processes wait for this one in an exchange that never comes, and so would its end."""
    print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
