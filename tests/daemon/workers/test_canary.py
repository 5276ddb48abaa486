"""The canary with the models of the demonstration pack: faults that give no error are noticed, and healthy models are not
suspected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from daemon.core.messages import Batch, Item, Outcome, Output, Reply, Setup
from daemon.workers.canary import (
    EARLY_SECONDS,
    HOUR_SECONDS,
    MOST_READ,
    PAUSE_SECONDS,
    READ_SECONDS,
    REST,
    SHARE,
    Canary,
    read_reference,
)
from daemon.workers.chain import Chain
from daemon.workers.known_images import draw_known
from daemon.workers.stream import REPEATS
from stages.contract.base import Image, ImageError, Limits, OutOfMemory, Reason, StageSpec
from stages.contract.binning import Thresholds
from stages.images import decoder
from stages.images.decoder import Decoders
from stages.images.images import inspect
from stages.weights import packs
from tests.daemon.workers.wrong_answers import FAULTS, black, fail
from tests.daemon_process import picture

PICTURES = len(draw_known(Limits()))
SLOW = 40.0  # seconds of a look
SMALL = {
    "ocr": {"options": {"max_side": 480, "map_side": 320}}
}  # their texts can be read there too, in less time


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
    chain = open_chain(*resolve(stage, **SMALL.get(stage, {})))
    canary = Canary(chain)
    assert canary.look() == {}
    return chain, canary


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


def open_slow(seconds: float) -> tuple[Chain, Canary, Clock]:
    """Its first look has taken so long."""
    chain, canary, clock = open_fake()

    def run_slowly(*batch: Any, **how: Any) -> Any:
        clock.now += seconds
        return Chain.run(chain, *batch, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "run", run_slowly)
        canary.look()
    clock.now = 0.0
    return chain, canary, clock


def work(chain: Chain, canary: Canary, images: int, *, different: bool = True) -> None:
    """Images of the user, of which all answers are read."""
    files = [picture(number if different else 0) for number in range(images)]
    batch = Batch(0, [Item(number * len(file), len(file), {}) for number, file in enumerate(files)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daemon.workers.canary.READ_SECONDS", 0.0)
        patch.setattr("daemon.workers.canary.MOST_READ", images)
        canary.note(chain.run(batch, memoryview(b"".join(files))))


def test_it_looks_after_a_thousand_images_for_each_picture_and_not_more_often_than_once_in_the_pause() -> (
    None
):
    _, canary, clock = open_slow(SLOW)
    clock.now = PAUSE_SECONDS
    assert not canary.is_due(SHARE * PICTURES - 1)
    assert canary.is_due(1)
    assert not canary.is_due(SHARE * PICTURES)
    clock.now += PAUSE_SECONDS
    assert canary.is_due(1)
    assert PAUSE_SECONDS < 60, "faults are noticed within a minute"


def test_the_first_look_comes_after_the_pause_whether_there_are_images_or_not() -> None:
    """In a worker on a CPU, whose first image does not wait for it."""
    _, canary, clock = open_fake()
    clock.now = 1.0
    assert canary.wait_seconds() == PAUSE_SECONDS - 1
    assert not canary.is_due(1)
    clock.now = PAUSE_SECONDS
    assert canary.wait_seconds() == 0
    assert canary.is_due(0)


def test_a_worker_that_rests_and_one_with_a_slow_model_look_once_an_hour() -> None:
    _, canary, clock = open_slow(SLOW)
    assert SLOW * SHARE > HOUR_SECONDS
    clock.now = HOUR_SECONDS - 1
    assert not canary.is_due(1)
    assert canary.wait_seconds() == 1
    clock.now += 1
    assert canary.is_due(0)
    assert canary.wait_seconds() == HOUR_SECONDS


def test_a_worker_with_little_to_do_looks_after_a_thousand_times_what_a_look_takes() -> None:
    _, canary, clock = open_slow(0.2)
    clock.now = 0.2 * SHARE - 1
    assert not canary.is_due(1)
    clock.now += 1
    assert canary.is_due(1)


def test_a_worker_that_often_rests_looks_after_a_hundred_times_what_a_look_takes() -> None:
    """In both threads together; and not more often than once in the pause."""
    _, canary, clock = open_slow(0.5)
    assert not canary.is_due(1, rested=0.5 * REST)
    clock.now += PAUSE_SECONDS
    assert canary.is_due(1)
    clock.now += PAUSE_SECONDS
    assert not canary.is_due(1, rested=1000 * REST), "that look may still last"
    canary._seconds, canary._rested = 0.5, 0.0
    assert not canary.is_due(1, rested=0.5 * REST - 1)
    assert canary.is_due(1, rested=1)


def test_a_stage_that_repeats_itself_is_looked_at_after_the_pause_and_then_half_as_often() -> None:
    chain, canary, clock = open_slow(1.0)
    work(chain, canary, REPEATS, different=False)
    assert not canary.is_due(1)
    assert canary.wait_seconds() == PAUSE_SECONDS, "also if no image comes any more"
    clock.now = PAUSE_SECONDS
    assert canary.is_due(1)
    assert canary.suspicious() == ["ocr"]
    assert canary.look() == {}
    assert canary.suspicious() == []
    work(chain, canary, REPEATS - 1, different=False)
    assert canary.suspicious() == []
    work(chain, canary, 1, different=False)
    assert canary.suspicious() == ["ocr"]


def test_doubts_cause_no_look_within_some_minutes_and_none_that_takes_more_than_a_hundredth_of_the_time() -> (
    None
):
    for seconds, pause in ((1.0, EARLY_SECONDS), (SLOW / 2, REST * SLOW / 2)):
        chain, canary, clock = open_slow(seconds)
        clock.now = PAUSE_SECONDS
        work(chain, canary, REPEATS, different=False)
        assert canary.is_due(0)
        canary._seconds = seconds  # and it judges nothing: the device's memory is full
        clock.now += pause - 1
        assert not canary.is_due(0)
        assert canary.wait_seconds() == 1
        clock.now += 1
        assert canary.is_due(0)


def test_a_second_look_does_not_begin_during_one_that_lasts() -> None:
    chain, canary, clock = open_fake()
    clock.now = PAUSE_SECONDS
    work(chain, canary, REPEATS, different=False)
    assert canary.is_due(0)
    clock.now += 2 * PAUSE_SECONDS
    assert not canary.is_due(0)
    assert canary.wait_seconds() > 0


def test_of_many_answers_only_eight_of_four_batches_a_second_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, canary, clock = open_fake()
    read: list[bytes] = []
    monkeypatch.setattr(canary._streams["ocr"], "note", read.extend)
    for _ in range(8):
        outcomes = [Outcome("PNG", 1, 1, {"ocr": Output(b"%d" % number, 0.0)}) for number in range(100)]
        canary.note(Reply(0, outcomes, []))
        clock.now += READ_SECONDS / 2
    assert read == [b"%d" % number for number in range(0, 100, 13)] * 4
    assert len(read) == 4 * MOST_READ


def test_a_look_that_judges_nothing_settles_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, canary, _ = open_fake()
    work(chain, canary, REPEATS, different=False)

    def fill(images: Sequence[Image]) -> list[Any]:
        raise OutOfMemory("the GPU is full")

    with monkeypatch.context() as full:
        full.setattr(chain.stages[0], "run", fill)
        assert canary.look() == {}
    assert canary.suspicious() == ["ocr"]
    assert canary.look() == {}
    assert canary.suspicious() == []


def test_different_answers_are_not_suspicious() -> None:
    chain, canary, clock = open_slow(SLOW)
    for _ in range(4):
        work(chain, canary, REPEATS)
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


@pytest.mark.parametrize(("single", "sizes"), [(True, [1] * PICTURES), (False, [PICTURES])])
def test_where_images_come_alone_known_images_do_too(
    single: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches = open_chain(StageSpec("ocr", "fake", single=single)), []
    run = chain.run

    def note(batch: Batch, *arguments: Any, **options: Any) -> Reply:
        batches.append(len(batch.items))
        return run(batch, *arguments, **options)

    monkeypatch.setattr(chain, "run", note)
    assert Canary(chain).look() == {}
    assert batches == sizes
