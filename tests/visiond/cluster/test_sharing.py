"""How many actors share a machine."""

from __future__ import annotations

from typing import Any

import pytest

from visiond.cluster.pool import share_out


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


HEAD = node("head", memory=1.0)  # takes no actors
MIXED = [HEAD, node("eight", CPU=64, GPU=8), node("one", CPU=8, GPU=1), node("dead", alive=False, CPU=8)]


@pytest.mark.parametrize(
    ("own", "chains", "gpus_per_chain", "sharers"),
    [
        ("eight", 9, 1.0, 8),
        ("one", 9, 1.0, 1),
        ("eight", 4, 2.0, 4),
        ("eight", 3, 1.0, 3),  # Ray may put all of them here
        ("one", 18, 0.5, 2),
        ("one", 2, 0.0, 1),  # on the CPU, one for each machine
        ("one", 5, 0.0, 3),
    ],
)
def test_an_actor_knows_how_many_there_are_on_its_machine(
    own: str, chains: int, gpus_per_chain: float, sharers: int
) -> None:
    assert share_out(MIXED, own, chains, gpus_per_chain) == sharers
