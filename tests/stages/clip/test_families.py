"""Small models of each class that the backends of clip take, beside transformers' own answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from stages.base import Image
from stages.clip.descriptor import CLIP, TOWERS, Clip
from stages.clip.embeddings import TextTower, decode_embedding
from stages.pretrained.checkpoints import load_known
from stages.registry import build
from stages.weights.packs import open_pack, resolve
from tests.stages import checkpoints
from tests.stages.pictures import draw_image

TYPES = [model.type for backend in CLIP.backends.values() for model in backend.models]
LABELS = ["red circle", "a very unusual thing", "tree", "two blue tree"]

Make = Callable[[str], Path]


@pytest.fixture
def images(mixed_images: list[Image]) -> list[Image]:
    # Of a narrower image transformers takes the columns for colors.
    return [image for image in mixed_images[:8] if image.width > 3]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a small model by its type; made once."""
    place = tmp_path_factory.mktemp("towers")

    def make(kind: str) -> Path:
        if not (place / kind).exists():
            checkpoints.TOWERS[kind](place / kind)
        return place / kind

    return make


def run(folder: Path, models: Path, images: list[Image], batch_size: int = 4, **options: Any) -> list[Clip]:
    overrides = {"batch_size": batch_size, "options": {"labels": LABELS, **options}}
    stage = build(resolve(open_pack(folder, models), "clip", overrides), "cpu")
    stage.load()
    answers = stage.run(images)
    assert all(isinstance(answer, Clip) for answer in answers)
    return answers  # type: ignore[return-value]


@functools.cache
def load_stock(folder: Path) -> tuple[Any, Any, Any]:
    """The model, the tokenizer and the image processor of transformers."""
    kinds: Any = (AutoModel, AutoTokenizer, AutoImageProcessor)
    model, tokenizer, processor = (kind.from_pretrained(folder) for kind in kinds)
    return model, tokenizer, processor


def stock_answer(folder: Path, image: Image, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The unit embedding of an image, and the logit of each text."""
    model, tokenizer, processor = load_stock(folder)
    padding = "max_length" if "siglip" in model.config.model_type else True
    tokens = tokenizer(texts, padding=padding, truncation=True, max_length=16, return_tensors="pt")
    pixels = processor(images=[image.pixels], return_tensors="pt")
    with torch.inference_mode():
        output = model(**tokens, **pixels)
    return output.image_embeds[0], output.logits_per_image[0]


@pytest.mark.parametrize("kind", TYPES)
def test_embeddings_and_tags_are_those_of_transformers(
    kind: str, make_folder: Make, tmp_path: Path, images: list[Image]
) -> None:
    folder, sigmoid = make_folder(kind), "siglip" in kind
    template = "This is a photo of {}." if sigmoid else "a photo of a {}"
    answers = run(folder, tmp_path, images, top_k=4)
    embeddings = torch.stack([decode_embedding(answer.embedding) for answer in answers])
    assert (embeddings @ embeddings.T).fill_diagonal_(0).max() < 0.9999, "they must depend on the image"
    for image, embedding, answer in zip(images, embeddings, answers, strict=True):
        theirs, logits = stock_answer(folder, image, [template.replace("{}", label) for label in LABELS])
        assert F.cosine_similarity(embedding, theirs, dim=0) >= 0.9999
        scores = logits.sigmoid() if sigmoid else logits.softmax(dim=0)
        ours = {tag.label: tag.score for tag in answer.tags}
        assert [ours[label] for label in LABELS] == pytest.approx(scores.tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", TYPES)
def test_batch_mates_change_no_answer(
    kind: str, make_folder: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    folder = make_folder(kind)
    together, alone = (run(folder, tmp_path, mixed_images, batch_size) for batch_size in (3, 1))
    for one, other in zip(together, alone, strict=True):
        assert (
            F.cosine_similarity(decode_embedding(one.embedding), decode_embedding(other.embedding), dim=0)
            > 0.99999
        )


@pytest.mark.parametrize("kind", TYPES)
def test_captions_are_embedded_as_by_transformers(kind: str, make_folder: Make) -> None:
    folder = str(make_folder(kind))
    model = load_known(TOWERS, folder, torch.float32, "cpu")
    texts = ["a red circle", "two blue thing of this very unusual tree", "photo " * 40]
    padding = "max_length" if "siglip" in kind else True
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding=padding, truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.inference_mode():
        theirs = F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)
        ours = TextTower(model, folder).embed_texts(texts)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_template_of_ones_own_is_used(make_folder: Make, tmp_path: Path) -> None:
    image = draw_image(100, 120)
    [answer] = run(make_folder("siglip"), tmp_path, [image], template="two {}", top_k=4)
    _, logits = stock_answer(make_folder("siglip"), image, [f"two {label}" for label in LABELS])
    assert [tag.score for tag in answer.tags] == pytest.approx(
        sorted(logits.sigmoid().tolist(), reverse=True), abs=1e-3
    )


@pytest.mark.parametrize("kind", TYPES)
def test_without_labels_there_are_no_tags(kind: str, make_folder: Make, tmp_path: Path) -> None:
    [answer] = run(make_folder(kind), tmp_path, [draw_image(64, 64)], labels=[])
    assert (answer.tags, answer.embedding.dim) == ([], 32 if "siglip" in kind else 24)
