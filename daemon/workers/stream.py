"""Running figures of a worker's answers to the user's images: whether they have become others than before.

They stop nothing. A doubt makes the worker look at the known images (canary.py), and these decide: blank pages, or a folder
with one kind of picture, are no fault. If the known images are right, what the images give now is usual from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from daemon.core.sidecar import unpack_embedding
from daemon.workers.judging import SAME_COSINE
from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip, Embedding
from stages.contract.base import Result
from stages.ocr.descriptor import Ocr
from stages.yolo.descriptor import Objects

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float32]  # a row for each image

WINDOW = 1000  # answers: how far back the means reach, in which older ones count exponentially less
REPEATS = 16  # equal answers in a row, which are a doubt
FAR = 0.25  # of a mean from what it usually was: of embeddings as a distance, of empty answers as a share
# Length of the mean embedding: above the first they are the same for all images, below the second no more.
COLLAPSED, SPREAD = 0.9999, 0.999


class Embedded(msgspec.Struct):
    """What is read of an embedding's JSON."""

    embedding: Embedding


class CountedAnswer(msgspec.Struct):
    """What is read of lines, objects and captions."""

    count: int = 0
    text: str | None = None


read_embedded = msgspec.json.Decoder(Embedded).decode
read_counted = msgspec.json.Decoder(CountedAnswer).decode


def measure_embeddings(payloads: Sequence[bytes]) -> Numbers:
    """Each of length 1; of zeros if it is none."""
    import numpy as np

    said = [read_embedded(payload).embedding for payload in payloads]
    rows = np.stack([unpack_embedding(each.base64, each.dtype) for each in said]).astype(np.float32)
    rows = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    units: Numbers = rows / np.maximum(lengths, 1e-6)
    return units


def measure_empty(payloads: Sequence[bytes]) -> Numbers:
    """1 for an answer without lines, objects or words."""
    import numpy as np

    said = map(read_counted, payloads)
    return np.array([[not (each.count or each.text)] for each in said], dtype=np.float32)


MEASURES: dict[type, Callable[[Sequence[bytes]], Numbers]] = {
    Clip: measure_embeddings,
    **dict.fromkeys((Ocr, Objects, Caption), measure_empty),
}


class AnswerStream:
    """The answers of one stage in one worker; of many images in a short time only to some."""

    def __init__(self, result: type[Result]) -> None:
        self._measure = MEASURES.get(result)
        self._repeats, self._patience = 0, REPEATS
        self._last_payload = b""
        self._last: Numbers | None = None
        self._images = 0
        self._mean: Numbers | None = None
        self._usual: Numbers | None = None  # that mean when the known images were last right
        self._has_moved = False
        self.is_collapsed = False

    @property
    def is_doubtful(self) -> bool:
        """Whether the known images should be looked at."""
        return self._has_moved or self._repeats >= self._patience

    def settle(self) -> None:
        """The known images are right. A stage that repeats itself must then do so twice as often before that is a doubt."""
        self._usual = self._mean if self._images >= WINDOW else None
        self._has_moved = False
        self._patience = max(REPEATS, 2 * self._repeats)

    def note(self, payloads: Sequence[bytes]) -> None:
        """Answers to some images, as JSON."""
        if not payloads:
            return
        if not self._measure:
            self._count_repeats(self._compare(payloads))
            return
        rows = self._measure(payloads)
        is_same = self._compare_rows(rows) if self._measure is measure_embeddings else self._compare(payloads)
        self._count_repeats(is_same)
        self._move(rows)

    def _compare(self, payloads: Sequence[bytes]) -> list[bool]:
        """Whether each answer is that of the image before."""
        before = [self._last_payload, *payloads]
        self._last_payload = payloads[-1]
        return [one == other for one, other in zip(before, payloads, strict=False)]

    def _compare_rows(self, rows: Numbers) -> list[bool]:
        """But for rounding."""
        import numpy as np

        before = np.vstack([rows[:1] * 0 if self._last is None else self._last, rows[:-1]])
        self._last = rows[-1:]
        same: list[bool] = (np.einsum("ij,ij->i", before, rows) > SAME_COSINE).tolist()
        return same

    def _count_repeats(self, is_same: list[bool]) -> None:
        last = is_same[::-1]
        self._repeats = last.index(False) + 1 if False in last else self._repeats + len(last)

    def _move(self, rows: Numbers) -> None:
        self._images += len(rows)
        share = max(len(rows) / self._images, 1 - (1 - 1 / WINDOW) ** len(rows))
        mean = rows.mean(axis=0)
        self._mean = mean if self._mean is None else self._mean + share * (mean - self._mean)
        if self._images < WINDOW:
            return
        if self._usual is None:
            self._usual = self._mean
        self._has_moved |= length_of(self._mean - self._usual) > FAR
        length = length_of(self._mean) if self._measure is measure_embeddings else 0.0
        if length > COLLAPSED and not self.is_collapsed:
            self.is_collapsed = self._has_moved = True
        elif length < SPREAD:
            self.is_collapsed = False


def length_of(vector: Numbers) -> float:
    return math.sqrt(vector @ vector)
