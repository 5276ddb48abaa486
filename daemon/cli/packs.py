"""The packs in the models folder and those that the configuration names, each with the stages that use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.config.loading import Config
from daemon.errors import ModelsUnusable
from daemon.layout import pack_errors
from stages.weights import packs
from stages.weights.packs import Pack


@dataclass(frozen=True)
class Shelf:
    packs: list[tuple[Pack, list[str]]]  # each with the stages that use it
    problems: list[str]  # a sentence for each configured pack that cannot be used


def list_shelf(config: Config) -> Shelf:
    """Raises ModelsUnusable when a pack in the models folder has an invalid manifest."""
    found: dict[tuple[Path, str], tuple[Pack, list[str]]] = {}
    with pack_errors():
        for name in packs.list_packs(config.models.folder):
            pack = packs.open_pack(name, config.models.folder)
            found[pack.folder, pack.name] = pack, []
    problems = []
    for name, stages in name_weights(config).items():
        try:
            with pack_errors():
                pack = packs.open_pack(name, config.models.folder, record=False)
        except ModelsUnusable as error:
            problems.append(str(error))
            continue
        _, used = found.setdefault((pack.folder, pack.name), (pack, []))
        used += [stage for stage in stages if stage in pack.manifest.stages]
    return Shelf(list(found.values()), problems)


def name_weights(config: Config) -> dict[str, list[str]]:
    """Names and paths of weights in the configuration, each with the stages that use them."""
    named: dict[str, list[str]] = {}
    for stage in config.stage_names:
        section = getattr(config.stages, stage)
        if section.backend != "fake":
            named.setdefault(section.model or config.models.pack, []).append(stage)
    return named
