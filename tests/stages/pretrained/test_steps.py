"""Texts of recorded steps, beside those of transformers' own `generate`. On the CPU recordings are emulated."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stages.blip.descriptor import BLIP2, FLORENCE
from stages.contract.base import DeviceLost, OutOfMemory
from stages.images.devices import hold_device, pixels_of
from stages.pretrained import keyvalues, language
from stages.pretrained.checkpoints import load_known
from stages.pretrained.language import LanguageStage
from stages.pretrained.steps import RecordedSteps, is_steady
from tests.stages import captioners
from tests.stages.emulation import CannotRecord, EmulatedRecorder, emulate_recordings
from tests.stages.pictures import draw_image
from tests.stages.pretrained import models

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NEW_TOKENS, BATCH = 12, 6
SIZES = [(90, 120), (64, 48), (80, 80), (33, 57), (20, 20), (100, 40)]
each_kind = pytest.mark.parametrize("kind", models.KINDS)


@pytest.fixture(autouse=True)
def small_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a cache becomes longer within a short text."""
    monkeypatch.setattr(keyvalues, "LENGTHS_ALIGNED_TO", 8)
    monkeypatch.setattr(language, "LARGE_SIZE", (128, 128))


@pytest.fixture
def recorder() -> Iterator[EmulatedRecorder]:
    with emulate_recordings() as recorder:
        yield recorder


def make_stage(kind: str, device: str = "cpu", batch_size: int = BATCH) -> LanguageStage:
    return models.make_stage(kind, device, batch_size=batch_size, options={"max_new_tokens": NEW_TOKENS})


def draw(stage: LanguageStage, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Tensor]:
    images = [draw_image(*size, seed + place) for place, size in enumerate(sizes)]
    return [pixels.to(stage.device) for pixels in pixels_of(images)]


def write(stage: LanguageStage, pixels: Sequence[Tensor]) -> list[list[int]]:
    with hold_device(stage.lock):
        tokens: list[list[int]] = stage.forward(pixels).tolist()
    return tokens


def steps_of(stage: LanguageStage) -> RecordedSteps:
    assert stage.steps
    return stage.steps


def check_texts(stage: LanguageStage) -> None:
    """Write batches with recorded steps, and again without them: a full one, one of one text, which has a recording
    of its own, and one that has fewer texts than its recording."""
    batches = [draw(stage, SIZES[:count], 10 * count) for count in (stage.spec.batch_size, 1, 3)]
    recorded = [write(stage, batch) for batch in batches]
    assert any(len(text) > 1 for texts in recorded for text in texts)
    stage.release_steps()
    assert [write(stage, batch) for batch in batches] == recorded


@each_kind
def test_texts_of_recorded_steps_are_transformers_own(kind: str) -> None:
    made = make_stage(kind, batch_size=5)
    if kind == "deepseek_ocr2":  # as transformers does by itself on a GPU while it decodes
        made.model.set_experts_implementation("batched_mm")
    with emulate_recordings() as recorder:
        with hold_device(made.lock):
            made.record_steps()
        steps = steps_of(made)
        assert len(steps.lengths) > 1
        assert recorder.records == len(steps.recordings) == len(steps.sizes) * len(steps.lengths)
        check_texts(made)
        assert recorder.replays > len(SIZES)


@pytest.mark.parametrize("kind", ["smolvlm", "blip-2", "glm_ocr"])
def test_steps_are_recorded_only_while_a_stage_loads(kind: str, recorder: EmulatedRecorder) -> None:
    made = make_stage(kind)
    records = recorder.records
    assert records
    for count in range(1, BATCH + 1):
        write(made, draw(made, SIZES[:count]))
    assert recorder.records == records


def test_each_token_but_the_first_is_one_replay(recorder: EmulatedRecorder) -> None:
    made = make_stage("qwen3_vl")
    before = recorder.replays
    length = len(write(made, draw(made, SIZES[:5]))[0])
    assert recorder.replays - before == length - 1


def test_a_batch_of_any_size_uses_the_next_larger_recording(recorder: EmulatedRecorder) -> None:
    made = make_stage("qwen3_vl")
    steps, used = steps_of(made), []
    for (texts, _), step in steps.recordings.items():
        vars(step)["replay"] = lambda texts=texts, replay=step.replay: (used.append(texts), replay())
    for count in range(1, BATCH + 1):
        write(made, draw(made, SIZES[:count]))
    assert list(dict.fromkeys(used)) == [1, 2, 4, 6]
    assert steps._find_size(3) == 4
    assert steps.begin(BATCH + 1, 10, NEW_TOKENS) is None, "larger than any batch of this stage"


