"""How many bytes the models of the catalog have: those that are here on the disk, others as the model hub says, if it may be
asked. No size is written down anywhere, as a repository may change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from daemon.core.hints import quantity
from daemon.terminal.display import errors, printable
from daemon.terminal.progress import LATE_SECONDS, Progress
from stages.contract.manifest import HubUnreachable, PackError, list_files
from stages.weights import names, pulling
from stages.weights.catalog import PublishedModel
from stages.weights.hub import Hub, HuggingFaceHub

AT_ONCE = 8  # models that the hub is asked about


class Sizes(NamedTuple):
    """known: bytes by the name of the model. problem: why the hub did not say some; empty if it was not asked, or did."""

    known: dict[str, int]
    problem: str = ""


def find_sizes(folder: Path, models: Sequence[PublishedModel], *, ask: bool) -> Sizes:
    """folder: of the models that were pulled. ask: the hub about the others, which takes some seconds."""
    pulled = {model.name: names.find_pulled(model.name, folder) for model in models}
    known = {
        name: sum(file.stat().st_size for file in list_files(place))
        for name, place in pulled.items()
        if place
    }
    others = [model for model in models if model.name not in known]
    return add_asked(known, others) if ask else Sizes(known)


def add_asked(known: dict[str, int], others: Sequence[PublishedModel]) -> Sizes:
    """What is known, and the sizes of others as the hub says."""
    problems: list[PackError] = []
    hub = HuggingFaceHub(lambda sentence: errors.print(printable(sentence)))
    # One alone: if the hub cannot be reached, each of the others would wait for it too.
    first = [ask_hub(hub, model) for model in others[:1]]
    if first and isinstance(first[0], HubUnreachable):
        return Sizes(known, f"The size is not known of {quantity(len(others), 'model')}: {first[0]}")
    with ThreadPoolExecutor(AT_ONCE) as pool, Progress("models", len(others), after=LATE_SECONDS) as progress:
        answers = itertools.chain(first, pool.map(partial(ask_hub, hub), others[1:]))
        for model, size in zip(others, progress.track(answers), strict=True):
            if isinstance(size, PackError):
                problems.append(size)
            elif size is not None:
                known[model.name] = size
    if not problems:
        return Sizes(known)
    return Sizes(
        known, f"The size is not known of {quantity(len(problems), 'model')}. Of the first: {problems[0]}"
    )


def ask_hub(hub: Hub, model: PublishedModel) -> int | PackError | None:
    """What `models pull` would download; why that is not known; or None if the hub does not say it."""
    try:
        if model.file:
            return hub.describe(model.repository).sizes.get(model.file)
        parts = pulling.plan_parts(hub, names.read_reference(model.name), allow_pickle=True)
    except PackError as error:
        return error
    sizes = [part.size_bytes for part in parts]
    return None if None in sizes else sum(filter(None, sizes))
