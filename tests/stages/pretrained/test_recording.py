"""Recordings of GPU work, beside garbage of earlier models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from stages.pretrained.recording import CudaRecorder, without_collection


class Model:
    """With a reference to itself, as a model has whose `generate` calls its recorded steps."""

    def __init__(self, held: object = None) -> None:
        self.itself, self.held = self, held


@pytest.fixture
def collect_often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)


def make_objects() -> None:
    assert len([[] for _ in range(1000)]) == 1000


def test_no_garbage_is_collected_during_a_recording(collect_often: None) -> None:
    with without_collection():
        model = weakref.ref(Model())
        make_objects()
        assert model() is not None
    make_objects()
    assert model() is None


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_graphs_of_an_earlier_model_end_no_recording(collect_often: None) -> None:
    recorder, total = CudaRecorder("cuda:0"), torch.zeros(1, device="cuda:0")

    def add() -> None:
        make_objects()
        total.add_(1)

    gc.disable()  # until the recording begins
    Model(recorder.record(add, total.zero_))
    gc.enable()
    replay = recorder.record(add, total.zero_)
    replay()
    assert total.item() == 1
