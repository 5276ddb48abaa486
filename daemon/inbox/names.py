"""The names of the inboxes. The ledger knows an inbox by its path, but its results are in a folder with its
name. If the name changes, the results stay behind; if two inboxes swap names, each gets the other's results.
So the names are kept in a file."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from pathlib import Path

import structlog

from daemon.config.loading import Config
from daemon.config.state import NAMES
from daemon.core.errors import ConfigError
from daemon.core.hints import command
from daemon.core.urls import is_url
from daemon.ledger.records import Reader

log = structlog.get_logger()


def check_names(config: Config, reader: Reader) -> None:
    """Raises ConfigError when an inbox that has results has a different name than before;
    otherwise saves the names."""
    if problems := find_renamed(config, reader):
        raise ConfigError(problems)
    for warning in find_left_out(config, reader):
        log.warning(warning)
    remember_names(config)


def find_renamed(config: Config, reader: Reader) -> list[str]:
    """A sentence for each inbox whose results are under another name."""
    known, numbers = (
        _read(config.state.path / NAMES),
        {path: number for number, path in reader.inboxes().items()},
    )
    problems = []
    for inbox in config.inbox:
        before, number = known.get(inbox.place, inbox.name), numbers.get(inbox.root)
        if before != inbox.name and number is not None and reader.has_results(number):
            fix = f"Use the old name again, or run `{command('repair')}`, which writes the results under the new one"
            problems.append(
                f"inbox {inbox.place}: its name was {_quoted(before)} and is {_quoted(inbox.name)} in this configuration, but "
                f"its results are under the old name. {fix}; the old sidecars, and links and copies in bins, stay."
            )
    return problems


def find_left_out(config: Config, reader: Reader) -> list[str]:
    """A sentence for each inbox that has results and is not
    in this configuration: perhaps its folder was moved."""
    configured = {inbox.root for inbox in config.inbox}
    known = [path for number, path in reader.inboxes().items() if reader.has_results(number)]
    new = [os.fsdecode(path) for path in configured.difference(known)]
    moved_to = new[0] if len(new) == 1 else "NEW-FOLDER"
    return [
        f"the ledger has results of the inbox {path}, which is not in this configuration: they stay as they are."
        if is_url(path)
        else f"the ledger has results of the inbox {path}, which is not in this configuration: they stay as they are. If that "
        f"folder was moved or renamed, keep its old path in the configuration, and make that a link to the new one: "
        f"`{shlex.join(['ln', '-s', moved_to, path])}`. Under another path all its images count as new: each gets a second "
        "result, and lists and exports have it twice."
        for path in map(os.fsdecode, known)
        if os.fsencode(path) not in configured
    ]


def remember_names(config: Config) -> None:
    """Save the names; those of inboxes that are no longer configured are kept."""
    file = config.state.path / NAMES
    known = _read(file)
    names = known | {inbox.place: inbox.name for inbox in config.inbox}
    if names == known:
        return
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(names, indent=1))
        partial.replace(file)
    except OSError as error:  # the next start tries again
        log.warning("the inboxes' names could not be saved", file=str(file), error=error.strerror)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, str]:
    """Name by path; empty if the file is missing or was torn by a crash."""
    try:
        names = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return names if isinstance(names, dict) else {}


def _quoted(name: str) -> str:
    return f'"{name}"' if name else "empty"
