"""Running figures of answers: what is a doubt, and what is none."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from daemon.core.messages import Outcome, Output, Reply, Setup
from daemon.workers.canary import MOST_READ, READ_SECONDS, REST, SHARE, Canary
from daemon.workers.chain import Chain
from daemon.workers.stream import FAR, REPEATS, WINDOW, AnswerStream
from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip, Embedding
from stages.contract.base import Limits, Result, StageSpec
from stages.hash.descriptor import Hash
from stages.ocr.descriptor import Ocr
from stages.yolo.descriptor import Objects

DIM, POOL = 64, 3000
LOOK_SECONDS = 6.5
Kind = TypeVar("Kind")
rng = np.random.default_rng(0)
CENTER, OTHER = (rng.normal(size=DIM) for _ in range(2))


def near(center: Any, noise: float) -> bytes:
    """The answer with an embedding at random round a center: the smaller the noise, the nearer."""
    vector = center / np.linalg.norm(center) + noise * rng.normal(size=DIM) / np.sqrt(DIM)
    values = (vector / np.linalg.norm(vector)).astype("<f2").tobytes()
    return msgspec.json.encode(Clip(Embedding(DIM, "float16", base64.b64encode(values).decode()), []))


# Two embeddings of photos have a cosine of 0.5; of one kind of pictures 0.8; of blank pages 0.998.
PHOTOS, PORTRAITS, BLANKS = (
    [near(center, noise) for _ in range(POOL)]
    for center, noise in ((CENTER, 1.0), (OTHER + CENTER, 0.5), (OTHER, 0.045))
)
CONSTANT = [near(OTHER, 1e-3) for _ in range(POOL)]  # noise of the last bits
TEXTS = [msgspec.json.encode(Ocr([], 1 + number, 0.1, text=f"{number}")) for number in range(POOL)]
SILENCE = msgspec.json.encode(Ocr([], 0, 0.0))


def batched(items: Iterable[Kind], size: int) -> Iterator[list[Kind]]:
    each = iter(items)
    while batch := list(islice(each, size)):
        yield batch


def open_stream(result: type[Result], usual: Sequence[bytes]) -> AnswerStream:
    """It knows what is usual."""
    stream = AnswerStream(result)
    feed(stream, usual, POOL)
    assert not stream.is_doubtful
    return stream


def feed(stream: AnswerStream, payloads: Sequence[bytes], count: int) -> int:
    """Images in batches of 8, until they are a doubt; how many these were."""
    for number, batch in enumerate(batched(islice(cycle(payloads), count), 8), 1):
        stream.note(batch)
        if stream.is_doubtful:
            return 8 * number
    return count


def test_one_embedding_for_all_images_with_noise_in_the_last_bits_is_a_doubt_at_once() -> None:
    assert len(set(CONSTANT[:REPEATS])) == REPEATS
    stream = open_stream(Clip, PHOTOS)
    assert feed(stream, CONSTANT, POOL) <= 2 * REPEATS


def test_one_embedding_between_others_is_a_doubt_too() -> None:
    """As if one of several streams of a GPU were broken."""
    stream = open_stream(Clip, PHOTOS)
    mixed = [payload for pair in zip(PHOTOS, CONSTANT, strict=True) for payload in pair]
    assert feed(stream, mixed, 10 * WINDOW) < 2 * WINDOW


def test_equal_embeddings_stay_suspicious_although_the_known_images_are_right_until_they_differ() -> None:
    stream = open_stream(Clip, PHOTOS)
    for _ in range(4):
        stream.note(CONSTANT)
        stream.settle()
    assert stream.is_collapsed
    assert not stream.is_doubtful
    stream.note(PHOTOS)
    assert not stream.is_collapsed


@pytest.mark.parametrize("kind", [PORTRAITS, BLANKS])
def test_another_kind_of_pictures_is_one_doubt_and_usual_when_the_known_images_are_right(
    kind: list[bytes],
) -> None:
    stream = open_stream(Clip, PHOTOS)
    assert feed(stream, kind, POOL) < POOL
    stream.note(kind)
    stream.settle()
    assert feed(stream, kind, 10 * POOL) == 10 * POOL
    assert not stream.is_collapsed


def test_embeddings_that_drift_are_a_doubt() -> None:
    stream = open_stream(Clip, PHOTOS)
    drifting = [near((1 - part) * CENTER + part * OTHER, 1.0) for part in np.linspace(0, 1, 10 * WINDOW)]
    assert feed(stream, drifting, len(drifting)) < len(drifting)
    assert feed(open_stream(Clip, PHOTOS), PHOTOS, 10 * WINDOW) == 10 * WINDOW


@pytest.mark.parametrize(
    ("result", "answer", "nothing"),
    [
        (Ocr, Ocr([], 1, 0.1), Ocr([], 0, 0.0)),
        (Ocr, Ocr([], 0, 0.0, text="a page"), Ocr([], 0, 0.0, text="")),
        (Objects, Objects([], 2, 1, 0.1), Objects([], 0, 0, 0.0)),
        (Caption, Caption("a dog", None), Caption("", None)),
    ],
)
def test_more_empty_answers_than_before_are_a_doubt(result: Any, answer: Any, nothing: Any) -> None:
    full, empty = msgspec.json.encode(answer), msgspec.json.encode(nothing)
    stream = open_stream(result, [empty, *[full] * 9])
    assert feed(stream, [empty, full], 10 * WINDOW) < WINDOW
    stream = open_stream(result, [empty, *[full] * 9])
    assert feed(stream, [empty, *[full] * 4], 10 * WINDOW) == 10 * WINDOW, f"less than {FAR} more"


def test_embeddings_that_are_no_numbers_do_not_stay_in_the_mean() -> None:
    stream = open_stream(Clip, PHOTOS)
    values = base64.b64encode(np.full(DIM, np.nan, "<f2").tobytes()).decode()
    broken = msgspec.json.encode(Clip(Embedding(DIM, "float16", values), []))
    assert feed(stream, [broken], POOL) < POOL
    stream.settle()
    for _ in range(4):
        stream.note(PHOTOS)
        stream.settle()
    assert feed(stream, PHOTOS, POOL) == POOL


def test_of_a_stage_with_another_type_of_result_only_repeats_count() -> None:
    stream = AnswerStream(Hash)
    answers = [msgspec.json.encode(Hash(f"{number:016x}")) for number in range(2)]
    assert feed(stream, answers, 10 * WINDOW) == 10 * WINDOW
    assert feed(stream, answers[:1], 10 * WINDOW) <= REPEATS + 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def arrive(images: int) -> Iterator[tuple[bytes, bytes]]:
    """What CLIP and OCR answer to photos, each tenth with a text; between them bursts of one file, blank pages and folders with
    one kind of picture, of up to 5,000 images."""
    kinds: list[Callable[[int], tuple[bytes, bytes]]] = [
        lambda n: (PHOTOS[n % POOL], TEXTS[n % POOL] if n % 10 == 0 else SILENCE),
        lambda _: (PHOTOS[7], TEXTS[7]),
        lambda n: (BLANKS[n % POOL], SILENCE),
        lambda n: (PORTRAITS[n % POOL], SILENCE),
        lambda n: (PHOTOS[-n % POOL], TEXTS[n % POOL]),
    ]
    done, order = 0, np.random.default_rng(1)
    while done < images:
        kind, count = kinds[order.choice([0, 0, 1, 2, 3, 4])], int(order.integers(20, 5000))
        yield from map(kind, range(min(count, images - done)))
        done += count


def test_of_200_000_good_images_none_is_an_alarm_and_few_looks_are_early() -> None:
    """32 a second, so that all are read. All looks but the first one are early."""
    specs = [StageSpec("clip", "fake"), StageSpec("ocr", "fake")]
    chain, clock = (
        Chain(Setup("w", "cpu", specs, 0, 1, 1, Limits(), None, ["clip", "ocr"]), memoryview(b"")),
        Clock(),
    )
    chain.load()
    canary, looks, longest, since = Canary(chain, clock), 0, 0.0, 0.0
    for batch in batched(arrive(200_000), MOST_READ):
        clock.now += READ_SECONDS
        outputs = [{"clip": Output(clip, 0.0), "ocr": Output(ocr, 0.0)} for clip, ocr in batch]
        canary.note(Reply(0, [Outcome("PNG", 1, 1, output) for output in outputs], []))
        if canary.is_due(0):
            looks += 1
            assert canary.look() == {}
            canary._seconds = LOOK_SECONDS
        since = since if canary.suspicious() else clock.now
        longest = max(longest, clock.now - since)
    assert clock.now < SHARE * LOOK_SECONDS
    assert 3 <= looks <= 2 + clock.now / (REST * LOOK_SECONDS)
    assert longest <= REST * LOOK_SECONDS + 1