def test_a_cache_becomes_longer_with_its_texts(recorder: EmulatedRecorder) -> None:
    made = make_stage("blip-2")
    steps = steps_of(made)
    with torch.inference_mode():
        cache = steps.begin(2, prompt=5, new_tokens=NEW_TOKENS)
    assert cache
    assert cache.get_max_length() == steps.lengths[0] == 8
    write(made, draw(made, SIZES))
    assert steps.shape.length > 8
    assert steps.memory
    assert {layer.keys.data_ptr() for layer in steps.cache.layers} == {  # type: ignore[union-attr]
        memory.keys.data_ptr() for memory in steps.memory.layers
    }


def test_a_prompt_that_is_too_long_has_the_growing_cache(recorder: EmulatedRecorder) -> None:
    made = make_stage("qwen3_vl")
    steps = steps_of(made)
    del steps.lengths[1:]
    long = draw(made, [(160, 160)] * 3)
    before = recorder.replays
    recorded = write(made, long)
    assert recorder.replays == before
    made.release_steps()
    assert write(made, long) == recorded


def test_what_a_batch_leaves_in_the_cache_changes_no_later_text(recorder: EmulatedRecorder) -> None:
    made = make_stage("qwen3_vl")
    pixels = draw(made, SIZES)
    expected = write(made, pixels)
    memory = steps_of(made).memory
    assert memory
    with torch.inference_mode():
        for layer in memory.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.inf)
    assert write(made, pixels) == expected


def fail(kind: type[Exception], text: str) -> Callable[..., Any]:
    """Each call raises an error of its own: one error would keep the calls that it has ended, and their memory."""

    def raise_error(*_: object, **__: object) -> Any:
        raise kind(text)

    return raise_error


def expect_no_steps(make: Callable[[], LanguageStage], reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        made = make()
    assert len(caught) == 1
    assert made.steps is None
    assert "get_compiled_call" not in vars(made.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(write(made, draw(made, SIZES))) == len(SIZES)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, CannotRecord])
