from __future__ import annotations

import base64
import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from stages.clip.descriptor import Clip
from stages.clip.embeddings import TextEncoder, decode_embedding, encode_embedding
from stages.clip.stage import ClipStage
from stages.contract.base import Image, StageSpec, StageUnusable
from stages.pretrained.checkpoints import load_model, load_tokenizer
from stages.weights.packs import Pack, resolve
from tests.stages.pictures import draw_image

DOCS = Path(__file__).parents[3] / "docs" / "results.md"


def make_stage(
    pack: Pack, *, dtype: str = "float32", batch_size: int = 4, device: str = "cpu", **options: Any
) -> ClipStage:
    spec = resolve(pack, "clip", {"dtype": dtype, "batch_size": batch_size, "options": options})
    stage = ClipStage(spec, device)
    stage.load()
    return stage


def run(stage: ClipStage, images: list[Image]) -> list[Clip]:
    answers = stage.run(images)
    assert all(isinstance(answer, Clip) for answer in answers)
    return answers  # type: ignore[return-value]


def test_embeddings_are_those_of_the_stock_processor_and_model(
    blank_pack: Pack, mixed_images: list[Image]
) -> None:
    folder = resolve(blank_pack, "clip").files["model"]
    model, stock = (
        load_model(CLIPModel, folder, torch.float32, "cpu"),
        CLIPImageProcessor.from_pretrained(folder),
    )
    images = [image for image in mixed_images if image.width > 3]  # otherwise it takes the columns for colors
    for image, answer in zip(images, run(make_stage(blank_pack), images), strict=True):
        with torch.inference_mode():
            pixels = stock(images=[image.pixels], return_tensors="pt")["pixel_values"]
            theirs = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)[0]
        assert F.cosine_similarity(decode_embedding(answer.embedding), theirs, dim=0) >= 0.9999


def test_an_embedding_is_a_unit_vector_in_little_endian_float16(blank_pack: Pack) -> None:
    [answer] = run(make_stage(blank_pack), [draw_image(100, 100)])
    values = np.frombuffer(base64.b64decode(answer.embedding.base64), "<f2")
    assert (len(values), answer.embedding.dim, answer.embedding.dtype) == (128, 128, "float16")
    assert np.linalg.norm(values.astype(np.float32)) == pytest.approx(1, abs=1e-3)


def test_an_embedding_survives_its_encoding() -> None:
    vector = torch.tensor([0.5, -0.25, 1.0])
    assert torch.equal(decode_embedding(encode_embedding(vector)), vector)


