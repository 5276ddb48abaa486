"""The configuration as the page shows it: a table for each section, and no secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """name: of the section, as in daemon.toml. rows: each key with its value."""

    name: str
    rows: list[tuple[str, str]]


def list_tables(values: Mapping[str, Any], name: str = "") -> Iterator[SettingsTable]:
    """values: of a configuration, by section and key. A section without keys of its own is left out."""
    rows = [(key, say(value)) for key, value in values.items() if not _parts(value)]
    if rows and name:
        yield SettingsTable(name, rows)
    for key, value in values.items():
        for part in _parts(value):
            yield from list_tables(part, f"{name}.{key}" if name else key)


def say(value: object) -> str:
    """A value as daemon.toml has it, without quotes. Of an address only scheme and host: the rest, and what stands
    before the host, may be a secret."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(say, value)) or NOTHING
    if isinstance(value, str) and "://" in value:
        return _without_secrets(value)
    return NOTHING if value in ("", None, {}) else str(value)


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = urlsplit(f"//{rest}").netloc.rpartition("@")[2]
    return f"{scheme}://{host}" + ("/…" if rest.partition(host)[2].strip("/") else "")


def _parts(value: object) -> list[Mapping[str, Any]]:
    """The sections in a value: itself, or those in a list."""
    found = value if isinstance(value, list) else [value]
    return [part for part in found if isinstance(part, Mapping)]
