"""Recordings of GPU work: of single images, and beside garbage of earlier models."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from stages.contract.base import Image, StageSpec
from stages.pretrained.recording import CudaRecorder, Recorded, recording_single, without_collection
from stages.registry import registry
from stages.weights.packs import Pack, resolve
from tests.stages.emulation import emulate_recordings
from tests.stages.pictures import draw_image

SINGLE = StageSpec("clip", "transformers", single=True)


@pytest.fixture
def pictures() -> list[Image]:
    """Of usual proportions."""
    return [draw_image(640, 480, seed) for seed in range(3)]


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


@pytest.mark.parametrize("stage", ["yolo", "clip", "blip"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_stage_for_single_images_answers_each_as_before(
    stage: str, blank_pack: Pack, pictures: list[Image]
) -> None:
    settings = {"dtype": "float32", "batch_size": 4}
    specs = resolve(blank_pack, stage, settings), replace(resolve(blank_pack, stage, settings), single=True)
    for image in pictures:
        image.pixels = image.pixels.to("cuda:0") if image.pixels is not None else None
    plain, single = (registry.build(spec, "cuda:0") for spec in specs)
    plain.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single.load()
    assert [single.run([image]) for image in pictures] == [plain.run([image]) for image in pictures]
    assert single.run(pictures) == plain.run(pictures)


@pytest.mark.parametrize("stage", ["yolo", "clip", "blip"])
def test_a_stage_for_single_images_records_the_work_on_one(
    stage: str, blank_pack: Pack, pictures: list[Image]
) -> None:
    spec = resolve(blank_pack, stage, {"dtype": "float32", "batch_size": 4})
    plain = registry.build(spec, "cpu")
    with emulate_recordings() as recorder:
        plain.load()
        assert recorder.records == 0
        single = registry.build(replace(spec, single=True), "cpu")
        single.load()
        recorded, replays = recorder.records, recorder.replays
        assert recorded
        for count, image in enumerate(pictures, replays + 1):
            assert single.run([image]) == plain.run([image])
            assert recorder.replays == count
        assert single.run(pictures) == plain.run(pictures)
        assert (recorder.records, recorder.replays) == (recorded, replays + len(pictures))


def test_only_single_images_are_recorded_and_only_while_a_stage_loads() -> None:
    double = Recorded(lambda batch: 2 * batch)
    with emulate_recordings() as recorder:
        double(torch.ones(1, 3))
        with recording_single(SINGLE, "cpu"):
            double(torch.ones(2, 3))
        with recording_single(replace(SINGLE, single=False), "cpu"):
            double(torch.ones(1, 3))
        assert recorder.records == 0
        with recording_single(SINGLE, "cpu"):
            double(torch.ones(1, 3))
        assert recorder.records == 1
        assert torch.equal(double(torch.full((1, 3), 4.0)), torch.full((1, 3), 8.0))
        assert torch.equal(double(torch.ones(1, 5)), torch.full((1, 5), 2.0))
        assert (recorder.records, recorder.replays) == (1, 2)


def test_work_that_cannot_be_recorded_runs_as_before() -> None:
    def shift(batch: Tensor) -> Tensor:
        return batch + batch.max().item()

    work = Recorded(shift)
    with (
        emulate_recordings(),
        pytest.warns(RuntimeWarning, match="cannot be recorded .*copies to the host") as caught,
    ):
        with recording_single(SINGLE, "cpu"):
            work(torch.ones(1, 3))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(work(torch.ones(1, 3)), torch.full((1, 3), 2.0))
