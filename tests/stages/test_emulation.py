"""The emulated recording must notice what a CUDA graph would do wrong; otherwise tests with it could not fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.stages.emulation import CannotRecord, EmulatedRecorder


def nothing() -> None:
    return


class Counter:
    def __init__(self) -> None:
        self.number, self.tensor, self.out = 0, torch.zeros(3), torch.zeros(3)

    def add_tensor(self) -> None:
        self.tensor.add_(1)
        self.out.copy_((self.tensor * 2).view(3)[:3])

    def add_number(self) -> None:
        self.number += 1
        self.out.fill_(2 * self.number)

    def add_elsewhere(self) -> None:
        self.out.copy_(2 * self.tensor)
        self.tensor = self.tensor + 1

    def read(self) -> None:
        self.out.fill_(float(self.tensor[0]))


def replay_twice(work: Callable[[Counter], None]) -> tuple[float, float]:
    counter = Counter()
    with torch.inference_mode():
        counter.tensor, counter.out = torch.zeros(3), torch.zeros(3)
        replay = EmulatedRecorder().record(lambda: work(counter), nothing)
        replay()
        first = float(counter.out[0])
        replay()
    return first, float(counter.out[0])


def test_work_on_fixed_memory_is_repeated() -> None:
    assert replay_twice(Counter.add_tensor) == (4, 6)


@pytest.mark.parametrize("work", [Counter.add_number, Counter.add_elsewhere])
def test_numbers_and_tensors_of_the_recording_are_used_again(work: Any) -> None:
    first, second = replay_twice(work)
    assert first == second


def test_a_copy_to_the_host_cannot_be_recorded() -> None:
    with pytest.raises(CannotRecord):
        replay_twice(Counter.read)
