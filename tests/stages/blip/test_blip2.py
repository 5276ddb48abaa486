from __future__ import annotations

import json
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
PROMPT = "a photo of"


def test_a_caption_continues_the_prompt(
    make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stock = share_stock(folder := make_captioner("blip-2"))
    expected = [stock.cut(stock.write(image, PROMPT)) for image in mixed_images]
    tokens = write(make_stage(folder, tmp_path, prompt=PROMPT), mixed_images)
    assert [stock.cut(row) for row in tokens] == expected
    assert [stock.cut(row) for row in write(share_stage(folder), mixed_images)] != expected


@pytest.mark.parametrize("prompt", [None, PROMPT])
def test_tokens_of_an_encoder_and_decoder_are_those_of_transformers(
    prompt: str | None, with_t5: Path, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stock = share_stock(with_t5)
    expected = [stock.cut(stock.write(image, prompt)) for image in mixed_images]
    stage = make_stage(with_t5, tmp_path, prompt=prompt) if prompt else share_stage(with_t5)
    assert [stock.cut(tokens) for tokens in write(stage, mixed_images)] == expected
    assert len({tuple(tokens) for tokens in expected}) > 3


def test_a_language_model_without_a_first_token_begins_with_the_prompt(
    with_t5: Path, tmp_path: Path, mixed_images: list[Image]
) -> None:
    """As transformers 5 saves T5."""
    shutil.copytree(with_t5, folder := tmp_path / "t5")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["bos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with_first, without = (
        write(make_stage(each, tmp_path / "models", prompt=PROMPT), mixed_images)
        for each in (with_t5, folder)
    )
    assert with_first == without


def test_a_processor_without_the_number_of_queries_still_sees_the_images(
    make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    shutil.copytree(make_captioner("blip-2"), folder := tmp_path / "old")
    settings = json.loads((folder / "processor_config.json").read_text())
    del settings["num_query_tokens"]
    (folder / "processor_config.json").write_text(json.dumps(settings))
    new, old = (
        write(make_stage(each, tmp_path / "models", prompt=PROMPT), mixed_images)
        for each in (make_captioner("blip-2"), folder)
    )
    assert old == new


def test_more_tokens_than_the_model_has_positions_are_refused(make_captioner: Make, tmp_path: Path) -> None:
    with pytest.raises(
        StageUnusable, match=r"124 tokens after 5 others .* 128 positions; lower max_new_tokens"
    ):
        make_stage(make_captioner("blip-2"), tmp_path, max_new_tokens=124)


def test_weights_for_retrieval_are_refused(make_captioner: Make, tmp_path: Path) -> None:
    shutil.copytree(make_captioner("blip-2"), folder := tmp_path / "retrieval")
    save_file({"itm_head.weight": ones(2)}, folder / "model.safetensors")
    with pytest.raises(PackError, match="BLIP-2 for retrieval"):
        open_pack(folder, tmp_path / "models")
