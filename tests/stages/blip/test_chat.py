from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
import torch

from stages.base import Image, StageUnusable
from stages.blip.chat import ChatStage
from stages.blip.descriptor import CHAT
from stages.devices import pixels_of
from tests.stages.blip.stock import Stock, make_stage, write
from tests.stages.pictures import draw_image

Make = Callable[[str], Path]
QUESTION = "What does the image describe?"
each_kind = pytest.mark.parametrize("kind", [model.type for model in CHAT])


@each_kind
def test_the_prompt_is_what_the_model_is_asked(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stock = Stock(folder := make_captioner(kind))
    expected = [stock.cut(stock.write(image, stock.ask(QUESTION))) for image in mixed_images[:4]]
    asked = make_stage(folder, tmp_path, prompt=QUESTION)
    assert [stock.cut(tokens) for tokens in write(asked, mixed_images[:4])] == expected
    by_default = write(make_stage(folder, tmp_path), mixed_images[:4])
    assert [stock.cut(tokens) for tokens in by_default] != expected


@each_kind
def test_pixels_stay_tensors(
    kind: str, make_captioner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each of these calls would copy them to the host."""
    stage, images = make_stage(make_captioner(kind), tmp_path), [draw_image(48, 64), draw_image(100, 30)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pixels were copied to the host")

    for owner, name in ((PIL.Image, "fromarray"), (torch, "from_numpy")):
        monkeypatch.setattr(owner, name, refuse)
    for name in ("__array__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert len(write(stage, images)) == 2


def test_a_model_without_a_chat_template_is_refused(make_captioner: Make, tmp_path: Path) -> None:
    shutil.copytree(make_captioner("smolvlm"), folder := tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(StageUnusable, match=r"base has no chat template .*-Instruct"):
        make_stage(folder, tmp_path / "models")


def test_a_chat_template_that_fails_is_reported(make_captioner: Make, tmp_path: Path) -> None:
    shutil.copytree(make_captioner("qwen3_vl"), folder := tmp_path / "broken")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no images') }}")
    with pytest.raises(StageUnusable, match=r"the chat template in .*broken cannot be used: no images"):
        make_stage(folder, tmp_path / "models")


def test_more_tokens_than_the_model_has_positions_are_refused(make_captioner: Make, tmp_path: Path) -> None:
    with pytest.raises(StageUnusable, match=r"2100 new ones .* 2048 positions; lower max_new_tokens"):
        make_stage(make_captioner("internvl"), tmp_path, max_new_tokens=2100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_a_gpu_writes_nearly_the_same_captions_as_a_cpu(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    here = make_stage(make_captioner(kind), tmp_path)
    there = ChatStage(here.spec, "cuda:0")
    there.load()
    with torch.inference_mode():
        tokens = there.forward([pixels.cuda() for pixels in pixels_of(mixed_images)]).tolist()
    agreeing = sum(one == other for one, other in zip(write(here, mixed_images), tokens, strict=True))
    assert agreeing >= 5  # Lanczos is bicubic on a GPU, and sums are in another order
