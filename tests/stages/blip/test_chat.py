from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from stages.blip.descriptor import CHAT
from stages.contract.base import Image, StageUnusable
from stages.pretrained.language import ask, load_chat_processor
from tests.stages.blip.stock import make_stage, share_stage, share_stock, write
from tests.stages.pictures import draw_image

Make = Callable[[str], Path]
QUESTION = "What does the image describe?"
each_kind = pytest.mark.parametrize("kind", [model.type for model in CHAT])


@each_kind
def test_the_prompt_is_what_the_model_is_asked(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stock = share_stock(folder := make_captioner(kind))
    expected = [stock.cut(stock.write(image, stock.ask(QUESTION))) for image in mixed_images[:4]]
    asked = make_stage(folder, tmp_path, prompt=QUESTION)
    assert [stock.cut(tokens) for tokens in write(asked, mixed_images[:4])] == expected
    by_default = write(share_stage(folder), mixed_images[:4])
    assert [stock.cut(tokens) for tokens in by_default] != expected


@each_kind
def test_pixels_stay_tensors(kind: str, make_captioner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these calls would copy them to the host."""
    stage, images = share_stage(make_captioner(kind)), [draw_image(48, 64), draw_image(100, 30)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pixels were copied to the host")

    def refuse_pixels(tensor: torch.Tensor, *_: object, **__: object) -> Any:
        """Numbers of tokens may be copied."""
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:
            refuse()
        return np.array(tensor.tolist())

    for owner, name in ((PIL.Image, "fromarray"), (torch, "from_numpy")):
        monkeypatch.setattr(owner, name, refuse)
    for name in ("__array__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse_pixels)
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
    with pytest.raises(
        StageUnusable, match=r"a caption of 2100 tokens .* 2048 positions; lower max_new_tokens"
    ):
        make_stage(make_captioner("internvl"), tmp_path, max_new_tokens=2100)


def in_json(file: str, form: Callable[[str], object]) -> Callable[[Path, str], None]:
    """Puts a template into a JSON file."""

    def put(folder: Path, template: str) -> None:
        place = folder / file
        content = json.loads(place.read_text()) if place.is_file() else {}
        place.write_text(json.dumps(content | {"chat_template": form(template)}))

    return put


def in_a_folder(folder: Path, template: str) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/images.jinja").write_text(template)


def as_list(template: str) -> list[dict[str, str]]:
    return [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": template}]


@pytest.mark.parametrize(
    "put",
    [
        in_json("tokenizer_config.json", str),
        in_json("tokenizer_config.json", as_list),
        in_json("processor_config.json", str),
        in_json("chat_template.json", str),
        in_json("chat_template.json", as_list),
        # transformers does not close the file
        pytest.param(
            in_a_folder, marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
        ),
    ],
)
@pytest.mark.parametrize("kind", ["smolvlm", "internvl"])
def test_a_chat_template_is_found_wherever_models_have_it(
    kind: str, put: Callable[[Path, str], None], make_captioner: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_captioner(kind), tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    put(folder, template)
    asked = [ask(load_chat_processor(str(each)), QUESTION, "") for each in (folder, make_captioner(kind))]
    assert asked[0] == asked[1]
    assert QUESTION in asked[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['role'] }}", "it has no place for an image"),
        (
            [{"name": "one", "template": "1"}, {"name": "two", "template": "2"}],
            "several chat templates, one, two,",
        ),
    ],
)
def test_a_chat_template_without_a_place_for_images_and_several_without_a_default_are_refused(
    template: object, message: str, make_captioner: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_captioner("smolvlm"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    in_json("tokenizer_config.json", lambda _: template)(folder, "")
    with pytest.raises(StageUnusable, match=message):
        ask(load_chat_processor(str(folder)), QUESTION, str(folder))
