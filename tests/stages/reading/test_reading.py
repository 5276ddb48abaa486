"""What each page reader promises: small models of each type that the backend takes, beside transformers' own tokens."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest
import torch

from stages.contract.base import Image, StageUnusable
from stages.contract.manifest import PackError
from stages.ocr.descriptor import READERS, Ocr
from stages.reading.stage import TILES, WARM_UP_TOKENS, ReaderStage
from stages.registry.registry import decode
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners
from tests.stages.divided import find_divided
from tests.stages.pictures import draw_image
from tests.stages.reading.stock import NEW_TOKENS, cut, make_stage, run, share_stage, share_stock, write

Make = Callable[[str], Path]
Write = Callable[[str], list[list[int]]]
# GLM-OCR's processor makes arrays of tensors in a way that numpy will no longer allow.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
KINDS = [model.type for model in READERS]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def pages() -> list[Image]:
    """Pages of five sizes; DeepSeek-OCR 2 cuts some of them into tiles."""
    sizes = [(240, 320), (37, 41), (300, 20), (90, 90), (64, 200)]
    return [draw_image(height, width, seed) for seed, (height, width) in enumerate(sizes)]


@pytest.fixture(scope="module")
def write_pages(make_reader: Make, pages: list[Image]) -> Write:
    """The tokens of all pages as one batch, by the type of a model with the default options; written once."""
    return functools.cache(lambda kind: write(share_stage(make_reader(kind)), pages))


@each_kind
def test_tokens_are_those_of_transformers(
    kind: str, make_reader: Make, write_pages: Write, pages: list[Image]
) -> None:
    folder = make_reader(kind)
    stock, stage = share_stock(folder), share_stage(folder)
    expected = [stock.write(page) for page in pages]
    assert [cut(tokens) for tokens in write_pages(kind)] == expected
    cut_short = [tokens[-1] not in captioners.ENDS for tokens in expected]
    assert {*cut_short} == {True, False}, "some must end early"
    places = [cut_short.index(True), cut_short.index(False)]
    assert run(stage, [pages[place] for place in places]) == [
        Ocr([], 0, 0.0, stock.read(expected[place]), cut_short[place]) for place in places
    ]
    assert len({tuple(tokens) for tokens in expected}) > len(expected) / 2, "they must depend on the page"


def test_lightonocr_in_its_form_of_2025_reads_the_same(
    make_reader: Make, write_pages: Write, pages: list[Image], tmp_path: Path
) -> None:
    """Its tokens for images are in processor_config.json, and the size of a patch is that before patches are merged."""
    folder = shutil.copytree(make_reader("mistral3"), tmp_path / "reader")
    tokenizer, processor = (
        json.loads((folder / name).read_text()) for name in ("tokenizer_config.json", "processor_config.json")
    )
    names = ["image_token", "image_break_token", "image_end_token"]
    tokens = {name: tokenizer.pop(name) for name in names}
    tokenizer = {key: value for key, value in tokenizer.items() if key != "extra_special_tokens"}
    images = processor.pop("image_processor") | {"image_processor_type": "PixtralImageProcessorFast"}
    for name, content in (
        ("tokenizer_config.json", tokenizer | {"additional_special_tokens": [*tokens.values()]}),
        ("processor_config.json", processor | tokens),
        ("preprocessor_config.json", images | {"patch_size": 4, "do_pad": None, "crop_size": None}),
    ):
        (folder / name).write_text(json.dumps(content))
    assert write(share_stage(folder), pages) == write_pages("mistral3")


@each_kind
def test_batch_mates_change_no_token(
    kind: str, make_reader: Make, write_pages: Write, pages: list[Image]
) -> None:
    stage = share_stage(make_reader(kind))
    alone = [cut(write(stage, [page])[0]) for page in pages]
    assert [cut(tokens) for tokens in write_pages(kind)] == alone
    assert [cut(tokens) for tokens in write(stage, pages[::-1])] == alone[::-1]


@pytest.mark.parametrize(
    ("kind", "tower", "most"),
    [("lighton_ocr", "vision_encoder.tower.transformer", 1), ("deepseek_ocr2", "vision_tower.tower", TILES)],
)
def test_a_vision_tower_reads_a_batch_in_parts(kind: str, tower: str, most: int, make_reader: Make) -> None:
    """All at once, LightOnOCR's needs memory by the square of the batch."""
    stage = share_stage(make_reader(kind))
    seen: list[torch.Size] = []
    part = stage.model.model.get_submodule(tower)
    with part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape)):
        write(stage, [draw_image(64, 48)] * 3 + [draw_image(120, 90)] * 2)
    assert len(seen) > 1
    assert max(shape[0] for shape in seen) <= most
    assert max(shape[1] for shape in seen) <= 16 * 16, "patches of one page of 64 pixels, or colors"


