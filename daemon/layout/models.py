"""The model of each stage on this machine: its verified weights, their precision and size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from daemon.config.loading import Config
from daemon.core.errors import ConfigError, HubUnavailable, ModelsUnusable
from daemon.core.hints import command
from daemon.layout.devices import gpus_of, list_useless_groups, select_devices, used_gpus
from daemon.layout.placement import choose_batches
from daemon.system.gpus import Gpu
from stages.contract.base import StageSpec
from stages.contract.descriptor import SHARES
from stages.contract.manifest import HubBusy, Manifest, NotPulled, PackError, PackErrors, list_files
from stages.registry.registry import UnknownName, check_options
from stages.weights import packs


@contextlib.contextmanager
def pack_errors() -> Iterator[None]:
    """Turn errors of packs into ModelsUnusable."""
    try:
        yield
    except (PackError, UnknownName) as error:
        errors = error.errors if isinstance(error, PackErrors) else [error]
        kind = HubUnavailable if isinstance(error, HubBusy) else ModelsUnusable
        raise kind("\n".join(dict.fromkeys(map(explain, errors)))) from errors[0]


def explain(error: Exception) -> str:
    """The message, with the command that downloads what was not pulled."""
    pull = isinstance(error, NotPulled) and command("models", "pull", *filter(None, [error.name]))
    return f"{error} `{pull}` downloads it." if pull else str(error)


def resolve_models(config: Config, gpus: list[Gpu]) -> dict[str, StageSpec]:
    """Each stage with its verified weights. Raises ModelsUnusable, ConfigError."""
    config, gpus = choose_dtypes(config, gpus), used_gpus(config, gpus)
    batches = choose_batches(gpus, config.pipeline.prefer)
    overrides = {}
    for name in config.stage_names:
        section = getattr(config.stages, name).model_dump()
        section["batch_size"] = section["batch_size"] or batches.of_stage(name)
        overrides[name] = section
    with pack_errors():
        pack = open_pack(config, overrides.values())
        specs = packs.resolve_all(pack, config.stage_names, overrides)
    if problems := [*check_options(specs), *list_useless_groups(config, specs)]:
        raise ConfigError(problems)
    return {spec.name: spec for spec in specs}


def open_pack(config: Config, tables: Iterable[Mapping[str, Any]]) -> packs.Pack:
    """The configured pack; an empty one if all stages of these tables are fakes. Raises PackError."""
    folder = config.models.folder
    if all(table["backend"] == "fake" for table in tables):
        return packs.Pack(folder, Manifest(name="none"), folder, folder, base=config.folder)
    return packs.open_pack(config.models.pack, folder, base=config.folder)


def choose_dtypes(config: Config, gpus: Sequence[Gpu]) -> Config:
    """The configuration with a dtype for each stage, which fits all GPUs that it names. How much of their memory
    is free does not matter: a start must not change the fingerprints of results. Raises ConfigError."""
    selected = select_devices(config, gpus, by_memory=False)
    named = used_gpus(selected, gpus)
    sections = {name: getattr(config.stages, name) for name in config.stage_names}
    chosen = {
        name: section.model_copy(update={"dtype": natural_dtype(named)})
        for name, section in sections.items()
        if section.dtype == "auto"
    }
    looks = [
        table.model_copy(update={"dtype": natural_dtype(gpus_of(found, selected, gpus))})
        if table.dtype == "auto"
        else table
        for table, found in zip(config.second_look, selected.second_look, strict=True)
    ]
    stages = config.stages.model_copy(update=chosen)
    return config.model_copy(update={"stages": stages, "second_look": looks})


def natural_dtype(gpus: Sequence[Gpu]) -> str:
    """float32 on a CPU; on GPUs the backend's own half precision ("half") if all have bfloat16 (compute capability
    8.0, Ampere)."""
    if not gpus:
        return "float32"
    return "half" if all(float(gpu.compute_capability) >= 8.0 for gpu in gpus) else "float16"


def weights_of(specs: Iterable[StageSpec]) -> dict[str, int]:
    """Bytes of weights by stage: the sizes of their files, which are in half precision if weights are made smaller."""

    def measure(spec: StageSpec) -> int:
        return sum(file.stat().st_size for path in spec.files.values() for file in list_files(Path(path)))

    return {spec.name: int(measure(spec) * SHARES.get(spec.dtype, 1)) for spec in specs}
