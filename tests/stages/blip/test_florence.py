from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import ones

from stages.contract.base import Image, StageUnusable
from stages.contract.manifest import PackError
from stages.weights.packs import open_pack
from tests.stages.blip.stock import make_stage, share_stage, share_stock, write

Make = Callable[[str], Path]


@pytest.mark.parametrize(
    ("task", "text"), [("detailed", "<DETAILED_CAPTION>"), ("more detailed", "<MORE_DETAILED_CAPTION>")]
)
def test_a_task_is_the_prompt_that_the_processor_knows_for_it(
    task: str, text: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stock = share_stock(folder := make_captioner("florence2"))
    expected = [stock.cut(stock.write(image, text)) for image in mixed_images]
    detailed = write(make_stage(folder, tmp_path, task=task), mixed_images)
    assert [stock.cut(tokens) for tokens in detailed] == expected
    short = write(share_stage(folder), mixed_images)
    assert [stock.cut(tokens) for tokens in short] != expected


def test_an_unknown_task_is_refused_with_those_that_exist(make_captioner: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='write "caption" or "detailed" or "more detailed"'):
        make_stage(make_captioner("florence2"), tmp_path, task="poem")


def test_weights_that_need_remote_code_are_refused(make_captioner: Make, tmp_path: Path) -> None:
    """microsoft/Florence-2-base has the same class and model_type, but other names of weights."""
    shutil.copytree(make_captioner("florence2"), folder := tmp_path / "older")
    save_file({"image_pos_embed.row_embeddings.weight": ones(2)}, folder / "model.safetensors")
    with pytest.raises(PackError, match=r"older Florence-2 that needs remote code .* florence-community"):
        open_pack(folder, tmp_path / "models")


def test_more_tokens_than_the_model_has_positions_are_refused(make_captioner: Make, tmp_path: Path) -> None:
    with pytest.raises(
        StageUnusable, match=r"a caption of 128 tokens after 1 others .* 128 positions; lower max_new_tokens"
    ):
        make_stage(make_captioner("florence2"), tmp_path, max_new_tokens=128)
