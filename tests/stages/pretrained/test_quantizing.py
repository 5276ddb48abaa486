"""Models with smaller weights: small ones of each type that can have them."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stages.blip.descriptor import BLIP
from stages.clip.descriptor import CLIP, Clip
from stages.clip.embeddings import decode_embedding
from stages.contract.base import Image, StageUnusable
from stages.contract.descriptor import SMALL
from stages.contract.manifest import PackError
from stages.ocr.descriptor import OCR
from stages.pretrained.quantizing import LANGUAGE_MODEL, refuse_quantized
from stages.registry import registry
from stages.registry.registry import STAGES
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners, checkpoints, readers
from tests.stages.checkpoints import Make, made_once
from tests.stages.pictures import draw_image

MAKERS = {**captioners.CAPTIONERS, **readers.READERS, **checkpoints.TOWERS}
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def kinds(dtype: str, *stages: str) -> list[tuple[str, str]]:
    """The stage and the type of each model whose weights can have this dtype."""
    return [
        (name, model.type)
        for name in stages or STAGES
        for backend in STAGES[name].backends.values()
        if dtype in backend.small
        for model in backend.models
    ]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(tmp_path_factory.mktemp("models"), lambda kind, folder: MAKERS[kind](folder))


@pytest.fixture
def images() -> list[Image]:
    return [
        draw_image(height, width, seed)
        for seed, (height, width) in enumerate([(90, 120), (64, 48), (80, 80)])
    ]


def on_gpu(image: Image) -> Image:
    assert image.pixels is not None
    return dataclasses.replace(image, pixels=image.pixels.cuda())


def load(
    stage: str, folder: Path, dtype: str, device: str = "cpu", spread: tuple[str, ...] = (), **options: Any
) -> Any:
    chosen = {} if stage == "clip" else {"max_new_tokens": 4}
    settings = {"dtype": dtype, "batch_size": 4, "options": chosen | options}
    spec = resolve(open_pack(folder, folder.parent / "none"), stage, settings)
    loaded = registry.build(msgspec.structs.replace(spec, spread=list(spread)), device)
    loaded.load()
    return loaded


@functools.cache
def share(stage: str, folder: Path, dtype: str) -> Any:
    """Loaded once in a process. A test must not change it."""
    return load(stage, folder, dtype)


def model_of(stage: Any) -> nn.Module:
    model: nn.Module = stage.model if hasattr(stage, "model") else stage.vision
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize(("stage", "kind"), kinds("int8"))
def test_int8_weights_are_within_half_a_step_of_the_models_own(
    stage: str, kind: str, make_folder: Make
) -> None:
    whole, small = (
        linear_layers(model_of(share(stage, make_folder(kind), dtype))) for dtype in ("bfloat16", "int8")
    )
    made_small = {name for name, layer in small.items() if type(layer.weight) is not nn.Parameter}
    assert len(made_small) >= len(whole) - 2, "but the last one, which scores words"
    for name in made_small:
        weight = whole[name].weight.float()
        stored: Any = small[name].weight
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        assert stored.qdata.dtype == torch.int8
        assert ((stored.dequantize().float() - weight).abs() <= step * 0.6 + weight.abs() * 2**-7).all()


@pytest.mark.parametrize(("stage", "kind"), kinds("int8", "clip"))
def test_embeddings_of_int8_weights_are_near_those_of_bfloat16(
    stage: str, kind: str, make_folder: Make, images: list[Image]
) -> None:
    folder = make_folder(kind)
    answers = [load(stage, folder, dtype, labels=["a", "b"]).run(images) for dtype in ("bfloat16", "int8")]
    for one, other in zip(*answers, strict=True):
        assert isinstance(one, Clip)
        assert (
            F.cosine_similarity(decode_embedding(one.embedding), decode_embedding(other.embedding), dim=0)
            > 0.999
        )


@pytest.mark.parametrize(("stage", "kind"), kinds("int8", "ocr", "blip"))
def test_models_with_int8_weights_write_texts(
    stage: str, kind: str, make_folder: Make, images: list[Image]
) -> None:
    """Those of random models differ from the whole model's: all words are nearly as likely."""
    answers = share(stage, make_folder(kind), "int8").run(images)
    assert [type(answer) for answer in answers] == [STAGES[stage].result] * len(images)


