from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import BertTokenizer, BlipForConditionalGeneration, BlipImageProcessor, CLIPModel

from stages.blip.captioner import Captioner, GraphedStep
from stages.blip.descriptor import Caption
from stages.blip.stage import BlipStage
from stages.blip.vision import speed_up_attention, speed_up_mlp
from stages.clip.descriptor import Clip, Embedding
from stages.clip.embeddings import TextEncoder, decode_embedding, encode_embedding
from stages.clip.stage import ClipStage
from stages.contract.base import Image, ImageError, StageSpec
from stages.images.devices import pixels_of
from stages.pretrained.checkpoints import load_model, load_tokenizer
from stages.weights.packs import Pack, resolve
from tests.stages.pictures import draw_image

NEW_TOKENS = 20


@pytest.fixture(scope="session")
def talkative(blank_pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights whose captions depend on the image: captions differ, and some end early."""
    folder = tmp_path_factory.mktemp("talkative")
    source = resolve(blank_pack, "blip").files["model"]
    model = load_model(BlipForConditionalGeneration, source, torch.float32, "cpu")
    with torch.no_grad():
        for layer in model.text_decoder.bert.encoder.layer:
            layer.crossattention.self.value.weight *= 4
            layer.crossattention.output.dense.weight *= 4
        for parameter in model.vision_model.parameters():
            parameter *= 3 if parameter.ndim > 1 else 1
        head = model.text_decoder.cls.predictions
        head.transform.dense.weight *= 3
        head.bias[model.config.text_config.sep_token_id] += 0.4
    for part in (model, load_tokenizer(source), BlipImageProcessor.from_pretrained(source)):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def talker(talkative: str) -> BlipForConditionalGeneration:
    return load_model(BlipForConditionalGeneration, talkative, torch.float32, "cpu")


@pytest.fixture
def pictures() -> list[Image]:
    return [draw_image(100 + 3 * seed, 200 - 4 * seed, seed) for seed in range(24)]


def make_stage(
    model: str,
    clip: str = "",
    *,
    dtype: str = "float32",
    batch_size: int = 5,
    device: str = "cpu",
    **options: Any,
) -> BlipStage:
    files = {"model": model, **({"clip": clip} if clip else {})}
    stage = BlipStage(
        StageSpec("blip", "transformers", files, dtype=dtype, batch_size=batch_size, options=options), device
    )
    stage.load()
    return stage


@pytest.fixture(scope="session")
def stage(talkative: str) -> BlipStage:
    """With the default options, for tests that change nothing in it."""
    return make_stage(talkative)


def run(stage: BlipStage, images: list[Image]) -> list[Caption]:
    answers = stage.run(images)
    assert all(isinstance(answer, Caption) for answer in answers)
    return answers  # type: ignore[return-value]


@pytest.fixture(scope="session")
def embedded(talker: BlipForConditionalGeneration) -> torch.Tensor:
    """The images that captions are compared of, embedded once."""
    return embed(talker, 24)


def embed(model: BlipForConditionalGeneration, count: int) -> torch.Tensor:
    """The vision tower's answer to random pixels [count, 3, size, size]."""
    generator = torch.Generator().manual_seed(3)
    size = model.config.vision_config.image_size
    pixels = torch.randn(count, 3, size, size, generator=generator) + 2 * torch.randn(
        count, 3, 1, 1, generator=generator
    )
    with torch.inference_mode():
        embeddings: torch.Tensor = model.vision_model(pixel_values=pixels).last_hidden_state
    return embeddings


def generate(
    model: BlipForConditionalGeneration, embeddings: torch.Tensor, prompt: list[int], **limits: int
) -> torch.Tensor:
    """transformers' own greedy tokens, padded to the prompt and `max_new_tokens`."""
    text = model.config.text_config
    with torch.inference_mode():
        tokens = model.text_decoder.generate(
            input_ids=torch.tensor([prompt] * len(embeddings)),
            encoder_hidden_states=embeddings,
            encoder_attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.long),
            eos_token_id=text.sep_token_id,
            pad_token_id=text.pad_token_id,
            do_sample=False,
            num_beams=1,
            **limits,
        )
    missing = len(prompt) + limits["max_new_tokens"] - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=text.pad_token_id)


def caption(
    model: BlipForConditionalGeneration, embeddings: torch.Tensor, prompt: list[int], **limits: int
) -> torch.Tensor:
    with torch.inference_mode():
        return Captioner(model, prompt=prompt, batch_size=len(embeddings), **limits)(embeddings)


