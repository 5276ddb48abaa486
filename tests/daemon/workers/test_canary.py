"""The canary with the models of the demonstration pack: faults that give no error are noticed, and healthy models are not
suspected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from daemon.core.messages import Batch, Item, Setup
from daemon.workers.canary import PAUSE_SECONDS, REPEATS, SHARE, Canary, read_reference
from daemon.workers.chain import Chain
from daemon.workers.known_images import draw_known
from stages.clip.embeddings import encode_embedding
from stages.contract.base import Image, ImageError, Limits, OutOfMemory, Reason, StageSpec
from stages.contract.binning import Thresholds
from stages.images import decoder
from stages.images.decoder import Decoders
from stages.images.images import inspect
from stages.weights import packs
from tests.daemon_process import picture

Run = Callable[[Sequence[Any]], list[Any]]
PICTURES = len(draw_known(Limits()))


@pytest.fixture(scope="module", autouse=True)
def _decoders() -> Iterator[None]:
    """Ends the decoders of all chains of this module. Models compute in one thread, as on a busy machine more are slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened: list[Decoders] = []

    def note(*arguments: Any) -> Decoders:
        opened.append(Decoders(*arguments))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "Decoders", note)
        yield
    open_models.cache_clear()
    for each in opened:
        each.close()
    torch.set_num_threads(threads)


def open_chain(*specs: StageSpec, **settings: Any) -> Chain:
    stages = [spec.name for spec in specs]
    chain = Chain(
        Setup("w", "cpu", list(specs), 0, 1, 1, Limits(), None, stages, **settings), memoryview(b"")
    )
    chain.load()
    return chain


def resolve(*stages: str, **settings: Any) -> list[StageSpec]:
    pack = packs.open_pack("mini", Path("models"), base=Path())
    table = {"backend": "", "dtype": "float32", "batch_size": 8, "options": {}} | settings
    return packs.resolve_all(pack, stages, dict.fromkeys(stages, table))


@cache
def open_models(stage: str) -> tuple[Chain, Canary]:
    """A model of the pack, loaded once for all tests. Its canary knows its right answers."""
    chain = open_chain(*resolve(stage))
    canary = Canary(chain)
    assert canary.look() == {}
    return chain, canary


# Faults of a stage: each makes its right `run` a wrong one.


def give_one_answer(run: Run) -> Run:
    return lambda images: [run(images)[0]] * len(images)


def give_one_embedding(run: Run) -> Run:
    """It differs in the last bits, as sums in another order do."""

    def run_with_noise(images: Sequence[Any]) -> list[Any]:
        torch.manual_seed(0)
        vector = torch.nn.functional.normalize(torch.rand(128), dim=0)
        near = [vector + 1e-4 * torch.rand(128) for _ in images]
        pairs = zip(run(images), near, strict=True)
        return [msgspec.structs.replace(answer, embedding=encode_embedding(each)) for answer, each in pairs]

    return run_with_noise


def give_embedding(value: float) -> Callable[[Run], Run]:
    wrong = encode_embedding(torch.full((128,), value))

    def plant(run: Run) -> Run:
        return lambda images: [msgspec.structs.replace(answer, embedding=wrong) for answer in run(images)]

    return plant


def shift_answers(run: Run) -> Run:
    """As a batch that is read from the wrong place."""
    return lambda images: [*run(images)[1:], run(images)[0]]


def answer_late(run: Run) -> Run:
    """Each image gets the answers of the image before, as from a buffer that is read before the GPU has written it."""
    blank = Image(memoryview(b""), 320, 240, torch.zeros(3, 240, 320, dtype=torch.uint8))
    return lambda images: [*run([blank]), *run(images)[:-1]]


def read_nothing(run: Run) -> Run:
    return lambda images: [
        msgspec.structs.replace(answer, lines=[], count=0, area_ratio=0.0) for answer in run(images)
    ]


def map_found(change: Callable[[Any], Any]) -> Callable[[Run], Run]:
    def plant(run: Run) -> Run:
        return lambda images: [
            msgspec.structs.replace(answer, detections=[change(found) for found in answer.detections])
            for answer in run(images)
        ]

    return plant


def forget_the_scale(found: Any) -> Any:
    """The box is of the image as the network saw it, which was smaller."""
    return msgspec.structs.replace(found, box=tuple(0.5 * place for place in found.box))


def permute_labels(found: Any) -> Any:
    turned = {"circle": "star", "star": "square", "square": "triangle", "triangle": "circle"}
    return msgspec.structs.replace(found, label=turned[found.label])


def score_one(found: Any) -> Any:
    return msgspec.structs.replace(found, score=1.0)


def permute_tags(run: Run) -> Run:
    def turn(answer: Any) -> Any:
        labels = [tag.label for tag in answer.tags]
        turned = zip(answer.tags, labels[1:] + labels[:1], strict=True)
        tags = [msgspec.structs.replace(tag, label=label) for tag, label in turned]
        return msgspec.structs.replace(answer, tags=tags)

    return lambda images: list(map(turn, run(images)))


