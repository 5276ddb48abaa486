from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.core.errors import WrongArgument
from daemon.layout.recorded import CARDS, RATES, find_rates, read_gpus
from tests.test_house import ROOT


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("H200", ["H200-141GB"]),
        ("4xA100-40GB", ["A100-40GB"] * 4),
        ("2 x a100 80 GB", ["A100-80GB"] * 2),
        ("A100", ["A100-40GB"]),
        ("2xH100, L4", ["H100-80GB", "H100-80GB", "L4-24GB"]),
        ("RTX 4090", ["RTX4090-24GB"]),
        ("NVIDIA T4", ["T4-16GB"]),
    ],
)
def test_a_machine_is_described_in_a_few_letters(text: str, names: list[str]) -> None:
    gpus = read_gpus(text)
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.device for gpu in gpus] == [f"cuda:{index}" for index in range(len(names))]
    assert all(gpu.free_bytes == gpu.total_bytes == int(gpu.name[:-2].split("-")[1]) * 10**9 for gpu in gpus)


@pytest.mark.parametrize("text", ["", "4x", "0xA100", "4xB9000", "A100-41GB", "A100;rm", "-1xA100"])
def test_an_unknown_machine_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(WrongArgument, match="--gpus") as error:
        read_gpus(text)
    assert error.value.exit_status == os.EX_USAGE


def test_rates_are_those_of_the_documentation() -> None:
    """What is not in the documentation was not measured."""
    document = (ROOT / Path("docs/performance.md")).read_text()
    for rate in RATES:
        assert f"{rate.images_per_second:,}" in document
        assert rate.card in CARDS


def test_the_rate_of_the_same_cards_is_shown_or_that_of_one_or_none() -> None:
    assert [rate.gpus for rate in find_rates(read_gpus("2xH200"))] == [2]
    assert [rate.gpus for rate in find_rates(read_gpus("8xH200"))] == [1]
    assert find_rates(read_gpus("4xA100")) == []
    assert find_rates(read_gpus("H200,L4")) == []
    assert find_rates([]) == []