def test_the_numpy_lines_of_the_docs_read_a_sidecars_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = F.normalize(torch.arange(-4.0, 5.0), dim=0)
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    Path("results/a.jpg.json").write_bytes(msgspec.json.encode({"clip": Clip(encode_embedding(unit), [])}))
    [lines] = re.findall(r"```python\n(import base64.*?)```", DOCS.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(lines, found)
    assert torch.allclose(torch.from_numpy(found["vector"]), unit, atol=1e-3)
    assert float(found["vector"] @ found["vector"]) == pytest.approx(1, abs=1e-3)


def test_tags_are_the_most_likely_labels(blank_pack: Pack) -> None:
    folder = resolve(blank_pack, "clip").files["model"]
    model = load_model(CLIPModel, folder, torch.float32, "cpu")
    image, labels = draw_image(128, 128), ["red circle", "a very unusual thing", "tree"]
    [answer] = run(make_stage(blank_pack, labels=labels, template="{} here"), [image])
    texts = load_tokenizer(folder)([f"{label} here" for label in labels], padding=True, return_tensors="pt")
    with torch.inference_mode():
        pixels = CLIPImageProcessor.from_pretrained(folder)(images=[image.pixels], return_tensors="pt")
        expected = model(**texts, **pixels).logits_per_image.softmax(dim=1)[0]
    assert [tag.label for tag in answer.tags] == [
        labels[place] for place in expected.argsort(descending=True)
    ]
    assert [tag.score for tag in answer.tags] == pytest.approx(
        sorted(expected.tolist(), reverse=True), abs=1e-3
    )
    assert sum(tag.score for tag in answer.tags) == pytest.approx(1, abs=1e-5)


def test_only_the_best_tags_are_returned(blank_pack: Pack) -> None:
    image = draw_image(64, 64)
    [everything], [best] = (run(make_stage(blank_pack, top_k=count), [image]) for count in (10**5, 3))
    assert len(everything.tags) == len(
        Path(resolve(blank_pack, "clip").files["labels"]).read_text().splitlines()
    )
    assert best.tags == everything.tags[:3]
    assert run(make_stage(blank_pack, top_k=0), [image])[0].tags == []


def test_without_labels_there_are_no_tags(blank_pack: Pack) -> None:
    [answer] = run(make_stage(blank_pack, labels=[]), [draw_image(64, 64)])
    assert answer.tags == []


def test_batch_mates_change_no_answer(blank_pack: Pack, mixed_images: list[Image]) -> None:
    stage = make_stage(blank_pack, batch_size=3)
    for image, together in zip(mixed_images, run(stage, mixed_images), strict=True):
        [alone] = run(stage, [image])
        one, other = (decode_embedding(answer.embedding) for answer in (together, alone))
        assert F.cosine_similarity(one, other, dim=0) > 0.99999


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_nearly_the_same(
    blank_pack: Pack, mixed_images: list[Image], dtype: str
) -> None:
    exact, half = (run(make_stage(blank_pack, dtype=name), mixed_images) for name in ("float32", dtype))
    for one, other in zip(exact, half, strict=True):
        assert (
            F.cosine_similarity(decode_embedding(one.embedding), decode_embedding(other.embedding), dim=0)
            > 0.999
        )


def test_a_label_that_is_too_long_for_the_model_is_truncated(blank_pack: Pack) -> None:
    [answer] = run(make_stage(blank_pack, labels=["word " * 500, "x"]), [draw_image(64, 64)])
    assert len(answer.tags) == 2


def test_padding_changes_no_text_embedding(blank_pack: Pack) -> None:
    folder = resolve(blank_pack, "clip").files["model"]
    encoder = TextEncoder(load_model(CLIPModel, folder, torch.float32, "cpu"), folder)
    with torch.inference_mode():
        alone = encoder.embed(encoder.tokenize(["a red circle"]))
        padded = encoder.embed(
            encoder.tokenize(["a red circle", "two blue trees and a star on a white background"])
        )
    assert torch.allclose(alone[0], padded[0], atol=1e-6)


def test_a_tokenizer_in_the_hubs_layout_is_read(tmp_path: Path) -> None:
    vocabulary = {
        "<|startoftext|>": 0,
        "<|endoftext|>": 1,
        "a</w>": 2,
        "c": 3,
        "cat</w>": 4,
        "at</w>": 5,
        "t</w>": 6,
    }
    merges = [("a", "t</w>"), ("c", "at</w>")]
    CLIPTokenizer(vocab={**vocabulary, "a": 7, "t": 8, "c</w>": 9}, merges=merges).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "clip"}))
    assert load_tokenizer(str(tmp_path))(["A cat"])["input_ids"] == [[0, 2, 4, 1]]


def test_code_that_lies_beside_weights_is_not_run(tmp_path: Path, blank_pack: Pack) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(blank_pack.folder / "clip", folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for name, classes in (
        ("config.json", ("AutoConfig", "AutoModel")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        document = msgspec.json.decode((folder / name).read_bytes())
        document["auto_map"] = {
            kind: ["evil.Evil", "evil.Evil"] if kind == "AutoTokenizer" else "evil.Evil" for kind in classes
        }
        (folder / name).write_bytes(msgspec.json.encode(document))
    load_model(CLIPModel, str(folder), torch.float32, "cpu")
    with contextlib.suppress(ValueError):  # it may also refuse the folder
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["", "vision_config"])
def test_an_attention_that_may_be_code_of_the_hub_is_refused(
    tmp_path: Path, blank_pack: Pack, part: str
) -> None:
    folder = shutil.copytree(blank_pack.folder / "clip", tmp_path / "clip")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (config[part] if part else config)["attn_implementation"] = "someone/kernel"
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(StageUnusable, match="asks for the attention someone/kernel"):
        load_model(CLIPModel, str(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 3}, 'stages.clip.options.topk: unknown key; did you mean "top_k"'),
        ({"template": "a photo"}, "template"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_wrong_option_is_named(blank_pack: Pack, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_stage(blank_pack, **options)


def test_weights_of_another_model_are_refused(blank_pack: Pack) -> None:
    folder = resolve(blank_pack, "blip").files["model"]
    spec = StageSpec("clip", "transformers", {"model": folder})
    with pytest.raises(ValueError, match='holds a model of the type "blip", not one of clip,'):
        ClipStage(spec, "cpu").load()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.999), ("float16", 0.9999)])
def test_a_gpu_embeds_as_a_cpu_does(
    blank_pack: Pack, mixed_images: list[Image], dtype: str, least: float
) -> None:
    expected = run(make_stage(blank_pack), mixed_images)
    for image in mixed_images:
        assert image.pixels is not None
        image.pixels = image.pixels.cuda()
    found = run(make_stage(blank_pack, dtype=dtype, device="cuda:0"), mixed_images)
    for one, other in zip(expected, found, strict=True):
        assert (
            F.cosine_similarity(decode_embedding(one.embedding), decode_embedding(other.embedding), dim=0)
            > least
        )