@each_kind
def test_a_page_has_as_many_tokens_as_allowed(kind: str, write_pages: Write) -> None:
    assert {len(tokens) for tokens in write_pages(kind)} == {NEW_TOKENS}


@pytest.mark.parametrize("kind", ["glm_ocr", "deepseek_ocr2"])
def test_the_prompt_is_what_the_model_is_asked(
    kind: str, make_reader: Make, tmp_path: Path, pages: list[Image]
) -> None:
    stock = share_stock(folder := make_reader(kind))
    asked = make_stage(folder, tmp_path, prompt="describe the image")
    expected = [stock.write(page, "describe the image") for page in pages[:2]]
    assert [cut(tokens) for tokens in write(asked, pages[:2])] == expected
    assert [cut(tokens) for tokens in write(share_stage(folder), pages[:2])] != expected


@each_kind
def test_pixels_stay_tensors(kind: str, make_reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these calls would copy them to the host."""
    stage = share_stage(make_reader(kind))
    images = [draw_image(48, 64), draw_image(100, 30)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pixels were copied to the host")

    for owner, name in ((PIL.Image, "fromarray"), (torch, "from_numpy")):
        monkeypatch.setattr(owner, name, refuse)
    assert len(write(stage, images)) == 2


@each_kind
def test_half_precision_reads_pages(kind: str, make_reader: Make, tmp_path: Path, pages: list[Image]) -> None:
    stage = make_stage(make_reader(kind), tmp_path, dtype="bfloat16")
    assert len({answer.text for answer in run(stage, pages[1:4])}) > 1


@each_kind
def test_a_spread_reader_writes_the_same_tokens(
    kind: str, make_reader: Make, tmp_path: Path, write_pages: Write, pages: list[Image]
) -> None:
    folder, group = make_reader(kind), ["cpu:0", "cpu:1"]
    spread = make_stage(folder, tmp_path, spread=group)
    assert set(spread.model.hf_device_map.values()) == set(group)
    assert not hasattr(share_stage(folder).model, "hf_device_map")
    assert write(spread, pages) == write_pages(kind)


@each_kind
def test_only_lists_of_layers_are_divided(kind: str, make_reader: Make) -> None:
    folder = make_reader(kind)
    assert find_divided(share_stage(folder).model, folder) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_kind
def test_two_gpus_write_the_same_tokens_as_one(
    kind: str, make_reader: Make, tmp_path: Path, pages: list[Image]
) -> None:
    folder, gpus = make_reader(kind), ["cuda:0", "cuda:1"]
    whole, spread = (make_stage(folder, tmp_path, device="cuda:0", spread=devices) for devices in ([], gpus))
    assert {str(weight.device) for weight in spread.model.parameters()} == set(gpus)
    assert write(spread, pages) == write(whole, pages)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_a_gpu_writes_nearly_the_same_tokens_as_a_cpu(
    kind: str, make_reader: Make, tmp_path: Path, pages: list[Image]
) -> None:
    folder = make_reader(kind)
    here, there = (write(make_stage(folder, tmp_path, device=name), pages) for name in ("cpu", "cuda:0"))
    agreeing = sum(cut(one) == cut(other) for one, other in zip(here, there, strict=True))
    assert agreeing >= 3  # sums are in another order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_half_precision_on_a_gpu_begins_most_texts_as_float32(
    kind: str, make_reader: Make, tmp_path: Path, pages: list[Image]
) -> None:
    full, half = (
        write(make_stage(make_reader(kind), tmp_path, device="cuda:0", dtype=dtype), pages)
        for dtype in ("float32", "bfloat16")
    )
    assert sum(one[0] == other[0] for one, other in zip(full, half, strict=True)) >= 3


def test_the_half_precision_of_a_reader_is_not_that_of_ppocr(make_reader: Make, tmp_path: Path) -> None:
    pack = open_pack(make_reader("glm_ocr"), tmp_path / "models")
    assert resolve(pack, "ocr", {"dtype": "half"}).dtype == "bfloat16"
    assert resolve(pack, "ocr", {"dtype": "half", "backend": "ppocr"}).dtype == "float16"


def test_a_model_of_another_stage_is_refused_and_not_ignored(tmp_path: Path) -> None:
    captioners.CAPTIONERS["blip"](folder := tmp_path / "captions")
    mini = open_pack("mini", tmp_path / "models")
    with pytest.raises(PackError, match=r"captions is a model for the stage blip, not for ocr\."):
        resolve(mini, "ocr", {"model": str(folder)})
    assert resolve(mini, "ocr", {"model": "mini"}).backend == "ppocr"


def test_the_result_of_ppocr_is_as_before() -> None:
    whole = b'{"lines":[],"count":0,"area_ratio":0.0}'
    assert msgspec.json.encode(decode("ocr", whole)) == whole
    read = b'{"lines":[],"count":0,"area_ratio":0.0,"text":"","cut":true}'
    assert msgspec.json.encode(decode("ocr", read)) == read


def test_a_warm_up_is_short_on_a_cpu_of_one_image_and_leaves_the_limit_as_it_was(
    make_reader: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    batches: list[int] = []
    generate, forward = ReaderStage.generate, ReaderStage.forward

    def count(stage: ReaderStage, *arguments: Any, **named: Any) -> torch.Tensor:
        lengths.append(stage.limits["max_new_tokens"])
        return generate(stage, *arguments, **named)

    def count_images(stage: ReaderStage, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        batches.append(len(pixels))
        return forward(stage, pixels)

    monkeypatch.setattr(ReaderStage, "generate", count)
    monkeypatch.setattr(ReaderStage, "forward", count_images)
    stage = make_stage(make_reader("paddleocr_vl"), tmp_path, max_new_tokens=500)
    assert (lengths, batches) == ([WARM_UP_TOKENS], [1])
    assert stage.limits == {"max_new_tokens": 500}


@each_kind
def test_another_class_of_the_family_is_refused_by_name(kind: str, make_reader: Make, tmp_path: Path) -> None:
    config = json.loads((make_reader(kind) / "config.json").read_text())
    [taken] = config["architectures"]
    other = taken.replace("ForConditionalGeneration", "Model")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [other]}))
    with pytest.raises(PackError, match=rf"holds a {other} .*visiond takes {taken}"):
        open_pack(tmp_path, tmp_path / "models")


def test_a_reader_without_a_chat_template_is_refused(make_reader: Make, tmp_path: Path) -> None:
    shutil.copytree(make_reader("glm_ocr"), folder := tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(StageUnusable, match=r"bare has no chat template"):
        make_stage(folder, tmp_path / "models")


def test_more_tokens_than_the_model_has_positions_are_refused(make_reader: Make, tmp_path: Path) -> None:
    with pytest.raises(StageUnusable, match=r"a text of 2100 tokens .* 2048 positions; lower max_new_tokens"):
        make_stage(make_reader("lighton_ocr"), tmp_path, max_new_tokens=2100)
