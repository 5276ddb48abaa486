from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BlipForConditionalGeneration, CLIPModel

from stages.contract.manifest import digest_folder, read_manifest
from stages.pretrained.checkpoints import load_model, load_tokenizer
from stages.scenes.generator import make_scene
from stages.weights.published import BLANK_NOTICE, Vocabulary
from stages.yolo.weights import load_network
from tests.minipack.blank import make_blank_pack
from tests.stages.yolo.detectors import files_in
from visiond_mini.mini import Sizes, layers

TINY = Sizes(
    yolo_size=64,
    image_size=32,
    clip_vision=layers(1, 16, 16, 1),
    clip_text=layers(1, 16, 16, 1),
    blip_vision=layers(1, 24, 24, 1),
    blip_text=layers(1, 24, 24, 1),
    embedding=8,
)


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blank")
    make_blank_pack(folder, seed=5, sizes=TINY)
    return folder


def test_a_seed_always_makes_the_same_pack(blank: Path, tmp_path: Path) -> None:
    make_blank_pack(tmp_path / "same", seed=5, sizes=TINY)
    make_blank_pack(tmp_path / "other", seed=6, sizes=TINY)
    assert digest_folder(tmp_path / "same") == digest_folder(blank)
    other = digest_folder(tmp_path / "other")
    assert {name for name, digest in digest_folder(blank).items() if other[name] != digest} == {
        "yolo.safetensors",
        "clip/model.safetensors",
        "blip/model.safetensors",
    }


def test_a_blank_pack_says_that_it_is_blank(blank: Path) -> None:
    manifest = read_manifest(blank / "manifest.json")
    assert (manifest.trained, manifest.notice) == (False, BLANK_NOTICE)
    assert manifest.digests == digest_folder(blank)


def test_the_models_are_those_of_the_sizes_and_names(blank: Path) -> None:
    vocabulary = Vocabulary.of_scenes()
    network, config = load_network(files_in(blank))
    assert tuple(config["names"]) == vocabulary.classes
    assert network(torch.zeros(1, 3, 64, 64)).shape[1] == 4 + len(vocabulary.classes)
    clip = load_model(CLIPModel, str(blank / "clip"), torch.float32, "cpu")
    assert clip.config.projection_dim == TINY.embedding
    assert (blank / "labels.txt").read_text().splitlines() == list(vocabulary.labels)
    blip = load_model(BlipForConditionalGeneration, str(blank / "blip"), torch.float32, "cpu")
    tokenizer = load_tokenizer(str(blank / "blip"))
    assert blip.config.text_config.bos_token_id == tokenizer.convert_tokens_to_ids("[DEC]")
    assert blip.config.text_config.sep_token_id == tokenizer.sep_token_id


def test_every_caption_of_the_scenes_is_tokenized_word_for_word_and_fits(blank: Path) -> None:
    blip, clip = (load_tokenizer(str(blank / name)) for name in ("blip", "clip"))
    for index in range(30):
        [caption, *_] = make_scene(3, index, max_side=64).truth.captions
        tokens = blip(caption)["input_ids"]
        assert blip.decode(tokens, skip_special_tokens=True) == caption
        assert len(tokens) == len(caption.replace(",", " ,").split()) + 2 <= TINY.blip_tokens
        assert len(clip(caption)["input_ids"]) <= TINY.clip_tokens


def test_a_word_that_is_unknown_is_spelled(blank: Path) -> None:
    tokenizer = load_tokenizer(str(blank / "blip"))
    tokens = tokenizer("a Zebra!")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == [
        "[CLS]",
        "a",
        "z",
        "##e",
        "##b",
        "##r",
        "##a",
        "!",
        "[SEP]",
    ]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "a zebra!"
