"""One training: its base, its data and its options, as the command writes them for its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind
from daemon.layout.models import pack_errors
from stages.contract.manifest import Manifest
from stages.contract.recognition import name_model
from stages.weights import names
from stages.weights.catalog import find_backend
from stages.weights.packs import Pack, find_entry, open_pack, resolve
from stages.yolo.descriptor import OF_ANY_SHAPE
from visiond.training.data import Data
from visiond.training.settings import TrainerSettings

Task = Literal["detector", "tags", "captions"]
KINDS: dict[Task, Kind] = {"detector": Kind.OBJECTS, "tags": Kind.TAGS, "captions": Kind.CAPTION}
STAGES: dict[Task, str] = {"detector": "yolo", "tags": "clip", "captions": "blip"}  # that take the result
DEFAULTS: dict[Task, TrainerSettings] = {
    "detector": TrainerSettings(batch_size=16, epochs=12, learning_rate=1e-4, clip_norm=0.1, log_every=10),
    "tags": TrainerSettings(batch_size=64, epochs=6, learning_rate=1e-5, log_every=10),
    "captions": TrainerSettings(batch_size=32, epochs=6, learning_rate=2e-5, log_every=10),
}
TRAINED = {"transformers", "florence"}  # backends whose models can be
JOB, DATA = "job.json", "data.json"  # in the folder of the work
FINAL = "final"  # the trained model, there
RANGES = "ranges.json"  # of the last scores
# How a process ends when memory is short, so that the command can do something about it; and when another process has ended.
TOO_SMALL, OUT_OF_MEMORY, LOST = 71, 72, 73


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """base: the folder with the model to begin with. base_name: what people call it. out: the folder of the result. work: the
    folder for data, log and checkpoints. head_only, gradient_checkpointing, flip: as the options of the command."""

    task: Task
    base: str
    base_name: str
    out: str
    work: str
    settings: TrainerSettings
    head_only: bool = False
    gradient_checkpointing: bool = False
    flip: bool = False
    resume: bool = False


def check_base(task: Task, name: str, models_folder: Path) -> None:
    """Called before the labels are read and a model is pulled, which would be in vain. Writes nothing. Raises ModelsUnusable,
    WrongArgument."""
    if not name:
        raise WrongArgument(
            "--base says which model to begin with: a folder, or a name that "
            f"`visiond models list --stage {STAGES[task]}` shows."
        )
    stage, published = STAGES[task], names.parse(name)
    if published and published.entry and published.entry.stage == stage and not Path(name).exists():
        backend, kind = find_backend(published.entry), ""
    else:
        with pack_errors():
            pack, entry = find_entry(
                open_pack(name, models_folder, record=False, stage=stage, base=Path.cwd()), stage
            )
            backend, kind = entry.backend, ""
            if backend in TRAINED:
                kind, _ = name_model(pack.folder / entry.files["model"])
    why = "" if backend in TRAINED else f"it is of the backend {backend}"
    if kind in OF_ANY_SHAPE:
        why = f'models of its model_type, "{kind}", take images of any shape'
    if why:
        raise WrongArgument(f"{name} cannot be trained: {why}. docs/training.md lists what can be.")


def find_base(task: Task, name: str, models_folder: Path) -> tuple[str, str]:
    """The folder of a model, and what people call it. Raises ModelsUnusable."""
    with pack_errors():
        nothing = Pack(models_folder, Manifest(name="none"), models_folder, models_folder, base=Path.cwd())
        spec = resolve(nothing, STAGES[task], {"model": name})
    return spec.files["model"], spec.provenance.title or name


def write_job(job: TrainingJob, data: Data) -> Path:
    """Returns the job's file."""
    folder = Path(job.work)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA).write_bytes(msgspec.json.encode(data))
    return rewrite_job(job)


def rewrite_job(job: TrainingJob) -> Path:
    file = Path(job.work) / JOB
    file.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
    return file


def halve_batch(job: TrainingJob, had: int) -> None:
    """Rewrite the job so that it goes on from its last checkpoint with half as many images at once. All processes of a training
    may do this: they write the same."""
    settings = msgspec.structs.replace(job.settings, micro_batch=had // 2)
    rewrite_job(msgspec.structs.replace(job, settings=settings, resume=True))


def read_training_job(file: Path) -> TrainingJob:
    return msgspec.json.decode(file.read_bytes(), type=TrainingJob)


def read_job(file: Path) -> tuple[TrainingJob, Data]:
    job = read_training_job(file)
    return job, msgspec.json.decode((Path(job.work) / DATA).read_bytes(), type=Data)