@pytest.mark.parametrize("kind", ["blip-2", "qwen3_vl"])
def test_a_spread_model_can_have_smaller_weights(kind: str, make_folder: Make, images: list[Image]) -> None:
    group = ("cpu:0", "cpu:1")
    whole = share("blip", make_folder(kind), "int8")
    spread = load("blip", make_folder(kind), "int8", spread=group)
    assert set(spread.model.hf_device_map.values()) == set(group)
    assert spread.run(images) == whole.run(images)


def test_smaller_weights_change_nothing_else_in_the_process(make_folder: Make) -> None:
    """torchao would change how all kernels are compiled."""
    from torch._inductor import config

    before = config.get_config_copy()
    load("blip", make_folder("qwen3_vl"), "int8")
    assert config.get_config_copy() == before


@pytest.mark.parametrize("dtype", ["float8", "int4"])
def test_a_cpu_is_refused_where_it_has_no_kernels(dtype: str, make_folder: Make) -> None:
    with pytest.raises(
        StageUnusable, match=rf'"{dtype}" needs an NVIDIA GPU .* cpu is none; set dtype = "int8"'
    ):
        load("blip", make_folder("qwen3_vl"), dtype)


@pytest.mark.parametrize(
    ("stage", "dtype", "reason"),
    [
        (
            "yolo",
            "int8",
            'stages.yolo.dtype: the model of the backend ultralytics does not support dtype "int8". It supports "float32", '
            '"float16", "bfloat16", "half" and "auto". Set dtype = "auto" under [stages.yolo].',
        ),
        (
            "blip",
            "int8",
            '(BlipForConditionalGeneration) does not support dtype "int8". It supports "float32", ',
        ),
        (
            "clip",
            "int4",
            '(CLIPModel) does not support dtype "int4". It supports "int8", "float8", "float32", ',
        ),
    ],
)
def test_smaller_weights_of_a_model_that_has_none_are_refused_with_the_dtypes_that_it_takes(
    stage: str, dtype: str, reason: str
) -> None:
    with pytest.raises(PackError) as refused:
        resolve(open_pack("mini", Path("none")), stage, {"dtype": dtype})
    assert reason in str(refused.value)


def test_weights_that_are_quantized_already_are_refused(make_folder: Make, tmp_path: Path) -> None:
    shutil.copytree(make_folder("qwen3_vl"), folder := tmp_path / "qwen")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    message = r"are quantized \(fp8\), which visiond does not read; take the model's"
    with pytest.raises(PackError, match=message):
        load("blip", folder, "bfloat16")
    with pytest.raises(StageUnusable, match=message):
        refuse_quantized(str(folder), config)


def test_every_stage_with_a_language_model_has_all_dtypes() -> None:
    backends = [OCR.backends["reader"], BLIP.backends["chat"], BLIP.backends["blip2"]]
    assert {backend.small for backend in backends} == {SMALL}
    assert CLIP.backends["transformers"].small == ("int8", "float8")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("stage", "kind"), kinds("float8"))
def test_a_gpu_answers_with_float8_weights(
    stage: str, kind: str, make_folder: Make, images: list[Image]
) -> None:
    loaded = load(stage, make_folder(kind), "float8", "cuda:0")
    small = [
        layer for layer in linear_layers(model_of(loaded)).values() if type(layer.weight) is not nn.Parameter
    ]
    assert small
    assert {cast(Any, layer.weight).qdata.dtype for layer in small} == {torch.float8_e4m3fn}
    answers = loaded.run([on_gpu(image) for image in images])
    assert [type(answer) for answer in answers] == [STAGES[stage].result] * len(images)


@pytest.mark.gpu
@GPU
def test_only_the_language_model_has_int4_weights(
    tmp_path: Path, images: list[Image], monkeypatch: Any
) -> None:
    monkeypatch.setitem(captioners.TEXT, "hidden_size", 128)  # these weights are packed by 128
    vision = {"embed_dim": 32, "hidden_size": 128, "mlp_ratio": 2}
    captioners.make_qwen("Qwen2VL", vision, {"mrope_section": [8, 4, 4]})(folder := tmp_path / "qwen")
    loaded = load("blip", folder, "int4", "cuda:0")
    small = [
        name for name, layer in linear_layers(loaded.model).items() if type(layer.weight) is not nn.Parameter
    ]
    assert small
    assert all(LANGUAGE_MODEL in name.split(".") for name in small)
    answers = loaded.run([on_gpu(image) for image in images])
    assert [type(answer) for answer in answers] == [BLIP.result] * len(images)
