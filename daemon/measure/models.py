"""The rates of models alone: `visiond bench --models`. Each one runs in its own process, so that none leaves memory to
the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from daemon.core.errors import VisiondError
from daemon.layout.models import natural_dtype, pack_errors, weights_of
from daemon.measure.place import Place, Report, describe_run, run_module
from daemon.system.gpus import list_gpus
from stages.contract.base import StageSpec
from stages.registry.registry import STAGES, find_backend
from stages.weights import packs

ALL = "all"
GPU_BATCHES, CPU_BATCHES = (1, 8, 32, 64, 128), (1, 4, 16)
GAIN = 1.03  # a larger batch must be faster by this factor, or no larger one is tried
IMAGES = 32  # different ones; larger batches repeat them


class RateRequest(msgspec.Struct, frozen=True):
    """What a child process is to measure. seconds: for each batch size, at least."""

    spec: StageSpec
    device: str
    images: list[str]
    batch_sizes: tuple[int, ...]
    seconds: float


class ModelRate(msgspec.Struct, frozen=True):
    batch_size: int
    images_per_second: float


class Measurement(msgspec.Struct, frozen=True):
    """problem: why there is no rate, or no more of them. memory_bytes: the most that the GPU's tensors took; of a CPU,
    what the process took in the end."""

    rates: list[ModelRate] = []
    load_seconds: float = 0.0
    memory_bytes: int = 0
    problem: str = ""

    @property
    def best(self) -> ModelRate | None:
        return max(self.rates, key=lambda rate: rate.images_per_second, default=None)


class MeasuredModel(msgspec.Struct, frozen=True):
    """A measured model. file_bytes: of its weights and settings."""

    name: str
    stage: str
    backend: str
    dtype: str
    file_bytes: int
    measurement: Measurement


class ModelsReport(Report, frozen=True, kw_only=True):
    device: str
    models: list[MeasuredModel]


def measure_models(
    place: Place,
    names: Sequence[str],
    models_folder: Path,
    *,
    seconds: float = 3.0,
    progress: Callable[[str], object] = lambda _: None,
) -> ModelsReport:
    """Measure each stage of each of these packs, folders or models ("all": those in the models folder), on the first
    GPU, or on the CPU if there is none. Raises ModelsUnusable."""
    gpus = list_gpus()[:1]
    device = gpus[0].device if gpus else "cpu"
    specs = list(find_specs(names, models_folder, natural_dtype(gpus)))
    images = [str(path) for path in place.make_images(IMAGES)]
    models = []
    for number, (name, spec) in enumerate(specs, 1):
        progress(f"{number} of {len(specs)}: {name}, {spec.name}")
        order = RateRequest(spec, device, images, GPU_BATCHES if gpus else CPU_BATCHES, seconds)
        size = weights_of([msgspec.structs.replace(spec, dtype="")])[spec.name]
        models.append(MeasuredModel(name, spec.name, spec.backend, spec.dtype, size, measure(order)))
    return ModelsReport(**describe_run(), device=device, models=models)


def find_specs(names: Sequence[str], models_folder: Path, dtype: str) -> Iterator[tuple[str, StageSpec]]:
    """The stages of these packs, folders and models, each with the name by which it was asked for; of "all" also those
    whose weights a library contains. Raises ModelsUnusable."""
    every = list(names) == [ALL]
    with pack_errors():
        for name in packs.list_packs(models_folder) if every else names:
            pack = packs.open_pack(name, models_folder)
            for stage, entry in pack.manifest.stages.items():
                if find_backend(stage, entry.backend).needs_weights:
                    yield name, packs.resolve(pack, stage, {"dtype": dtype})
        mini = packs.open_pack("mini", models_folder)
        for stage, descriptor in STAGES.items() if every else ():
            for name, backend in descriptor.backends.items():
                if backend.bundled:
                    yield name, packs.resolve(mini, stage, {"backend": name, "dtype": dtype})


def measure(order: RateRequest, module: str = "daemon.measure.alone") -> Measurement:
    """What a module prints that reads the order in a process of its own."""
    try:
        printed = run_module(module, task=msgspec.msgpack.encode(order))
        return msgspec.json.decode(printed.splitlines()[-1], type=Measurement)
    except VisiondError as error:
        return Measurement(problem=str(error))
