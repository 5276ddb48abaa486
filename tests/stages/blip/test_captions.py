"""What each captioner promises: small models of each type that a backend takes, beside transformers' own tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CLIPModel

from stages.blip.captions import CaptionStage
from stages.blip.descriptor import BLIP
from stages.clip.descriptor import Clip
from stages.clip.embeddings import TextEncoder, decode_embedding
from stages.clip.stage import ClipStage
from stages.contract.base import Image
from stages.contract.manifest import PackError
from stages.pretrained.checkpoints import load_model
from stages.weights.packs import Pack, open_pack, resolve
from tests.stages.blip.stock import NEW_TOKENS, make_stage, run, share_stock, write

KINDS = [model.type for backend in BLIP.backends.values() for model in backend.models]
Make = Callable[[str], Path]
Share = Callable[[str], CaptionStage]
Write = Callable[[str, list[Image]], list[list[int]]]
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def images(mixed_images: list[Image]) -> list[Image]:
    """Six of them: a large one, small, tiny and thin ones of both orientations."""
    return [mixed_images[0], *mixed_images[3:]]


@pytest.fixture(scope="module")
def clip(blank_pack: Pack) -> ClipStage:
    stage = ClipStage(resolve(blank_pack, "clip"), "cpu")
    stage.load()
    return stage


@pytest.fixture(scope="module")
def share_stage(make_captioner: Make, clip: ClipStage) -> Share:
    """A stage with a small model by its type, and the model of the stage CLIP; loaded once. No test may change it."""
    model = clip.spec.files["model"]

    @functools.cache
    def share(kind: str) -> CaptionStage:
        return make_stage(folder := make_captioner(kind), folder.parent / "none", clip=model)

    return share


@pytest.fixture(scope="module")
def write_alone(make_captioner: Make, share_stage: Share) -> Write:
    """The tokens of each of the images up to its end, when each is a batch of its own; written once."""
    written: dict[str, list[list[int]]] = {}

    def write_once(kind: str, images: list[Image]) -> list[list[int]]:
        stock, stage = share_stock(make_captioner(kind)), share_stage(kind)
        if kind not in written:
            written[kind] = [stock.cut(write(stage, [image])[0]) for image in images]
        return written[kind]

    return write_once


@pytest.fixture(scope="module")
def write_together(share_stage: Share) -> Write:
    """The tokens of each of the images, when all are one batch; written once."""
    written: dict[str, list[list[int]]] = {}

    def write_once(kind: str, images: list[Image]) -> list[list[int]]:
        if kind not in written:
            written[kind] = write(share_stage(kind), images)
        return written[kind]

    return write_once


@pytest.fixture(scope="module")
def encoder(clip: ClipStage) -> TextEncoder:
    """The text half of the same model."""
    folder = clip.spec.files["model"]
    return TextEncoder(load_model(CLIPModel, folder, torch.float32, "cpu"), folder)


@each_kind
def test_tokens_are_those_of_transformers(
    kind: str, make_captioner: Make, share_stage: Share, write_alone: Write, images: list[Image]
) -> None:
    folder = make_captioner(kind)
    stock, stage = share_stock(folder), share_stage(kind)
    expected = [stock.cut(stock.write(image)) for image in images]
    assert write_alone(kind, images) == expected
    assert len({tuple(tokens) for tokens in expected}) > len(expected) / 2, "they must depend on the image"
    lengths = [len(tokens) for tokens in expected]
    assert min(lengths) < NEW_TOKENS == max(lengths), "some must end early"
    places = [lengths.index(min(lengths)), lengths.index(NEW_TOKENS)]
    assert run(stage, [images[place] for place in places]) == [
        stock.read(expected[place]) for place in places
    ]


@each_kind
def test_batch_mates_change_no_token(
    kind: str,
    make_captioner: Make,
    share_stage: Share,
    write_alone: Write,
    write_together: Write,
    images: list[Image],
) -> None:
    stock, alone = share_stock(make_captioner(kind)), write_alone(kind, images)
    assert [stock.cut(tokens) for tokens in write_together(kind, images)] == alone
    assert [stock.cut(tokens) for tokens in write(share_stage(kind), images[::-1])] == alone[::-1]


@each_kind
def test_a_caption_has_as_many_tokens_as_allowed_or_forced(
    kind: str, make_captioner: Make, write_together: Write, tmp_path: Path, images: list[Image]
) -> None:
    stock = share_stock(folder := make_captioner(kind))
    assert {len(tokens) for tokens in write_together(kind, images)} == {NEW_TOKENS}
    forced = write(make_stage(folder, tmp_path, force_tokens=22), images)
    assert {len(tokens) for tokens in forced} == {22}
    assert not {token for tokens in forced for token in tokens[:-1]} & {*stock.ends}
    limits: dict[str, Any] = {"max_new_tokens": 22, "min_new_tokens": 22}
    assert forced[0] == stock.write(images[0], **limits)


@each_kind
def test_half_precision_writes_captions_that_depend_on_the_image(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    stage = make_stage(make_captioner(kind), tmp_path, dtype="bfloat16")
    assert len(set(run(stage, mixed_images[:6]))) > 3


@each_kind
def test_each_caption_is_compared_with_the_embedding_of_its_image(
    kind: str, share_stage: Share, clip: ClipStage, encoder: TextEncoder, mixed_images: list[Image]
) -> None:
    images = mixed_images[:3]
    for image, embedded in zip(images[:2], clip.run(images[:2]), strict=True):
        image.results["clip"] = embedded  # type: ignore[assignment]
    answers = share_stage(kind).run(images)
    with torch.inference_mode():
        texts = encoder.embed_texts([answer.text for answer in answers])  # type: ignore[union-attr]
    for image, answer, text in zip(images[:2], answers, texts, strict=False):
        expected = decode_embedding(cast(Clip, image.results["clip"]).embedding) @ text
        assert answer.similarity == pytest.approx(float(expected), abs=2e-3)  # type: ignore[union-attr]
    assert answers[2].similarity is None  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_a_gpu_writes_nearly_the_same_tokens_as_a_cpu(
    kind: str, make_captioner: Make, tmp_path: Path, mixed_images: list[Image]
) -> None:
    folder = make_captioner(kind)
    here, there = (
        write(make_stage(folder, tmp_path, device=name), mixed_images) for name in ("cpu", "cuda:0")
    )
    agreeing = sum(one == other for one, other in zip(here, there, strict=True))
    assert agreeing >= 5  # sums are in another order


@each_kind
def test_another_class_of_the_family_is_refused_by_name(
    kind: str, make_captioner: Make, tmp_path: Path
) -> None:
    config = json.loads((make_captioner(kind) / "config.json").read_text())
    [taken] = config["architectures"]
    other = taken.replace("ForConditionalGeneration", "Model")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [other]}))
    with pytest.raises(PackError, match=rf"holds a {other} .*visiond takes {taken}"):
        open_pack(tmp_path, tmp_path / "models")
