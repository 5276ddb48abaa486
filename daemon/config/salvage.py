"""What can still be read of a daemon.toml with a problem, for commands that only look: where the ledger and the daemon are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from daemon.config.loading import Config, parse
from daemon.config.values import parse_toml, read_text
from daemon.config.variables import apply_variables
from daemon.core.errors import ConfigError

HEADER = re.compile(r"^(?=\s*\[)", re.MULTILINE)  # before each line that may begin a table


def load_rest(path: Path) -> Config | None:
    """The configuration without the tables that have a problem, which have their defaults; None if [state] is one of
    these, or if nothing can be read."""
    try:
        text = read_text(path)
    except (OSError, ConfigError):
        return None
    document = _parse_tables(text)
    if document is None:
        return None
    try:
        apply_variables(document, Config)
    except ConfigError as error:
        if any(problem.startswith("VISIOND_STATE_") for problem in error.problems):
            return None
    return _keep_valid(document, path.parent)


def _parse_tables(text: str) -> dict[str, Any] | None:
    """The tables that are valid TOML. None if [state] is not, or if they cannot be told apart."""
    kept = []
    for table in HEADER.split(text):
        try:
            parse_toml(table)
            kept.append(table)
        except ValueError:
            if re.search(r"\bstate\b", table.partition("\n")[0]):
                return None
    try:
        return parse_toml("".join(kept))
    except ValueError:
        return None


def _keep_valid(document: dict[str, Any], folder: Path) -> Config | None:
    """Checks each top table alone, as some of them are refused only together with others."""
    valid: dict[str, Any] = {}
    for name in sorted(document, key=lambda name: name != "state"):
        try:
            parse(valid | {name: document[name]}, folder)
        except ConfigError:
            if name == "state":
                return None
        else:
            valid[name] = document[name]
    return parse(valid, folder)
