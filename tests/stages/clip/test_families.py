"""Small models of each class that the backends of clip take, beside transformers' own answers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from stages.clip.descriptor import FLEXIBLE, MODELS, TOWERS, Clip
from stages.clip.embeddings import TextEncoder, decode_embedding, load_text_encoder
from stages.contract.base import Image, StageSpec, StageUnusable
from stages.contract.manifest import digest_folder
from stages.pretrained.checkpoints import load_known, load_tokenizer
from stages.pretrained.recording import recording_single
from stages.registry.registry import build
from stages.weights.packs import fingerprint, open_pack, resolve
from tests.stages import checkpoints
from tests.stages.checkpoints import Make, made_once
from tests.stages.emulation import emulate_recordings
from tests.stages.pictures import draw_image

TYPES = [model.type for model in (*MODELS, *FLEXIBLE)]
LABELS = ["red circle", "a very unusual thing", "tree", "two blue tree"]


@pytest.fixture
def images(mixed_images: list[Image]) -> list[Image]:
    # Of a narrower image transformers takes the columns for colors.
    return [image for image in mixed_images[:8] if image.width > 3]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(tmp_path_factory.mktemp("towers"), lambda kind, folder: checkpoints.TOWERS[kind](folder))


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
        ours = TextEncoder(model, folder).embed_texts(texts)
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


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A small vocabulary of the kind that SigLIP 2's authors use."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "lines").write_text(
        "this is a photo of the Eiffel Tower.\nÉTÉ two blue trees, a big cat\n" * 20
    )
    named = ("pad", "eos", "bos", "unk")
    special: dict[str, Any] = {f"{name}_id": place for place, name in enumerate(named)}
    special |= {f"{name}_piece": f"<{name}>" for name in named}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines"),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **special,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))


def save_gemma(pieces: sentencepiece.SentencePieceProcessor, folder: Path, **settings: Any) -> None:
    """The tokenizer as in the repositories of SigLIP 2 of a fixed size. settings: of tokenizer_config.json."""
    vocabulary = {pieces.id_to_piece(number): number for number in range(len(pieces))}
    GemmaTokenizer(
        vocab=vocabulary,
        merges=generate_merges(vocabulary),
        add_bos_token=False,
        add_eos_token=True,
        padding_side="right",
        model_input_names=["input_ids"],
    ).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    "text", ["This is a photo of THE Eiffel Tower.", " two  ÉTÉ\tBlue Ünit ẞ", "A cat, " * 9]
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("siglip", {"do_lower_case": True}),
        ("siglip", {"do_lower_case": True, "tokenizer_class": "GemmaTokenizerFast"}),
        ("siglip2", {"do_lower_case": True}),
        ("siglip2", {"tokenizer_class": "Siglip2Tokenizer"}),
    ],
)
def test_texts_for_siglip_2_become_the_tokens_of_its_authors_tokenizer(
    pieces: sentencepiece.SentencePieceProcessor,
    make_folder: Make,
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    text: str,
) -> None:
    """It lowers A to Z alone, keeps punctuation, and a text that is too long keeps its last token."""
    folder = shutil.copytree(make_folder(kind), tmp_path / kind)
    save_gemma(pieces, folder, **settings)
    model = load_known(TOWERS, str(folder), torch.float32, "cpu")
    lowered = "".join(letter.lower() if letter.isascii() else letter for letter in text)
    expected = [*pieces.encode(lowered)[:15], 1]
    [tokens] = TextEncoder(model, str(folder)).tokenize([text])["input_ids"].tolist()
    assert tokens == expected + [0] * (16 - len(expected))


def test_capitals_stay_where_the_tokenizers_file_does_not_say_otherwise(
    pieces: sentencepiece.SentencePieceProcessor, make_folder: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_folder("siglip"), tmp_path / "siglip")
    save_gemma(pieces, folder)
    assert load_tokenizer(str(folder))(["Eiffel"])["input_ids"] == [[*pieces.encode("Eiffel"), 1]]


@pytest.mark.parametrize(("kind", "stale"), [("clip", False), ("siglip", True)])
def test_results_of_siglip_from_before_its_texts_were_lower_case_are_stale(
    kind: str, stale: bool, make_folder: Make, tmp_path: Path
) -> None:
    folder = make_folder(kind)
    before = fingerprint("clip", "transformers", {"model": digest_folder(folder)}, "float32", {})
    assert (resolve(open_pack(folder, tmp_path), "clip").fingerprint != before) == stale


def test_a_tokenizer_without_a_pad_token_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_folder("clip"), tmp_path / "clip")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}))
    with pytest.raises(
        StageUnusable, match=r"the tokenizer in .* has no pad_token, .* for CLIP to its eos_token"
    ):
        run(folder, tmp_path / "models", [])


@pytest.mark.parametrize("kind", [model.type for model in MODELS])
def test_a_single_text_is_embedded_by_a_recording(kind: str, make_folder: Make) -> None:
    encoder = load_text_encoder(str(make_folder(kind)), torch.float32, "cpu")
    spec = StageSpec("blip", "transformers", single=True)
    with torch.inference_mode(), emulate_recordings() as recorder:
        expected = [encoder.embed_texts([text]) for text in LABELS]
        with recording_single(spec, "cpu"):
            encoder.run_single()
        replays, has_mask = recorder.replays, len(encoder.tokenize(LABELS)) > 1
        for text, answer in zip(LABELS, expected, strict=True):
            assert torch.equal(encoder.embed_texts([text]), answer)
        assert recorder.replays == replays + (0 if has_mask else len(LABELS))