def change_pixels(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[Run], Run]:
    """A fault of the decoder, for all stages after it."""

    def plant(run: Run) -> Run:
        def run_on_others(images: Sequence[Any]) -> list[Any]:
            pixels = change([image.pixels for image in images])
            return run(
                [Image(i.data, i.width, i.height, p, i.results) for i, p in zip(images, pixels, strict=True)]
            )

        return run_on_others

    return plant


def keep_pixels_of_the_image_before(pixels: list[torch.Tensor]) -> list[torch.Tensor]:
    return pixels[-1:] + pixels[:-1]


def fail(run: Run) -> Run:
    def raise_error(images: Sequence[Any]) -> list[Any]:
        raise RuntimeError("a kernel")

    return raise_error


black = change_pixels(lambda pixels: [torch.zeros_like(each) for each in pixels])
turn_colors = change_pixels(lambda pixels: [each.flip(0) for each in pixels])

FAULTS: dict[str, tuple[str, Callable[[Run], Run]]] = {
    "one embedding for all images": ("clip", give_one_embedding),
    "the answers of one image for all": ("clip", give_one_answer),
    "embeddings of NaN": ("clip", give_embedding(float("nan"))),
    "embeddings of zeros": ("clip", give_embedding(0.0)),
    "red and blue are swapped": ("clip", turn_colors),
    "the decoder gives black": ("clip", black),
    "the decoder gives black to YOLO": ("yolo", black),
    "the decoder gives the image before": ("clip", change_pixels(keep_pixels_of_the_image_before)),
    "answers are shifted by one": ("clip", shift_answers),
    "answers are those of the image before": ("clip", answer_late),
    "captions are shifted by one": ("blip", shift_answers),
    "one caption for all images": ("blip", give_one_answer),
    "no text is read": ("ocr", read_nothing),
    "boxes are not scaled back": ("yolo", map_found(forget_the_scale)),
    "labels are permuted": ("yolo", map_found(permute_labels)),
    "tags are permuted": ("clip", permute_tags),
    "all scores are 1": ("yolo", map_found(score_one)),
    "nothing can be processed any more": ("yolo", fail),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_without_an_error_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    chain, canary = open_models(name)
    (stage,) = chain.stages
    monkeypatch.setattr(stage, "run", plant(stage.run))
    assert canary.look().keys() == {name}


def test_weights_that_became_zero_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, canary = open_models("clip")
    (stage,) = chain.stages
    for parameter in stage.vision.parameters():  # type: ignore[attr-defined]
        monkeypatch.setattr(parameter, "data", torch.zeros_like(parameter))
    assert canary.look().keys() == {"clip"}


@pytest.mark.parametrize(
    "fault",
    ["one embedding for all images", "embeddings of NaN", "embeddings of zeros", "the decoder gives black"],
)
def test_a_worker_that_is_wrong_from_its_start_needs_no_reference(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = FAULTS[fault]
    chain, _ = open_models(name)
    (stage,) = chain.stages
    monkeypatch.setattr(stage, "run", plant(stage.run))
    assert Canary(chain).look().keys() == {name}


def test_a_fault_is_noticed_by_the_first_worker_after_it_because_the_reference_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a new driver."""
    references = str(tmp_path / "canary")
    specs = resolve("yolo")
    assert Canary(open_chain(*specs, references=references)).look() == {}
    later = open_chain(*specs, references=references)
    assert Canary(later).look() == {}
    (stage,) = later.stages
    monkeypatch.setattr(stage, "run", black(stage.run))
    assert Canary(later).look() == {"yolo": "it finds 0 of 4 known things again"}


@pytest.mark.parametrize(
    ("stages", "settings"),
    [("clip", {"dtype": "bfloat16"}), ("yolo", {"dtype": "bfloat16"}), ("clip", {"batch_size": 1})],
)
def test_answers_that_are_less_precise_are_not_wrong(stages: str, settings: dict[str, Any]) -> None:
    """They differ more than those of two kinds of GPUs."""
    _, precise = open_models(stages)
    rounded = Canary(open_chain(*resolve(stages, **settings)))
    rounded._reference = precise._reference
    assert rounded.look() == {}


# With fakes: when it looks, and what it does not judge.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_fake(*stages: str, **settings: Any) -> tuple[Chain, Canary, Clock]:
    clock = Clock()
    chain = open_chain(*(StageSpec(stage, "fake") for stage in stages or ("ocr",)), **settings)
    return chain, Canary(chain, clock), clock


def work(chain: Chain, images: int, *, different: bool = True) -> None:
    """Images of the user."""
    data = b"".join(picture(number if different else 0) for number in range(images))
    size = len(picture(0))
    chain.run(Batch(0, [Item(number * size, size, {}) for number in range(images)]), memoryview(data))


def test_it_looks_after_a_thousand_images_for_each_picture_and_not_more_often_than_once_in_the_pause() -> (
    None
):
    _, canary, clock = open_fake()
    clock.now = PAUSE_SECONDS
    assert not canary.is_due(SHARE * PICTURES - 1)
    assert canary.is_due(1)
    assert not canary.is_due(SHARE * PICTURES)
    clock.now += PAUSE_SECONDS
    assert canary.is_due(1)
    assert PAUSE_SECONDS < 60, "faults are noticed within a minute"


def test_a_worker_with_little_to_do_looks_after_a_thousand_times_what_a_look_takes() -> None:
    chain, canary, clock = open_fake()
    run = chain.run

    def run_slowly(*batch: Any, **how: Any) -> Any:
        clock.now += 0.2
        return run(*batch, **how)

    chain.run = run_slowly  # type: ignore[method-assign]
    canary.look()
    clock.now = 0.2 * SHARE - 1
    assert not canary.is_due(1)
    clock.now += 1
    assert canary.is_due(1)


def test_a_stage_that_repeats_itself_is_looked_at_after_the_pause_and_then_half_as_often() -> None:
    chain, canary, clock = open_fake()
    work(chain, REPEATS - 1, different=False)
    clock.now = PAUSE_SECONDS
    assert not canary.is_due(1)
    work(chain, 1, different=False)
    assert canary.is_due(1)
    work(chain, REPEATS - 1, different=False)
    clock.now += PAUSE_SECONDS
    assert not canary.is_due(1)
    work(chain, 1, different=False)
    assert canary.is_due(1)


def test_different_answers_are_not_suspicious() -> None:
    chain, canary, clock = open_fake()
    for _ in range(4):
        work(chain, REPEATS)
    clock.now = PAUSE_SECONDS
    assert not canary.is_due(1)


def test_in_mode_cascade_all_stages_are_looked_at() -> None:
    stages = ("ocr", "yolo", "clip", "blip")
    chain, canary, _ = open_fake(*stages)
    decided = msgspec.structs.replace(chain.setup, cascade=Thresholds(), pipeline=list(stages))
    chain.setup = decided
    assert canary.look() == {}
    assert [set(answers) for answers in canary._reference] == [set(stages)] * PICTURES


def test_without_memory_for_a_picture_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, canary, _ = open_fake()
    assert canary.look() == {}

    def fill(images: Sequence[Image]) -> list[Any]:
        raise OutOfMemory("the GPU is full")

    monkeypatch.setattr(chain.stages[0], "run", fill)
    assert canary.look() == {}


def test_an_error_that_does_not_come_again_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have killed a decoder because others took the host's memory."""
    chain, canary, _ = open_fake()
    assert canary.look() == {}
    (stage,) = chain.stages
    run, failures = stage.run, [ImageError(Reason.DECODER, "killed")]
    monkeypatch.setattr(
        stage, "run", lambda images: [failures.pop() if failures else answer for answer in run(images)]
    )
    assert canary.look() == {}
    assert not failures


def test_answers_that_an_error_hindered_once_are_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, canary, _ = open_fake("ocr", "yolo")
    with monkeypatch.context() as broken:
        broken.setattr(chain.stages[1], "run", fail(chain.stages[1].run))
        assert canary.look() == {}
    assert canary.look() == {}
    assert [set(answers) for answers in canary._reference] == [{"ocr", "yolo"}] * PICTURES


def test_a_stage_that_can_never_process_a_known_image_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a plug-in, perhaps for faces only. The others have a reference."""
    chain, canary, _ = open_fake("ocr", "yolo")
    monkeypatch.setattr(chain.stages[1], "run", fail(chain.stages[1].run))
    assert [canary.look() for _ in range(3)] == [{}] * 3
    assert [set(answers) for answers in canary._reference] == [{"ocr"}] * PICTURES


@pytest.mark.parametrize("damage", [b"", b"{", b'{"worker": 1}'])
def test_a_damaged_reference_is_replaced(tmp_path: Path, damage: bytes) -> None:
    _, canary, _ = open_fake(references=str(tmp_path))
    canary.look()
    (file,) = tmp_path.iterdir()
    kept = read_reference(file)
    file.write_bytes(damage)
    _, canary, _ = open_fake(references=str(tmp_path))
    assert canary.look() == {}
    assert read_reference(file) == kept == canary._reference


def test_a_disk_that_takes_no_reference_stops_nothing(tmp_path: Path) -> None:
    tmp_path.joinpath("canary").touch()
    _, canary, _ = open_fake(references=str(tmp_path / "canary"))
    assert canary.look() == canary.look() == {}


def test_other_models_have_another_reference(tmp_path: Path) -> None:
    for fingerprint in ("one", "other"):
        chain = open_chain(StageSpec("ocr", "fake", fingerprint=fingerprint), references=str(tmp_path))
        assert Canary(chain).look() == {}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("most", [100_000_000, 600_000, 1])
def test_no_known_image_is_larger_than_an_image_may_be(most: int) -> None:
    limits = Limits(max_pixels=most)
    headers = [inspect(memoryview(file), limits) for file in draw_known(limits)]
    assert {header.format for header in headers} == {"JPEG", "PNG"}, "both ways to decode"
    assert all(header.width * header.height <= most for header in headers)
