"""Keeps answers that `visiond compare` has computed with a model that is not in use yet, so that a redo with that model does
not compute them again."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.messages import Output
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.rows import result_row
from daemon.ledger.statements import run_rows
from stages.registry import registry


class ModelAnswers(msgspec.Struct, frozen=True):
    """What one model says about some images: their digests, and its answers."""

    model: Model
    answers: list[tuple[bytes, Output]]


async def keep_answers(ledger: Ledger, groups: Sequence[ModelAnswers]) -> int:
    """Store these answers, of which the ledger has the images already; returns how many are new. An image goes on to have the
    result that it has: an answer is used when its model is configured and the image is processed again. Raises
    WrongArgument."""
    rows = []
    for group in groups:
        _check(group)
        [number] = (await ledger.generations.add([group.model])).values()
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
