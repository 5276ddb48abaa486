"""What `visiond check` says of the ledger, its backups, and the sinks that get its records."""

from __future__ import annotations

from collections.abc import Iterator

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.core.errors import NothingFound, VisiondError
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.core.stores import find_trouble
from daemon.inbox.names import find_left_out, find_renamed
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.records import open_reader
from daemon.ledger.schema import DURATION, WITH_ORDER, check_room, newest, read_version
from daemon.results.sinks import open_sinks
from daemon.results.uploads import StoreSink
from daemon.terminal.display import Finding, graded


def examine_backups(config: Config) -> Iterator[Finding]:
    if not (url := config.upkeep.backup_url):
        return
    problem = find_trouble(url)
    yield Finding("error" if problem else "ok", f"backups: {problem or f'{url} can be listed'}.")


def examine_sinks(config: Config) -> Iterator[Finding]:
    for name, sink in open_sinks(config).items():
        problem = sink.ask_store() if isinstance(sink, StoreSink) else sink.problem()
        said = problem or f"can take records{_say_what_it_lacks(config, name)}"
        yield Finding("error" if problem else "ok", f"sink {name}: {said}.")


def _say_what_it_lacks(config: Config, sink: str) -> str:
    """Of a sink that is new to the ledger. Whether that can be read is said elsewhere."""
    try:
        with open_reader(config) as reader:
            done = reader.counts().get(JobStatus.DONE, 0)
            if not done or sink in reader.sinks():
                return ""
    except VisiondError:
        return ""
    return (
        f" from now on. For {quantity(done, 'image')} that {'is' if done == 1 else 'are'} DONE already, type "
        f"`{command('redo', '--all')}`: no model that has not changed runs again"
    )


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
