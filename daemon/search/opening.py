"""Opens the search of a configuration: its index, brought up to date, and the model that understands sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import structlog
from anyio import sleep, to_thread

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from daemon.ledger.records import Reader
from daemon.search.index import Index, check_ledger
from daemon.search.searcher import Searcher
from stages.contract.base import StageSpec

log = structlog.get_logger()

CATCH_UP_SECONDS, TROUBLE_SECONDS = 1.0, 30.0
EMBEDDER = "clip"  # the stage whose embeddings are compared


@contextlib.contextmanager
def open_searcher(
    config: Config, reader: Reader, note: Callable[[int, int], object] = lambda place, last: None
) -> Iterator[Searcher]:
    """note: called while the index is brought up to date, with how far it is and with the last number.
    Raises SearchUnusable."""
    with contextlib.closing(make_searcher(config, reader)) as searcher:
        searcher.catch_up(note)
        yield searcher


@contextlib.contextmanager
def open_index(
    config: Config, reader: Reader, note: Callable[[int, int], object] = lambda place, last: None
) -> Iterator[Index]:
    """Only the index, as above. Raises SearchUnusable."""
    check_ledger(reader)
    with contextlib.closing(Searcher(config.state.path, reader, None)) as searcher:
        searcher.catch_up(note)
        yield searcher.index


def make_searcher(config: Config, reader: Reader, *, by_meaning: bool = True) -> Searcher:
    """Its index is as it was left. Raises SearchUnusable."""
    check_ledger(reader)
    spec = find_embedder(config) if by_meaning else None
    return Searcher(config.state.path, reader, spec, config.search.probability_threshold)


async def keep_up_to_date(searcher: Searcher) -> None:
    """Its index, so that a search finds it so. A problem is logged once, and tried again."""
    last = ""
    while True:
        problem = ""
        try:
            await to_thread.run_sync(searcher.catch_up, abandon_on_cancel=True)
        except VisiondError as error:
            problem = str(error)
        if problem and problem != last:
            log.error("the search is not kept up to date", why=problem)
        last = problem
        await sleep(TROUBLE_SECONDS if problem else CATCH_UP_SECONDS)


def find_embedder(config: Config) -> StageSpec | None:
    """The stage that makes embeddings, with its files; None if it is off, a fake, or its model is not here."""
    if EMBEDDER not in config.stage_names:
        return None
    from daemon.layout.models import choose_dtypes, resolve_models
    from daemon.system.gpus import list_gpus

    gpus = list_gpus()
    try:
        spec = resolve_models(choose_dtypes(config, gpus), gpus)[EMBEDDER]
    except VisiondError as error:
        log.warning("images can be searched for by words only", why=str(error))
        return None
    return spec if "model" in spec.files else None
