"""The commands `visiond train detector`, `tags` and `captions`."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from daemon.core.errors import MissingLibrary, NotWritable, WrongArgument
from daemon.core.hints import command
from daemon.system.gpus import Gpu, list_gpus
from daemon.system.signals import INTERRUPTED
from daemon.terminal.display import errors, print_warning, printable
from daemon.terminal.options import ConfigOption, WandbOption, check_trackers, flag, option, read_config
from daemon.terminal.progress import LATE_SECONDS, Progress
from visiond.training.settings import TrainingPlace

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from visiond.training.data import Data
    from visiond.training.job import Task, TrainingJob

train_app = typer.Typer(
    help="Train models on your own labels, or the demonstration pack.\n\n"
    "Examples:\n  visiond train detector --base rf-detr-small --out my-detector",
    no_args_is_help=True,
)
ABOUT = """{first}

The labels are those of `visiond labels import`, or with --labels those
of a file that it reads: COCO, YOLO, Label Studio or CSV. A tenth of the
images, chosen by digest, is held out, and the model is scored on it after
each epoch. All GPUs are used. After a kill or a power failure, --resume
continues as if nothing had happened. The work is in the folder DIR-work.

Examples:
  visiond train {task} --base {base} --out my-model
  visiond train {task} --out my-model --resume
  visiond train {task} --base {base} --labels {labels} --out mine"""
TEXTS = {
    "detector": (
        "Train a detector for the stage YOLO on boxes: RF-DETR, D-FINE and others.",
        "rf-detr-small",
        "coco.json",
    ),
    "tags": (
        "Train CLIP or SigLIP for the stage CLIP to give images your tags.",
        "siglip2-b16-224",
        "tags.csv",
    ),
    "captions": (
        "Train BLIP or Florence-2 for the stage BLIP to write captions like yours.",
        "blip-base",
        "captions.csv",
    ),
}
FURTHER = {"detector": ("pycocotools", "scipy")}  # libraries besides accelerate
Precision = Literal["auto", "bf16", "fp16", "fp32"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """As typed; None: by default."""

    base: str
    out: Path
    labels: Path | None
    images: Path | None
    head_only: bool
    flip: bool
    epochs: float | None
    batch: int | None
    learning_rate: float | None
    held_out: float
    precision: str
    gradient_checkpointing: bool
    seed: int
    deterministic: bool
    trackers: tuple[str, ...]
    resume: bool

    @property
    def work(self) -> Path:
        return self.out.with_name(f"{self.out.name}-work")


OutOption = Annotated[Path, option("--out DIR", "The folder of the trained model.")]
BaseOption = Annotated[
    str, option("--base MODEL", "A name of `visiond models list`, or a folder, to begin with.")
]
LabelsOption = Annotated[Path | None, option("--labels FILE", "Labels that were not imported.")]
ImagesOption = Annotated[
    Path | None, option("--images FOLDER", "Where the names in FILE start from. Default: its folder.")
]
HeadOption = Annotated[bool, flag("--head-only", "Leave the rest of the model as it is.")]
FlipOption = Annotated[bool, flag("--flip", "Mirror half of the images: not where left and right differ.")]
EpochsOption = Annotated[float | None, option("--epochs N", "How often all images are seen.")]
BatchOption = Annotated[int | None, option("--batch N", "Images of a step, on all GPUs together.", min=1)]
RateOption = Annotated[float | None, option("--learning-rate X", "The highest one; it rises and falls.")]
HeldOutOption = Annotated[float, option("--held-out SHARE", "Of the images, for the scores.", min=0, max=1)]
GpusOption = Annotated[str, option("--gpus LIST", "Such as 0,2. Default: all.")]
ProcessesOption = Annotated[int, option("--processes N", "On a machine without GPUs.", min=1)]
PrecisionOption = Annotated[Precision, option("--precision TYPE", "bf16, fp16, fp32 or auto.")]
SavingOption = Annotated[bool, flag("--gradient-checkpointing", "Need less memory and more time.")]
SeedOption = Annotated[int, option("--seed N", "Of all random choices.")]
DeterministicOption = Annotated[
    bool,
    flag(
        "--deterministic", "The same weights in every run, on GPUs too, with as many images at once; slower."
    ),
]
BoardOption = Annotated[bool, flag("--tensorboard", "Also write its files, into DIR-work.")]
ResumeOption = Annotated[bool, flag("--resume", "Continue, with the same labels and options.")]
ForceOption = Annotated[bool, flag("--force", "Replace DIR if a training made it.")]
PrepareOption = Annotated[
    bool, flag("--prepare", "Only write DIR-work/job.json, for torchrun on several hosts.")
]


def _make_command(task: Task) -> Callable[..., None]:
    def train_task(
        out: OutOption,
        base: BaseOption = "",
        labels: LabelsOption = None,
        images: ImagesOption = None,
        head_only: HeadOption = False,
        flip: FlipOption = False,
        epochs: EpochsOption = None,
        batch: BatchOption = None,
        learning_rate: RateOption = None,
        held_out: HeldOutOption = 0.1,
        gpus: GpusOption = "",
        processes: ProcessesOption = 1,
        precision: PrecisionOption = "auto",
        gradient_checkpointing: SavingOption = False,
        seed: SeedOption = 1,
        deterministic: DeterministicOption = False,
        tensorboard: BoardOption = False,
        wandb: WandbOption = False,
        resume: ResumeOption = False,
        force: ForceOption = False,
        prepare: PrepareOption = False,
        config: ConfigOption = None,
    ) -> None:
        if any(number is not None and number <= 0 for number in (epochs, learning_rate)):
            raise WrongArgument("--epochs and --learning-rate must be greater than 0.")
        options = Options(
            base=base,
            out=Path(os.path.abspath(out)),
            labels=labels,
            images=images,
            head_only=head_only,
            flip=flip,
            epochs=epochs,
            batch=batch,
            learning_rate=learning_rate,
            held_out=held_out,
            precision={"fp32": "no"}.get(precision, precision),
            gradient_checkpointing=gradient_checkpointing,
            seed=seed,
            deterministic=deterministic,
            trackers=("tensorboard",) * tensorboard + ("wandb",) * wandb,
            resume=resume,
        )
        places = choose_places(list_gpus(), gpus, processes)
        settings = read_config(config, needs_stages=False)
        train_own(task, options, settings, places, force=force, prepare=prepare)

    first, base, labels = TEXTS[task]
    train_task.__doc__ = ABOUT.format(first=first, task=task, base=base, labels=labels)
    return train_task


for _task in TEXTS:
    train_app.command(_task)(_make_command(_task))  # type: ignore[arg-type]


def choose_places(gpus: Sequence[Gpu], wanted: str, processes: int) -> list[TrainingPlace]:
    """The GPUs; without any, the CPU. Raises WrongArgument."""
    named = {gpu.number: TrainingPlace(gpu.uuid, f"GPU {gpu.number} ({gpu.name})") for gpu in gpus}
    numbers = list(filter(None, map(str.strip, wanted.split(","))))
    if unknown := [number for number in numbers if number not in named]:
        there = f"There are {', '.join(named)}." if named else "There is no GPU here."
        raise WrongArgument(f"--gpus {wanted}: no GPU has the number {unknown[0]}. {there}")
    return [named[number] for number in numbers or named] or [TrainingPlace("", "the CPU")] * processes


def train_own(
    task: Task,
    options: Options,
    config: Config,
    places: Sequence[TrainingPlace],
    *,
    force: bool,
    prepare: bool,
) -> None:
    """Raises VisiondError."""
    from visiond.training.children import InUse
    from visiond.training.job import JOB, STAGES, check_base, read_job
    from visiond.training.launch import prepare_for_torchrun, train

    check_out(options.out, force=force or options.resume)
    # Only the processes import them.
    for name in ("accelerate", *FURTHER.get(task, ())):
        if find_spec(name) is None:
            raise MissingLibrary(f"Training needs {name}: pip install 'visiond[train]'")
    check_trackers(options.trackers)
    if options.resume:
        if not (options.work / JOB).is_file():
            raise WrongArgument(
                f"there is no training to resume in {options.work}; start it without --resume."
            )
        job, data = read_job(options.work / JOB)
        job = msgspec.structs.replace(job, resume=True)
    else:
        check_base(task, options.base, config.models.folder)
        data = find_data(task, options, config)
        job = make_job(task, options, config, data, len(places))
    _say(data.describe())
    try:
        if prepare:
            file = prepare_for_torchrun(job, data)
            _say(f"Wrote {file}: {job.settings.batch_size} images in a step, on all GPUs together (--batch).")
            _say(f"On each host, type: torchrun --nnodes … --node-rank … -m visiond.training.run {file}")
            return
        _say(f"Training on {', '.join(name for _, name in places)}; work in {job.work}.")
        train(job, data, places, _say)
    except InUse as error:
        raise WrongArgument(str(error)) from error
    except (KeyboardInterrupt, SystemExit):
        again = command("train", task, "--out", options.out, "--resume")
        errors.print(printable(f"Stopped. `{again}` continues it."))
        raise
    forget(Path(job.out), config.models.folder)  # its files are others now, and that is right
    _say(f"\n{options.out} has the model. To use it, write into daemon.toml:\n\n    [stages.{STAGES[task]}]")
    _say(f'    model = "{options.out}"\n')
    trial = command("compare", "--stage", STAGES[task], "--model", options.out)
    _say(f"`{trial}` shows what it would change, before any result is replaced.")


def forget(path: Path, models_folder: Path) -> None:
    """Remove the records of a folder without a manifest, after it was replaced on purpose. Raises OSError."""
    from stages.weights.packs import lock_of

    first = lock_of(path, models_folder)
    for lock in first.parent.glob(f"{glob.escape(first.stem)}*.json"):
        lock.unlink(missing_ok=True)


def check_out(out: Path, *, force: bool) -> None:
    """Raises NotWritable if the result would replace something."""
    from visiond.training.card import is_made_by_training

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_made_by_training(out):
        raise NotWritable(f"{out} exists and is not of a training; name a new folder.")
    if not force:
        raise NotWritable(f"{out} already exists; name another folder, or replace it with --force.")


def find_data(task: Task, options: Options, config: Config) -> Data:
    """Raises WrongArgument if there is nothing to learn."""
    from daemon.labels.store import LabelStore
    from daemon.ledger.records import open_reader
    from visiond.training.data import check, read_file, read_store
    from visiond.training.job import KINDS

    if options.labels:
        folder = options.images or (options.labels if options.labels.is_dir() else options.labels.parent)
        _say("Decoding each image once, so that a broken one does not stop the training later.")
        try:
            with Progress("images", after=LATE_SECONDS) as progress:
                data = read_file(options.labels, folder, KINDS[task], options.held_out, progress.step)
        except KeyboardInterrupt:
            errors.print("Stopped before the training began; nothing was written.")
            raise typer.Exit(INTERRUPTED) from None
    else:
        with open_reader(config) as reader:
            data = read_store(LabelStore(config.state.path), reader, KINDS[task], options.held_out)
    for why, number in data.left_out.items():
        print_warning(f"Left out: {why} ({number:,}).")
    check(data)
    return data


def make_job(task: Task, options: Options, config: Config, data: Data, processes: int) -> TrainingJob:
    """Raises ModelsUnusable."""
    from visiond.training.job import DEFAULTS, TrainingJob, find_base

    folder, name = find_base(task, options.base, config.models.folder)
    default = DEFAULTS[task]
    changes: dict[str, Any] = {"epochs": options.epochs, "learning_rate": options.learning_rate}
    settings = msgspec.structs.replace(
        default,
        batch_size=min(options.batch or default.batch_size * processes, len(data.learnt)),
        precision=options.precision,
        seed=options.seed,
        deterministic=options.deterministic,
        trackers=options.trackers,
        project=options.out.name,
        **{key: value for key, value in changes.items() if value is not None},
    )
    return TrainingJob(
        task=task,
        base=folder,
        base_name=name,
        out=str(options.out),
        work=str(options.work),
        settings=settings,
        head_only=options.head_only,
        gradient_checkpointing=options.gradient_checkpointing,
        flip=options.flip,
    )


def _say(text: str) -> None:
    print(text, flush=True)
