"""The process that embeds sentences and compares them with all images: `python -m daemon.search.child`.
It reads a StageSpec, and then questions, from standard input, and ends when that is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.core.messages import read_frame, write_frame
from daemon.search.encoder import Answer, Ask
from daemon.search.matrix import Rows, open_rows
from stages.contract.base import StageSpec
from stages.contract.processes import importing

if TYPE_CHECKING:
    from torch import Tensor

NICE = 10  # images come first
THREADS = 8  # more are not faster: memory is the limit


def main() -> None:
    os.nice(NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    spec = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=StageSpec)
    with importing(freeze=False):
        import torch
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    comparer = Comparer(spec)
    with contextlib.suppress(EOFError):  # the parent has closed it
        while True:
            question = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Ask)
            write_frame(answers, comparer.answer(question))


class Comparer:
    """The text encoder, loaded when a sentence is first asked for, and the matrix of the last question."""

    def __init__(self, spec: StageSpec) -> None:
        self._spec = spec
        self._encoder: Any = None
        self._rows: tuple[tuple[str, int], Rows] | None = None

    def answer(self, question: Ask) -> Answer:
        try:
            return self._find(question)
        except Exception as error:  # noqa: BLE001 - of a model's files, or of the matrix: whoever asked reads it
            return Answer(problem=f"sentences cannot be compared with images: {error}")

    def _find(self, question: Ask) -> Answer:
        import torch

        from stages.clip.nearest import find_nearest

        query = self._embed(question.text) if question.text else None
        if not question.rows:  # it was only to load the model
            return Answer()
        rows = self._open(question)
        query = _row_of(rows, question.like) if query is None else query
        if query is None:
            return Answer()
        allowed = None
        if question.allowed is not None:
            allowed = _allow(rows, question.allowed)
        found = find_nearest(query, rows.values, rows.scales, rows.exact, question.count, allowed, rows.fetch)
        numbers, scores = rows.numbers[found.places].tolist(), found.scores.tolist()
        if not question.text:
            return Answer(numbers, scores)
        probabilities = self._encoder.find_probabilities(torch.from_numpy(found.scores))
        if probabilities is None:
            return Answer(numbers, scores)
        count = int((probabilities >= question.least).sum())  # the first ones, as they fall with the cosines
        return Answer(numbers[:count], scores[:count], probabilities[:count].tolist())

    def _open(self, question: Ask) -> Rows:
        key = (question.folder, question.rows)
        if self._rows is None or self._rows[0] != key:
            self._rows = key, open_rows(Path(question.folder), question.rows, question.dim)
        return self._rows[1]

    def _embed(self, text: str) -> Tensor:
        if self._encoder is None:
            with importing(freeze=False):
                import torch

                from stages.clip.embeddings import load_text_encoder

            self._encoder = load_text_encoder(self._spec.files["model"], torch.float32, "cpu")
        import torch

        with torch.inference_mode():
            embedded: Tensor = self._encoder.embed_texts([text])[0]
        return embedded


def _allow(rows: Rows, bits: bytes) -> NDArray[np.bool_]:
    """Which rows may be found. bits: by number; numbers behind them may not."""
    wanted = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
    last = int(rows.numbers[-1])
    return np.pad(wanted, (0, max(0, last + 1 - len(wanted))))[rows.numbers]


def _row_of(rows: Rows, number: int) -> Tensor | None:
    """The exact embedding of a publication; None if it has none."""
    import torch

    place = int(np.searchsorted(rows.numbers, number))
    if place == len(rows.numbers) or rows.numbers[place] != number:
        return None
    return torch.from_numpy(rows.exact[place].astype(np.float32))


if __name__ == "__main__":
    main()
