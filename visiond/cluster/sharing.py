"""How many actors share a machine. An actor of Ray sees all cores and all memory, but only its own GPUs. If each took
as many worker processes and decoders as the machine has room for, eight actors would take eight times that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def count_sharers(chains: int, gpus_per_chain: float) -> int:
    """In an actor: how many actors this machine has when all have started. gpus_per_chain: 0: on the CPU."""
    import ray

    return share_out(ray.nodes(), ray.get_runtime_context().get_node_id(), chains, gpus_per_chain)


def share_out(nodes: Sequence[Mapping[str, Any]], own: str, chains: int, gpus_per_chain: float) -> int:
    """nodes: as Ray lists them. own: the NodeID of this machine. Without GPUs, Ray may put actors on any machine; this
    assumes that it spreads them evenly."""
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    if gpus_per_chain:
        room = int(alive[own].get("GPU", 0.0) / gpus_per_chain)
        return max(1, min(chains, room))
    machines = sum(bool(resources.get("CPU")) for resources in alive.values())
    return max(1, math.ceil(chains / max(1, machines)))