def test_a_recording_that_fails_leaves_nothing_behind(
    error: type[Exception], recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[weakref.ref[Any]] = []
    make_cache = keyvalues.CacheMemory.make_cache

    def note(memory: Any, shape: Any) -> Any:
        memories.append(weakref.ref(memory))
        return make_cache(memory, shape)

    monkeypatch.setattr(keyvalues.CacheMemory, "make_cache", note)
    monkeypatch.setattr(recorder, "record", fail(error, "no way"))
    expect_no_steps(
        lambda: make_stage("qwen3_vl"), "blip: the steps of the model cannot be recorded .*: no way"
    )
    assert memories
    assert {memory() for memory in memories} == {None}


def test_a_model_that_transformers_would_not_compile_writes_long_texts(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_stage("qwen3_vl")
    pixels = draw(made, SIZES)
    expected = write(made, pixels)
    made.release_steps()
    monkeypatch.setattr(made.model.generation_config, "disable_compile", True)
    records = recorder.records
    with pytest.warns(RuntimeWarning, match="disable_compile") as caught, hold_device(made.lock):
        made.record_steps()
    assert len(caught) == 1
    assert (made.steps, recorder.records) == (None, records)
    assert write(made, pixels) == expected


def test_too_little_memory_for_the_shortest_cache_is_said(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "measure_free", lambda _: [4000])
    expect_no_steps(lambda: make_stage("qwen3_vl"), "a cache for 6 texts of 40 tokens needs 0 MiB")
    assert not recorder.records


def test_the_longest_cache_has_a_share_of_the_free_memory(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = steps_of(make_stage("qwen3_vl"))
    assert whole.memory
    size = sum(part.nbytes for part in whole.memory.parts)
    free = int(0.75 * size / language.CACHE_SHARE)
    monkeypatch.setattr(language, "measure_free", lambda _: [free])
    less = steps_of(make_stage("qwen3_vl"))
    assert less.lengths[-1] == int(0.75 * whole.lengths[-1]) // 8 * 8


def test_workers_of_a_device_divide_that_share(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_stage("qwen3_vl")
    memory = steps_of(made).memory
    assert memory
    size = sum(part.nbytes for part in memory.parts)
    most = steps_of(made).lengths[-1]
    monkeypatch.setattr(language, "measure_free", lambda _: [int(1.5 * size / language.CACHE_SHARE)])
    made.spec = msgspec.structs.replace(made.spec, workers=2)
    made.release_steps()
    with hold_device(made.lock):
        made.record_steps()
    assert steps_of(made).lengths[-1] == int(0.75 * most) // 8 * 8


def test_released_memory_is_no_part_of_the_reported_peak(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_stage("qwen3_vl")
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("free"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(made, "device", "cuda:0")
    made.release_steps()
    assert calls == ["free", "cuda:0"]


def test_a_lost_device_ends_the_loading(recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "record", fail(RuntimeError, "CUDA error: an illegal memory access"))
    monkeypatch.setattr(language, "synchronize", fail(RuntimeError, "CUDA error: an illegal memory access"))
    with pytest.raises(DeviceLost):
        make_stage("qwen3_vl")


def test_a_batch_that_does_not_fit_gives_the_memory_of_the_steps_back(
    recorder: EmulatedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_stage("qwen3_vl")
    pixels = draw(made, SIZES)
    expected, memory = write(made, pixels), weakref.ref(steps_of(made).memory)
    generate = made.model.generate

    def need_memory(**options: Any) -> Any:
        if memory():
            raise torch.OutOfMemoryError("no room")
        return generate(**options)

    monkeypatch.setattr(made.model, "generate", need_memory)
    with (
        pytest.warns(RuntimeWarning, match="recorded .*: no room"),
        pytest.raises(OutOfMemory),
    ):
        write(made, pixels)
    assert memory() is None
    assert write(made, pixels) == expected


def test_a_model_with_dynamic_frequencies_has_no_recorded_steps(recorder: Any) -> None:
    """As InternVL3 is published."""
    made = make_stage("internvl")
    assert is_steady(made.model)
    config = AutoConfig.for_model("qwen2", **captioners.TEXT, vocab_size=50)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    made.model.model.language_model = AutoModelForCausalLM.from_config(config).model
    made.release_steps()
    made.record_steps()
    assert not is_steady(made.model)
    assert made.steps is None


def test_a_model_with_a_sliding_window_has_no_recorded_steps() -> None:
    model = make_stage("internvl").model
    text = model.config.get_text_config(decoder=True)
    text.layer_types, text.sliding_window = ["sliding_attention"] * text.num_hidden_layers, 8
    assert not is_steady(model)


def test_a_model_on_several_devices_has_no_recorded_steps() -> None:
    model = make_stage("qwen3_vl").model
    model.hf_device_map = {"model.visual": "cuda:0", "model.language_model": "cuda:1"}
    assert not is_steady(model)


@pytest.mark.parametrize(
    "make_model",
    [captioners.CAPTIONERS["florence2"], captioners.make_blip2(captioners.T5)],
    ids=["florence2", "t5"],
)
def test_a_model_with_an_encoder_for_text_has_no_recorded_steps(
    make_model: Callable[[Path], None], tmp_path: Path
) -> None:
    make_model(folder := tmp_path / "model")
    assert not is_steady(load_known((*BLIP2, *FLORENCE), str(folder), torch.float32, "cpu"))


def test_the_cpu_records_nothing() -> None:
    assert make_stage("qwen3_vl").steps is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_a_gpu_writes_the_same_texts(kind: str) -> None:
    made = make_stage(kind, "cuda:0")
    steps = steps_of(made)
    assert len(steps.recordings) == len(steps.sizes) * len(steps.lengths)
    check_texts(made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_gets_the_memory_back() -> None:
    """In a process of its own: in this one the memory may lie between that of other tests' models, and stay reserved."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        size, allocated, reserved = pool.submit(release_steps).result()
    assert allocated >= size > 0
    assert reserved >= size


def release_steps() -> tuple[int, int, int]:
    """Bytes of a stage's recorded steps, and how much less is allocated, and was reserved at most, without them."""
    made = make_stage("qwen3_vl", "cuda:0", batch_size=64)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
    memory = steps_of(made).memory
    assert memory
    size = sum(part.nbytes for part in memory.parts)
    del memory
    made.release_steps()
    return size, allocated - torch.cuda.memory_allocated(), reserved - torch.cuda.max_memory_reserved()
