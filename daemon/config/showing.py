"""The configuration as people read it: every key with its value and its default, without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from daemon.config.loading import Config
from daemon.config.sections import Section

NOTHING = "–"
NOT_THERE = object()


@dataclass(frozen=True, slots=True)
class Setting:
    """A key. default: "" if it has none, as it must be set. about: its description."""

    key: str
    value: str
    default: str
    about: str = ""
    differs: bool = False  # from the default


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """name: of the section, as in daemon.toml."""

    name: str
    rows: list[Setting]

    @property
    def changed(self) -> list[Setting]:
        return [row for row in self.rows if row.differs]

    @property
    def usual(self) -> list[Setting]:
        return [row for row in self.rows if not row.differs]


def list_tables(
    section: Section, default: Section, name: str = "", variables: Mapping[str, str] | None = None
) -> Iterator[SettingsTable]:
    """A table for each section with keys of its own. default: the same section as it is if nothing is set, with the same
    folder for relative paths. variables: by key, the environment variable that has set it."""
    if variables is None:
        variables = section.variables if isinstance(section, Config) else {}
    values, usual = section.model_dump(mode="json"), default.model_dump(mode="json")
    about = section.about()
    rows = [
        Setting(
            key,
            _say_key(key, value),
            _say_key(key, usual[key]) if key in usual else "",
            _describe(about.get(key, ""), variables.get(f"{name}.{key}")),
            differs=value != usual.get(key, NOT_THERE),
        )
        for key, value in values.items()
        if not _sections(getattr(section, key))
    ]
    if rows and name:
        yield SettingsTable(name, rows)
    for key in values:
        for part in _sections(getattr(section, key)):
            # A table of a list, such as [[inbox]], is compared with the one that there is if nothing is set.
            like = next(iter(_sections(getattr(default, key, None))), type(part).model_construct())
            yield from list_tables(part, like, f"{name}.{key}".lstrip("."), variables)


def _describe(about: str, variable: str | None) -> str:
    return f"Set by the variable {variable}. {about}".rstrip() if variable else about


def _sections(value: object) -> list[Section]:
    """The sections in a value: itself, or those in a list."""
    found = value if isinstance(value, list | tuple) else [value]
    return [part for part in found if isinstance(part, Section)]


def _say_key(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int) and value:
        for bits, unit in ((30, "GiB"), (20, "MiB")):
            if not value % (1 << bits):
                return f"{value >> bits} {unit}"
    return say(value)


def say(value: object) -> str:
    """A value as daemon.toml has it, without quotes. Of an address only scheme and host: the rest, and what stands
    before the host, may be a secret."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(say, value)) or NOTHING
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {say(each)}" for key, each in value.items()) or NOTHING
    if isinstance(value, str) and "://" in value:
        return _without_secrets(value)
    return NOTHING if value in ("", None) else str(value)


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = urlsplit(f"//{rest}").netloc.rpartition("@")[2]
    return f"{scheme}://{host}" + ("/…" if rest.partition(host)[2].strip("/") else "")
