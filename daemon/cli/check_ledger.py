"""What `visiond check` says of the ledger, its backups, and the sinks that get its records."""

from __future__ import annotations

from collections.abc import Iterator, Set

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.core.errors import NothingFound, VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.core.stores import find_trouble
from daemon.inbox.names import find_left_out, find_renamed
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.records import open_reader
from daemon.ledger.schema import DURATION, WITH_ORDER, check_room, newest, read_version
from daemon.monitoring.snapshot import describe_earlier
from daemon.results.sinks import describe_found, open_sinks
from daemon.results.uploads import StoreSink
from daemon.terminal.display import Finding, graded


def examine_backups(config: Config) -> Iterator[Finding]:
    if not (url := config.upkeep.backup_url):
        return
    problem = find_trouble(url)
    yield Finding("error" if problem else "ok", f"backups: {problem or f'{url} can be listed'}.")


def examine_sinks(config: Config) -> Iterator[Finding]:
    if not (sinks := open_sinks(config)):
        return
    done, known = _read_progress(config)
    lack = f" from now on. {describe_earlier(done)}"
    for name, sink in sinks.items():
        problem = sink.ask_store() if isinstance(sink, StoreSink) else sink.problem()
        said = problem or f"can take records{lack if done and name not in known else ''}"
        yield Finding("error" if problem else "ok", f"sink {name}: {said}.")
    yield from graded("warning", describe_found(sinks, sinks.keys() - known))


def _read_progress(config: Config) -> tuple[int, Set[str]]:
    """The number of images that are DONE, and the sinks that the ledger knows; none if it cannot be read, which is said
    elsewhere."""
    try:
        with open_reader(config) as reader:
            return reader.counts()[JobStatus.DONE], reader.sinks().keys()
    except VisiondError:
        return 0, frozenset()


def examine_ledger(config: Config) -> Iterator[Finding]:
    """Only whether it opens; `verify` reads it from end to end."""
    path = config.state.path / LEDGER
    try:
        with open_reader(config) as reader:
            images = sum(reader.counts().values())
            yield from graded("error", find_renamed(config, reader))
            yield from graded("warning", find_left_out(config, reader))
            with reader.lend() as connection:
                version = read_version(path, connection)
        if version < WITH_ORDER:
            check_room(path, version)
            yield Finding(
                "warning",
                f"ledger: the next start migrates it from schema {version} to {newest()}; {DURATION}.",
            )
        yield Finding("ok", f"ledger: {path} is readable and has {quantity(images, 'version')} of files.")
    except NothingFound:  # `run` creates it
        if warning := describe_lost_ledger(config):
            yield Finding("warning", warning)
    except VisiondError as error:
        yield Finding("error", f"ledger: {error}")
