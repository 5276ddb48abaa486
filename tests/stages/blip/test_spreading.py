"""Models whose layers lie on several devices: pretended ones on the CPU, and two GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, SmolVLMForConditionalGeneration

from stages.blip.captions import CaptionStage
from stages.blip.descriptor import BLIP
from stages.contract.base import Image, OutOfMemory, StageUnusable
from stages.contract.descriptor import Backend
from stages.pretrained import spreading
from tests.stages.blip.stock import make_stage, share_stage, write
from tests.stages.divided import find_divided

Make = Callable[[str], Path]
GROUP = ["cpu:0", "cpu:1"]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def kinds(backends: dict[str, Backend]) -> list[str]:
    """The types of all models that can be spread."""
    return [model.type for backend in backends.values() if backend.can_spread for model in backend.models]


each_kind = pytest.mark.parametrize("kind", kinds(dict(BLIP.backends)))


def model_of(stage: CaptionStage) -> PreTrainedModel:
    model: PreTrainedModel = stage.model  # type: ignore[attr-defined]
    return model


def hooked(stage: CaptionStage) -> dict[str, nn.Module]:
    """The modules whose input is moved to their device, by name."""
    return {name: module for name, module in model_of(stage).named_modules() if hasattr(module, "_hf_hook")}


@each_kind
def test_a_spread_model_writes_the_same_tokens(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    images = mixed_images[2:6]
    folder = make_captioner(kind)
    whole, spread = share_stage(folder), make_stage(folder, tmp_path, spread=GROUP)
    places = model_of(spread).hf_device_map
    assert set(places.values()) == set(GROUP)
    assert {name for name in places if dict(model_of(spread).named_modules()).get(name)} <= hooked(
        spread
    ).keys()
    assert not hooked(whole)
    assert not hasattr(model_of(whole), "hf_device_map")
    assert write(spread, images) == write(whole, images)


def test_an_encoder_and_decoder_are_spread_likewise(
    with_t5: Path, tmp_path: Path, mixed_images: list[Image]
) -> None:
    whole, spread = share_stage(with_t5), make_stage(with_t5, tmp_path, spread=GROUP)
    assert set(model_of(spread).hf_device_map.values()) == set(GROUP)
    assert write(spread, mixed_images) == write(whole, mixed_images)


@each_kind
def test_only_lists_of_layers_are_divided(kind: str, make_captioner: Make) -> None:
    """Other modules add or multiply the outputs of their parts, which must be on one device."""
    folder = make_captioner(kind)
    assert find_divided(model_of(share_stage(folder)), folder) == []


def test_layers_that_transformers_does_not_name_stay_whole(make_captioner: Make) -> None:
    model = model_of(share_stage(make_captioner("smolvlm")))
    assert isinstance(model, SmolVLMForConditionalGeneration)
    assert spreading.find_whole(model) >= {"SmolVLMEncoderLayer", "LlamaDecoderLayer"}


def test_weights_that_do_not_fit_into_the_free_memory_are_refused(
    make_captioner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreading, "measure_free", lambda devices: [50_000] * len(devices))
    with pytest.raises(
        OutOfMemory, match=r"out of memory: the weights in .*blip-2 need 0 MiB, and there is room"
    ):
        make_stage(make_captioner("blip-2"), tmp_path, spread=GROUP)


def test_missing_weights_are_found_in_a_spread_model_too(with_t5: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(with_t5, folder := tmp_path / "blip-2")
    weights = load_file(folder / "model.safetensors")
    del weights["language_projection.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        StageUnusable, match=r"1 of its weights are missing .* language_projection.weight first"
    ):
        make_stage(folder, tmp_path / "models", spread=GROUP)


@pytest.mark.gpu
@TWO_GPUS
@each_kind
def test_two_gpus_write_the_same_tokens_as_one(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    gpus = ["cuda:0", "cuda:1"]
    whole, spread = (
        make_stage(make_captioner(kind), tmp_path, spread=devices, device="cuda:0") for devices in ([], gpus)
    )
    model = model_of(spread)
    assert {str(weight.device) for weight in model.parameters()} == set(gpus)
    assert set(model.hf_device_map.values()) == set(gpus)
    assert write(spread, mixed_images) == write(whole, mixed_images)
