"""One training as a process: `python -m visiond_mini.job JOB.json`, or `accelerate launch -m` of the same.

The recipe starts its trainings in this way, in parallel. Started by
`accelerate launch --num_processes N` or torchrun, one training uses N GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import msgspec
import torch

from stages.contract.folders import remove_folder
from stages.contract.processes import die_with
from stages.weights.published import Models, Vocabulary
from visiond.training.hardware import TrainingBatches, make_accelerator, make_deterministic
from visiond.training.settings import CHECKPOINTS, TrainerSettings
from visiond.training.trainer import Trainer
from visiond_mini import mini
from visiond_mini.cache import COLOR_NAMES
from visiond_mini.dataset import Examples
from visiond_mini.learners import BlipBatches, BlipLearner, ClipBatches, ClipLearner, Learner

FINAL = "final"  # the trained weights in a job's folder
WEIGHTS = "weights"  # the detector's weights from ultralytics
THREADS = 2  # on a CPU; a process with a GPU does not need more either


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """folder: for log, checkpoints and weights. examples: their folder. stop_after: the step to stop at;
    0: none."""

    kind: Literal["clip", "blip"]
    folder: str
    examples: str
    settings: TrainerSettings
    smoothing: float = 0.0  # of BLIP's labels
    resume: bool = False
    stop_after: int = 0


class DetectorJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of detector.py. dataset: a data.yaml. seconds, epochs: the first that is reached ends it;
    0: no limit."""

    folder: str
    dataset: str
    seed: int = 1
    batch_size: int = 256
    seconds: float = 0
    epochs: int = 0
    learning_rate: float = 2e-3
    workers: int = 8
    resume: bool = False


def forget_training(folder: Path) -> None:
    """Remove an earlier training's files from a job's folder, so that they are not resumed or put into a pack."""
    for name in (FINAL, WEIGHTS, CHECKPOINTS):
        remove_folder(folder / name)


def run_job(job: TrainingJob) -> None:
    """Train. Raises ValueError for examples of another size, or with tags or captions that the models cannot learn."""
    torch.set_num_threads(THREADS)
    if job.settings.deterministic:
        make_deterministic()
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerator = make_accelerator(job.settings.precision, job.settings.trackers, Path(job.folder))
    if not job.resume and accelerator.is_main_process:
        forget_training(Path(job.folder))
    torch.manual_seed(job.settings.seed)
    vocabulary, sizes = Vocabulary.of_scenes(), mini.Sizes()
    models = mini.make_models(job.settings.seed, vocabulary, sizes)
    examples = Examples(Path(job.examples), accelerator.device)
    if examples.edge != sizes.image_size:
        raise ValueError(
            f"the images in {job.examples} are {examples.edge} pixels wide, but the models take {sizes.image_size}: "
            f"write them again with edge={sizes.image_size}."
        )
    learner, batches = make_learner(job, models, examples)
    trainer = Trainer(learner, batches, job.settings, Path(job.folder))
    trainer.run(resume=job.resume, stop_after=job.stop_after)
    if trainer.schedule.done and accelerator.is_main_process:
        learner.save(Path(job.folder) / FINAL)


def make_learner(job: TrainingJob, models: Models, examples: Examples) -> tuple[Learner, TrainingBatches]:
    names = (len(models.vocabulary.classes), len(COLOR_NAMES))
    if job.kind == "blip":
        return BlipLearner(models.blip, names, job.smoothing), BlipBatches(examples, models.blip_tokenizer)
    batches = ClipBatches(examples, models.clip_tokenizer, models.vocabulary.labels)
    return ClipLearner(models.clip, batches.prompts, names), batches


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # otherwise the ranks would go on when their launcher is killed
        die_with(os.getppid())
    run_job(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrainingJob))


if __name__ == "__main__":
    main()
