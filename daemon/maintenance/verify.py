"""Compares ledger and sidecars, and restores each from the other. No model runs. While a daemon works, they are only compared.

Sidecars are made from the ledger, so one that is missing or edited is written again. Each
has all data of its result, so a ledger that is lost or damaged is made again from them.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

from daemon.config.loading import Config
from daemon.config.state import IDENTITY, LEDGER, lock_state
from daemon.core.errors import (
    AlreadyRunning,
    ConfigError,
    IdentityDamaged,
    LedgerDamaged,
    LedgerUnusable,
    NothingFound,
    NotWritable,
    OtherLedger,
)
from daemon.core.hints import command
from daemon.inbox.names import find_left_out, find_renamed, remember_names
from daemon.ledger import identity
from daemon.ledger.records import Reader, open_reader
from daemon.ledger.schema import trouble_named
from daemon.ledger.soundness import is_blank
from daemon.maintenance.comparing import compare, lasting
from daemon.maintenance.rebuild import rebuild
from daemon.maintenance.sidecars import Showing, SidecarState, folders_of, list_sidecars
from daemon.results.destinations import Destination
from daemon.results.folder_locks import lock_outputs


def verify(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """Compare every sidecar and reason of failure with the ledger.

    Raises NothingFound without a ledger, LedgerDamaged; ConfigError if inboxes have other names than before.
    """
    # Open before locking: the lock makes the folder.
    with open_reader(config) as reader:
        if problems := find_renamed(config, reader):  # every sidecar would look edited or missing
            raise ConfigError(problems)
    with open_reader(config) as reader, contextlib.ExitStack() as locks:
        try:
            locks.enter_context(lock_state(config.state.path))
            is_alone = True
        except AlreadyRunning:
            is_alone = False
        _check_file(reader, showing)
        findings = compare(reader, config, showing)
        yield from findings if is_alone else lasting(reader, config, findings)


def would_repair(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """What `repair` would find, by which nothing is changed; "restored": it would be in a new ledger.

    Raises as `verify`; NothingFound when there is neither; IdentityDamaged, of which only a repair sees how much is sound.
    """
    _check_source(config)
    try:
        yield from verify(config, showing)
    except IdentityDamaged:
        raise
    except (NothingFound, LedgerDamaged):
        folders = folders_of(Destination.of(inbox, config) for inbox in config.inbox)
        yield from (SidecarState("restored", file) for file in list_sidecars(*folders))


def repair(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """As `verify`, but write missing and edited sidecars again, and a new ledger if it is lost or damaged.

    Raises AlreadyRunning, LedgerUnusable, NotWritable, NothingFound when there is neither.
    """
    _check_source(config)
    try:
        with lock_state(config.state.path), lock_outputs(config, make=False):
            with contextlib.suppress(NothingFound, LedgerDamaged):
                yield from _settle_identity(config, showing)
                with open_reader(config) as reader:
                    _check_file(reader, showing)
                    yield from compare(reader, config, showing, fix=True)
                    remember_names(config)
                    return
            with trouble_named(config.state.path / LEDGER):
                yield from rebuild(config, showing)
            remember_names(config)
    except LedgerUnusable:  # an OSError too, with a better message
        raise
    except OSError as error:
        fix = f"Make room or give this user the right to write there, then run `{command('repair')}` again."
        where = os.fsdecode(error.filename or config.state.path)
        raise NotWritable(f"{where} cannot be read or written: {error.strerror or error}. {fix}") from error


def _settle_identity(config: Config, showing: Showing) -> Iterator[SidecarState]:
    """If only the file `identity` is damaged, write it again from the ledger.

    Raises LedgerDamaged when the ledger is damaged too, or belongs elsewhere; NothingFound.
    """
    path = config.state.path / LEDGER
    try:
        with open_reader(config):
            return
    except IdentityDamaged as error:
        if is_blank(path):
            raise
        with trouble_named(path), contextlib.closing(Reader(path, of_any_id=True)) as reader:
            _check_file(reader, showing)
            if isinstance(error, OtherLedger) and not _has_made(reader, config, showing):
                raise
    identity.adopt(path)
    detail = (
        "it did not name the ledger in its folder, which is undamaged; it was written again from the ledger"
    )
    yield SidecarState("damaged", os.fsencode(config.state.path / IDENTITY), detail)


def _has_made(reader: Reader, config: Config, showing: Showing) -> bool:
    """Whether most sidecars belong to this ledger, so that it does not overwrite those of another one."""
    counts = Counter(finding.kind for finding in compare(reader, config, showing))
    return counts["whole"] >= counts["edited"] + counts["foreign"]


def _check_file(reader: Reader, showing: Showing) -> None:
    """Raises LedgerDamaged."""
    sentence = f"reading the ledger, {reader.path.stat().st_size >> 20:,} MiB"
    reader.check_file(lambda: showing.wait(sentence))


def describe_left_out(config: Config) -> list[str]:
    """Why the results of some inboxes were not compared or written again, a sentence for each inbox."""
    with contextlib.suppress(NothingFound, LedgerDamaged), open_reader(config) as reader:
        return find_left_out(config, reader)
    return []


def _check_source(config: Config) -> None:
    """Raises NothingFound when there is neither a ledger nor a sidecar."""
    path = config.state.path / LEDGER
    folders = folders_of(Destination.of(inbox, config) for inbox in config.inbox)
    if not path.exists() and not any(list_sidecars(*folders)):
        identity = config.state.path / IDENTITY
        begin = f"Remove {identity}, and `{command('run')}`" if identity.exists() else f"`{command('run')}`"
        raise NothingFound(
            f"There is neither a ledger at {path} nor a sidecar in {config.output.results}: is this the right configuration? "
            f"{begin} starts with an empty one."
        )