@pytest.mark.parametrize("words", [(), (30,), (30, 31, 32)], ids=["no prompt", "a word", "three words"])
@pytest.mark.parametrize("least", [0, 6, NEW_TOKENS])
def test_tokens_are_those_of_generate(
    talker: BlipForConditionalGeneration, embedded: torch.Tensor, words: tuple[int, ...], least: int
) -> None:
    prompt = [talker.config.text_config.bos_token_id, *words]
    ours = caption(talker, embedded, prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=least)
    theirs = generate(talker, embedded, prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=least)
    assert torch.equal(ours, theirs)


def test_the_captions_compared_differ_and_some_end_early(
    talker: BlipForConditionalGeneration, embedded: torch.Tensor
) -> None:
    text = talker.config.text_config
    tokens = caption(talker, embedded, [text.bos_token_id], max_new_tokens=NEW_TOKENS)
    lengths = (tokens != text.pad_token_id).sum(dim=1)
    assert len({tuple(row) for row in tokens.tolist()}) >= 10
    assert lengths.min() < NEW_TOKENS / 2 < NEW_TOKENS < lengths.max()


def test_captions_are_those_of_the_stock_processor_and_generate(
    talkative: str, talker: BlipForConditionalGeneration, stage: BlipStage, pictures: list[Image]
) -> None:
    pictures = pictures[:10]
    stock, tokenizer = BlipImageProcessor.from_pretrained(talkative), load_tokenizer(talkative)
    ours = run(stage, pictures)
    with torch.inference_mode():
        pixels = stage.prepare(pixels_of(pictures))
        levels = (
            stock(images=[image.pixels for image in pictures], return_tensors="pt")["pixel_values"] - pixels
        )
        tokens = talker.generate(pixel_values=pixels, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
    assert levels.abs().max() * 0.2686 * 255 < 2.5
    assert [answer.text for answer in ours] == tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert len({answer.text for answer in ours}) > 5


def test_fused_attention_gives_the_same_answer(talkative: str) -> None:
    model = load_model(BlipForConditionalGeneration, talkative, torch.float32, "cpu")
    before = embed(model, 4)
    speed_up_attention(model.vision_model)
    assert torch.allclose(embed(model, 4), before, atol=1e-5)


def test_a_fused_gelu_gives_the_same_answer(talkative: str) -> None:
    model = load_model(BlipForConditionalGeneration, talkative, torch.float32, "cpu")
    before = embed(model, 4)
    speed_up_mlp(model.vision_model)
    assert torch.allclose(embed(model, 4), before, atol=5e-3)  # a GPU's is the tanh form


def test_batch_mates_change_no_caption(talkative: str, mixed_images: list[Image]) -> None:
    stage = make_stage(talkative, batch_size=4)
    assert run(stage, mixed_images) == [run(stage, [image])[0] for image in mixed_images]


def test_force_tokens_sets_the_exact_number_of_tokens(talkative: str, pictures: list[Image]) -> None:
    stage = make_stage(talkative, force_tokens=12)
    with torch.inference_mode():
        tokens = stage.forward(pixels_of(pictures[:5]))
    assert tokens.shape == (5, 12)
    assert not (tokens[:, :-1] == stage.captioner.end).any()


def test_a_prompt_begins_every_caption(talkative: str, pictures: list[Image]) -> None:
    answers = run(make_stage(talkative, prompt="a photo of"), pictures[:6])
    assert all(answer.text.startswith("a photo of") for answer in answers)


def test_decoding_stops_when_every_caption_has_ended(
    talker: BlipForConditionalGeneration, embedded: torch.Tensor
) -> None:
    text = talker.config.text_config
    with torch.inference_mode():
        captioner = Captioner(talker, prompt=[text.bos_token_id], max_new_tokens=NEW_TOKENS, batch_size=24)
        tokens = captioner(embedded)
        lengths = (tokens != text.pad_token_id).sum(dim=1)
        shortest = int(lengths.argmin())
        captioner(embedded[shortest : shortest + 1])
    assert int(captioner.position) == lengths.min() - 1 < NEW_TOKENS


def test_a_caption_that_is_too_long_for_the_model_is_refused(talkative: str) -> None:
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        make_stage(talkative, max_new_tokens=1000)


def test_similarity_is_the_cosine_of_clips_embeddings(
    talkative: str, blank_pack: Pack, pictures: list[Image]
) -> None:
    images = pictures[:3]
    clip = ClipStage(resolve(blank_pack, "clip"), "cpu")
    clip.load()
    for image, answer in zip(images[:2], clip.run(images[:2]), strict=True):
        assert isinstance(answer, Clip)
        image.results["clip"] = answer
    folder = clip.spec.files["model"]
    encoder = TextEncoder(load_model(CLIPModel, folder, torch.float32, "cpu"), folder)
    answers = run(make_stage(talkative, folder), images)
    for image, answer in zip(images[:2], answers, strict=False):
        with torch.inference_mode():
            text = encoder.embed(encoder.tokenize([answer.text]))[0]
        expected = decode_embedding(cast(Clip, image.results["clip"]).embedding) @ text
        assert answer.similarity == pytest.approx(float(expected), abs=2e-3)
    assert answers[2].similarity is None


def test_without_clip_there_is_no_similarity(stage: BlipStage, pictures: list[Image]) -> None:
    pictures[0].results["clip"] = Clip(encode_embedding(torch.ones(128)), [])
    assert run(stage, pictures[:1])[0].similarity is None


def test_embeddings_of_unlike_models_are_refused(
    talkative: str, blank_pack: Pack, pictures: list[Image]
) -> None:
    pictures[0].results["clip"] = Clip(Embedding(2, "float16", encode_embedding(torch.ones(2)).base64), [])
    [answer] = make_stage(talkative, resolve(blank_pack, "blip").files["clip"]).run(pictures[:1])
    assert isinstance(answer, ImageError)
    assert "same CLIP model" in answer.detail


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers(talkative: str, pictures: list[Image], dtype: str) -> None:
    assert len({answer.text for answer in run(make_stage(talkative, dtype=dtype), pictures[:5])}) > 2


def test_threads_get_the_captions_of_their_own_images(stage: BlipStage, pictures: list[Image]) -> None:
    expected = [run(stage, [image]) for image in pictures[:4]]
    found: dict[int, list[Caption]] = {}
    threads = [
        threading.Thread(target=lambda place=place: found.update({place: run(stage, [pictures[place]])}))
        for place in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == expected


def test_a_tokenizer_in_the_hubs_layout_is_read(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circ", "##le"]
    BertTokenizer(vocab={word: place for place, word in enumerate(words)}).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(["A red circle"])["input_ids"] == [[2, 5, 6, 7, 8, 3]]
    assert tokenizer.batch_decode([[5, 6, 7, 8, 3, 0, 0]], skip_special_tokens=True) == ["a red circle"]


def test_on_a_cpu_a_step_is_the_function_itself() -> None:
    batches: list[int] = []
    step = GraphedStep(batches.append, batches.clear, most=6, device=torch.device("cpu"))
    step.capture()
    assert [step.size_for(images) for images in (1, 3, 6)] == [1, 3, 6]
    step(3)
    assert batches == [3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_graphs_give_the_same_tokens_as_the_plain_step(talker: BlipForConditionalGeneration) -> None:
    expected_of = {count: embed(talker, count) for count in (1, 3, 12)}
    model = BlipForConditionalGeneration(talker.config).eval()
    model.load_state_dict(talker.state_dict())
    prompt = [talker.config.text_config.bos_token_id]
    with torch.inference_mode():
        captioner = Captioner(model.cuda(), prompt=prompt, max_new_tokens=NEW_TOKENS, batch_size=12)
        captioner.step.capture()
        assert [captioner.step.size_for(images) for images in (1, 3, 9, 12)] == [1, 4, 12, 12]
        for embeddings in expected_of.values():
            plain = generate(talker, embeddings, prompt, max_new_tokens=NEW_TOKENS)
            assert torch.equal(captioner(embeddings.cuda()), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_writes_the_same_captions_as_a_cpu(
    talkative: str, blank_pack: Pack, pictures: list[Image]
) -> None:
    expected = [answer.text for answer in run(make_stage(talkative), pictures)]
    for image in pictures:
        assert image.pixels is not None
        image.pixels = image.pixels.cuda()
    found = run(make_stage(talkative, resolve(blank_pack, "blip").files["clip"], device="cuda:0"), pictures)
    agreeing = sum(one == answer.text for one, answer in zip(expected, found, strict=True))
    assert agreeing >= 20  # float32 sums in another order
