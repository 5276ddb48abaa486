"""What `visiond ray run` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from daemon.config.loading import Config


class Shards(StrEnum):
    """What a tar beside each part has."""

    none = ""
    sidecars = "sidecars"
    images = "images"  # and their sidecars


@dataclass(frozen=True)
class ClusterJob:
    """A run as its user ordered it. address: of a Ray cluster, or "local". chains: actors; 0: one for each GPU, or without
    GPUs one for each machine. part_images: inputs of a unit. keep: further columns, as `--keep` names them.
    float16: embeddings in half precision."""

    source: str
    output: str
    config: Config
    resume: bool = False
    address: str = "local"
    chains: int = 0
    gpus_per_chain: float = 1.0
    cpus_per_chain: float = 1.0
    part_images: int = 1000
    column: str = ""
    keep: tuple[str, ...] = ()
    keep_all: bool = False
    shards: Shards = Shards.none
    float16: bool = False
