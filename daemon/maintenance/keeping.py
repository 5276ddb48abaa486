"""Keeps answers that `visiond compare` has computed with a model that is not in use yet, so that a redo with that model does
not compute them again."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from daemon.core.errors import VisiondError, WrongArgument
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.rows import result_row
from daemon.ledger.statements import run_rows
from stages.registry import registry

GROUP = 1024  # answers in one request to the daemon
GROUP_BYTES = 4 << 20  # of the answers in a request; the daemon does nothing else while it reads them
KEEP_SECONDS = 3.0  # of computing that a crash or a power failure may cost


class ModelAnswers(msgspec.Struct, frozen=True):
    """What one model says about some images: their digests, and its answers."""

    model: Model
    answers: list[tuple[bytes, Output]]


Keep = Callable[[ModelAnswers], int]  # returns how many of the answers are new


class AnswerKeeper:
    """A context that keeps the answers of a model, in groups as they are sent to a daemon, every few seconds and at its end. It
    does so in a thread of its own, as the next answer may take minutes. kept: how many were new. trouble: why those that came
    last are not kept; they are tried again with the next ones."""

    def __init__(self, model: Model, keep: Keep) -> None:
        self.kept = 0
        self.trouble: VisiondError | None = None
        self._model, self._keep = model, keep
        self._left: list[tuple[bytes, Output]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> AnswerKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.flush()

    def add(self, digest: bytes, output: Output) -> None:
        self._left.append((digest, output))

    def _run(self) -> None:
        while not self._over.wait(KEEP_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Keep all that there is. Only one thread at a time may call it."""
        self.trouble = None
        try:
            while first := self._left[:GROUP]:
                sizes = itertools.accumulate(len(output.payload) for _, output in first)
                group = first[: max(1, sum(size <= GROUP_BYTES for size in sizes))]
                self.kept += self._keep(ModelAnswers(self._model, group))
                del self._left[: len(group)]
        except VisiondError as error:
            self.trouble = error


async def keep_answers(ledger: Ledger, groups: Sequence[ModelAnswers]) -> int:
    """Store these answers, of which the ledger has the images already; returns how many are new. An image goes on to have the
    result that it has: an answer is used when its model is configured and the image is processed again. Raises
    WrongArgument."""
    rows = []
    for group in groups:
        _check(group)
        [number] = (await ledger.run(partial(ledger.results.add, models=[group.model]))).values()
        rows += [result_row(digest, number, group.model, output) for digest, output in group.answers]
    return int(await ledger.run(lambda connection: _write(connection, rows)))


def _write(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> int:
    before = connection.total_changes
    run_rows(connection, "keep_result", rows)
    return connection.total_changes - before


def _check(group: ModelAnswers) -> None:
    """An answer that cannot be read would fail its image later. Raises WrongArgument."""
    try:
        for _, output in group.answers:
            registry.decode(group.model.stage, output.payload)
    except (registry.UnknownName, msgspec.DecodeError) as error:
        raise WrongArgument(f"an answer of {group.model.stage} cannot be kept: {error}") from error
