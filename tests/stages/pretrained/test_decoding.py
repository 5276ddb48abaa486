"""Texts with a cache of a fixed size, beside those of transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from stages import registry
from stages.blip.descriptor import BLIP2, FLORENCE
from stages.devices import pixels_of
from stages.pretrained.checkpoints import load_known
from stages.pretrained.decoding import LENGTHS, Decoder, is_steady
from stages.pretrained.language import LanguageStage
from stages.registry import STAGES
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners, readers
from tests.stages.pictures import draw_image

Make = Callable[..., LanguageStage]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NEW_TOKENS = 20
KINDS = [
    (stage, model.type)
    for stage, backend in [("blip", "chat"), ("blip", "blip2"), ("ocr", "reader")]
    for model in STAGES[stage].backends[backend].models
]
SIZES = [(90, 120), (64, 48), (80, 80), (33, 57)]


@pytest.fixture
def make_stage(tmp_path: Path) -> Make:
    def make(stage: str, kind: str, device: str = "cpu") -> LanguageStage:
        {**captioners.CAPTIONERS, **readers.READERS}[kind](folder := tmp_path / "model")
        settings = {
            "dtype": "float32",
            "batch_size": len(SIZES),
            "options": {"max_new_tokens": NEW_TOKENS},
        }
        made = registry.build(resolve(open_pack(folder, tmp_path / "none"), stage, settings), device)
        assert isinstance(made, LanguageStage)
        made.load()
        return made

    return make


def write(stage: LanguageStage, seed: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[list[int]]:
    images = [draw_image(*size, seed + place) for place, size in enumerate(sizes)]
    with torch.inference_mode():
        tokens: list[list[int]] = stage.forward(
            [each.to(stage.device) for each in pixels_of(images)]
        ).tolist()
    return tokens


def record_on_cpu(stage: LanguageStage) -> Decoder:
    """As speed_up_steps does on a GPU."""
    stage.decoder = Decoder(stage.model, NEW_TOKENS)
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True  # transformers' own would do so only on a GPU
    stage.decoder.step.model.generation_config.compile_config = compile_config
    return stage.decoder


@pytest.mark.parametrize(("stage", "kind"), KINDS)
def test_texts_of_recorded_steps_are_transformers_own(stage: str, kind: str, make_stage: Make) -> None:
    made = make_stage(stage, kind)
    expected = [write(made, seed) for seed in (0, 10)]
    assert is_steady(made.model)
    decoder = record_on_cpu(made)
    assert [write(made, seed) for seed in (0, 10)] == expected
    assert len(decoder.step.calls) == 1


def test_a_batch_that_is_not_full_needs_no_cache(make_stage: Make) -> None:
    made = make_stage("blip", "qwen3_vl")
    expected = write(made, 0, SIZES[:3])
    decoder = record_on_cpu(made)
    assert write(made, 0, SIZES[:3]) == expected
    assert decoder.cache is None


def test_a_longer_prompt_gets_a_longer_cache(make_stage: Make, monkeypatch: Any) -> None:
    made = make_stage("blip", "qwen3_vl")
    small = [(16, 16)] * len(SIZES)
    expected = [write(made, 0, small), write(made, 0)]
    monkeypatch.setattr("stages.pretrained.decoding.LENGTHS", 1)
    decoder = record_on_cpu(made)
    first, length = write(made, 0, small), decoder.length
    assert [first, write(made, 0)] == expected
    assert decoder.length > length
    assert len(decoder.step.calls) == 1, "those on the old cache are forgotten"


def test_caches_have_few_lengths(make_stage: Make) -> None:
    decoder = Decoder(make_stage("blip", "qwen3_vl").model, NEW_TOKENS)
    assert {decoder.clear_cache(prompt).get_max_length() for prompt in (1, 50, LENGTHS - NEW_TOKENS)} == {
        LENGTHS
    }


@pytest.mark.parametrize(
    "make_model",
    [captioners.CAPTIONERS["florence2"], captioners.make_blip2(captioners.T5)],
    ids=["florence2", "t5"],
)
def test_a_model_with_an_encoder_for_text_has_no_such_steps(
    make_model: Callable[[Path], None], tmp_path: Path
) -> None:
    make_model(folder := tmp_path / "model")
    assert not is_steady(load_known((*BLIP2, *FLORENCE), str(folder), torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("stage", "kind"), KINDS)
def test_graphs_write_the_same_texts(stage: str, kind: str, make_stage: Make) -> None:
    made = make_stage(stage, kind, "cuda:0")
    assert made.decoder
    recorded = [write(made, seed) for seed in (0, 10)]
    assert made.decoder.step.calls
    made.decoder = None
    assert [write(made, seed) for seed in (0, 10)] == recorded
