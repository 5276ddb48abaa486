"""Embeddings by a small chat model, beside what the script of Qwen3-VL-Embedding's authors does with transformers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image as PillowImage
from transformers import AutoProcessor, Qwen3VLModel

from stages.blip.descriptor import Caption
from stages.clip.chat import ChatEmbeddingStage
from stages.clip.descriptor import Clip
from stages.clip.embeddings import ChatTextEncoder, decode_embedding, load_text_encoder
from stages.contract.base import Image
from stages.contract.descriptor import MODULES
from stages.contract.manifest import PackError
from stages.registry.registry import build
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners
from tests.stages.blip import stock
from tests.stages.pictures import DEVICES, draw_image, put

KIND = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    captioners.save_qwen_embedding(folder := tmp_path_factory.mktemp("embedding") / KIND)
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> ChatEmbeddingStage:
    return make_stage(folder, "cpu")


def make_stage(folder: Path, device: str) -> ChatEmbeddingStage:
    spec = resolve(open_pack(folder, folder.parent / "none"), "clip", {"batch_size": 3})
    stage = build(spec, device)
    assert isinstance(stage, ChatEmbeddingStage)
    stage.load()
    return stage


def resize(image: Image, factor: int) -> PillowImage.Image:
    """As qwen_vl_utils does it: sides that are multiples of a factor, and an area within limits."""
    pixels = image.pixels
    assert isinstance(pixels, torch.Tensor)
    least, most = 4 * factor**2, 1800 * factor**2
    sides = [max(factor, round(side / factor) * factor) for side in (image.height, image.width)]
    if math.prod(sides) > most:
        scale = math.sqrt(image.height * image.width / most)
        sides = [
            max(factor, math.floor(side / scale / factor) * factor) for side in (image.height, image.width)
        ]
    elif math.prod(sides) < least:
        scale = math.sqrt(least / (image.height * image.width))
        sides = [math.ceil(side * scale / factor) * factor for side in (image.height, image.width)]
    return PillowImage.fromarray(pixels.permute(1, 2, 0).numpy()).resize((sides[1], sides[0]))


class Script:
    """The steps of scripts/qwen3_vl_embedding.py: the instruction as system's message, images that are resized before the
    processor gets them, padding on the right, and the last token that is not padding."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3VLModel.from_pretrained(folder).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def embed(self, contents: list[dict[str, Any]], images: list[PillowImage.Image] | None) -> torch.Tensor:
        system = {"role": "system", "content": [{"type": "text", "text": "Represent the user's input."}]}
        chats = [[system, {"role": "user", "content": [content]}] for content in contents]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(
            text=texts,
            images=images,
            padding=True,
            padding_side="right",
            do_resize=False,
            return_tensors="pt",
        )
        with torch.inference_mode():
            hidden = self.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        last = mask.shape[1] - mask.flip(dims=[1]).argmax(dim=1) - 1
        return F.normalize(hidden[torch.arange(len(hidden)), last], dim=-1)


@pytest.fixture(scope="module")
def script(folder: Path) -> Script:
    return Script(folder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [KIND])
def test_embeddings_are_those_of_the_authors_script(
    kind: str, device: str, script: Script, folder: Path, mixed_images: list[Image]
) -> None:
    """Large images become smaller, and small ones larger. Pillow rounds a little differently from torch."""
    images = [image for image in mixed_images[:8] if 3 < image.width < 200 * image.height]
    stage = make_stage(folder, device)
    factor = stage.prepare.image_processor.patch_size * stage.prepare.image_processor.merge_size
    theirs = script.embed([{"type": "image"}] * len(images), [resize(image, factor) for image in images])
    answers = stage.run(put(images, device))
    ours = torch.stack([decode_embedding(a.embedding) for a in answers if isinstance(a, Clip)])
    assert F.cosine_similarity(ours, theirs).min() >= 0.999
    assert (ours @ ours.T).fill_diagonal_(0).max() < 0.99, "they must depend on the image"
    assert all(isinstance(answer, Clip) and answer.tags == [] for answer in answers)


def test_texts_are_embedded_as_by_the_authors_script(script: Script, folder: Path) -> None:
    texts = ["Describe this image in one sentence .", "a photo", "w1 w2 w3 w4 w5 w6 w7"]
    encoder = load_text_encoder(str(folder), torch.float32, "cpu")
    assert isinstance(encoder, ChatTextEncoder)
    with torch.inference_mode():
        ours = encoder.embed_texts(texts)
    torch.testing.assert_close(ours, script.embed([{"type": "text", "text": t} for t in texts], None))
    assert (ours @ ours.T).fill_diagonal_(0).max() < 0.999


def test_batch_mates_change_no_answer(stage: ChatEmbeddingStage) -> None:
    images = [draw_image(40, 60, 1), draw_image(96, 30, 2)]
    for image, together in zip(images, stage.run(images), strict=True):
        [alone] = stage.run([image])
        assert isinstance(together, Clip)
        assert isinstance(alone, Clip)
        first, second = (decode_embedding(each.embedding) for each in (together, alone))
        assert F.cosine_similarity(first, second, dim=0) > 0.99999


def test_a_caption_is_compared_with_the_embedding_of_its_image(
    stage: ChatEmbeddingStage, folder: Path, tmp_path: Path
) -> None:
    captioners.CAPTIONERS["qwen2_vl"](tmp_path / "captioner")
    captioner = stock.make_stage(tmp_path / "captioner", tmp_path / "none", clip=str(folder))
    image = draw_image(40, 60)
    [clip] = stage.run([image])
    assert isinstance(clip, Clip)
    image.results["clip"] = clip
    [caption] = captioner.run([image])
    assert isinstance(caption, Caption)
    with torch.inference_mode():
        text = load_text_encoder(str(folder), torch.float32, "cpu").embed_texts([caption.text])[0]
    cosine = F.cosine_similarity(text, decode_embedding(clip.embedding), dim=0).item()
    assert caption.similarity == pytest.approx(cosine, abs=1e-4)


def test_only_the_list_of_modules_tells_an_embedding_model_from_one_that_writes(
    folder: Path, tmp_path: Path
) -> None:
    assert [*open_pack(folder, tmp_path).manifest.stages] == ["clip"]
    with pytest.raises(
        PackError, match=r"has no weights for blip; it has clip\. Name it under \[stages\.clip\]"
    ):
        resolve(open_pack(folder, tmp_path), "blip")
    writes = shutil.copytree(folder, tmp_path / "writes")
    (writes / MODULES).unlink()
    assert [*open_pack(writes, tmp_path).manifest.stages] == ["blip"]
