"""Recordings on the CPU, with the properties of CUDA graphs that matter: the same operations on the same memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation import CompileConfig, GenerationMixin

from stages.pretrained import language, recording

TO_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class CannotRecord(RuntimeError):
    """As of a CUDA graph, if the work waits for the device."""


@dataclass(frozen=True)
class Operation:
    """An operation with the same tensors and numbers that it was called with. made: results in memory of their own,
    which it writes again; later operations read them there."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: dict[int, Tensor]

    def repeat(self) -> None:
        results = tree_leaves(self.function(*self.arguments, **self.options))
        for place, tensor in self.made.items():
            tensor.copy_(results[place])


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in TO_HOST:
            raise CannotRecord(f"{function} copies to the host")
        options = kwargs or {}
        if function._can_decompose():  # its parts may copy to the host
            with self:
                return function.decompose(*args, **options)
        known = {place_of(tensor) for tensor in tensors_of((args, options))}
        results = function(*args, **options)
        made = {
            number: tensor
            for number, tensor in enumerate(tree_leaves(results))
            if isinstance(tensor, Tensor) and place_of(tensor) not in known
        }
        if made or function._schema.is_mutable:  # others only look at memory in another way
            self.operations.append(Operation(function, args, options, made))
        return results


class EmulatedRecorder:
    """records: how many recordings it made. replays: how often they were repeated."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def record(self, work: Callable[[], object], rewind: Callable[[], object]) -> Callable[[], None]:
        rewind()
        with (tape := Tape()):
            work()
        rewind()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            for operation in tape.operations:
                operation.repeat()

        return replay


def tensors_of(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def emulate_recordings() -> Iterator[EmulatedRecorder]:
    """Stages on the CPU record their steps, and transformers uses the recordings."""
    recorder = EmulatedRecorder()
    decide = GenerationMixin._valid_auto_compile_criteria

    def decide_as_on_a_gpu(model: Any, inputs: dict[str, Any], config: Any) -> bool:
        as_on_a_gpu = copy.copy(config)
        as_on_a_gpu.compile_config = CompileConfig()
        as_on_a_gpu.compile_config._compile_all_devices = True
        decided: bool = decide(model, inputs, as_on_a_gpu)
        return decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "0")  # transformers sets it; this puts it back
        for module in (language, recording):
            patch.setattr(module, "choose_recorder", lambda _: recorder)
        patch.setattr(GenerationMixin, "_valid_auto_compile_criteria", decide_as_on_a_gpu)
        yield recorder
