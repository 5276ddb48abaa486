"""Settings from environment variables, for containers: VISIOND_PIPELINE__DRAIN_SECONDS is [pipeline] drain_seconds. A variable
wins over daemon.toml. With _FILE behind its name, it names a file with the value."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from daemon.config.values import parse_toml, read_text
from daemon.core.errors import ConfigError
from daemon.system.scarcity import cause_of
from stages.registry.registry import kind_of

PREFIX = "VISIOND_"
NESTING = "__"  # between a table and a key
OF_FILE = "_file"
Keys = dict[tuple[str, ...], Any]  # the type of each key, by its place: ("pipeline", "drain_seconds")


def apply_variables(
    document: dict[str, Any], root: type[BaseModel], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Write the settings among the variables into a parsed document. Returns which variable set each key, for example
    "pipeline.drain_seconds". Raises ConfigError after all that can be applied are."""
    keys = dict(_list_keys(root))
    keys |= _list_variants(keys, environ)
    # Those that would be settings, had they two underscores. Others may belong to somebody else: Kubernetes sets
    # VISIOND_HTTP_PORT for a service with the name visiond-http.
    names = [*filter(is_setting, map(_name_of, keys))]
    flat = {name.replace(NESTING, "_"): name for name in names}
    applied: dict[str, str] = {}
    problems = [f"{name}: write two underscores: {flat[name]}." for name in sorted(flat.keys() & environ)]
    for name in filter(is_setting, sorted(environ)):
        place = tuple(name.removeprefix(PREFIX).lower().split(NESTING))
        try:
            place, value = _read(place, environ[name], keys, names)
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
            continue
        table: Any = document
        for part in place[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):  # otherwise what the file has there is refused
            table[place[-1]] = value
            applied[".".join(place)] = name
    if problems:
        raise ConfigError(problems)
    return applied


def is_setting(name: str) -> bool:
    """Whether a variable of the environment is a setting."""
    return name.startswith(PREFIX) and NESTING in name.removeprefix(PREFIX)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a daemon whose settings are all in its file."""
    return {name: value for name, value in environ.items() if not is_setting(name)}


def locate(problem: str, file: Path | None, applied: Mapping[str, str]) -> str:
    """The sentence of a problem with where it is: in a variable, in the file, or neither."""
    if problem.startswith(PREFIX):
        return problem
    key, colon, rest = problem.partition(": ")
    if colon and (variable := applied.get(key)):
        return f"{variable}: {rest}"
    return f"{file}: {problem}" if file else problem


def _list_keys(
    section: type[BaseModel], where: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _list_keys(kind, (*where, name))
        else:
            yield (*where, name), kind


def _list_variants(keys: Keys, environ: Iterable[str]) -> Keys:
    """The keys of variants of stages that variables name, such as classifier_safety: those of their stages."""
    named = {name.removeprefix(PREFIX).lower().split(NESTING)[1] for name in environ if is_setting(name)}
    return {
        ("stages", name, *place[2:]): kind
        for name in named
        if kind_of(name) != name
        for place, kind in keys.items()
        if place[:2] == ("stages", kind_of(name))
    }


def _is_tables(kind: object) -> bool:
    """Whether a key's type is a list of tables."""
    return get_origin(kind) is list and issubclass(get_args(kind)[0], BaseModel)


def _name_of(place: tuple[str, ...]) -> str:
    return PREFIX + NESTING.join(place).upper()


def _kind_at(place: tuple[str, ...], keys: Keys) -> Any:
    """The type of a key; of an option, of which each backend has its own, that of all of them. None: there is no such key."""
    options = keys.get(place[:-1])
    return keys.get(place, options if options == dict[str, Any] else None)


def _read(
    place: tuple[str, ...], text: str, keys: Keys, names: Sequence[str]
) -> tuple[tuple[str, ...], object]:
    """The key that a variable sets, and its value. names: those of all variables that are settings. Raises ConfigError."""
    if tables := next(
        (each for each, kind in keys.items() if place[: len(each)] == each and _is_tables(kind)), ()
    ):
        raise ConfigError([f"the tables [[{'.'.join(tables)}]] can only be in daemon.toml."])
    stem = (*place[:-1], place[-1].removesuffix(OF_FILE))
    if place not in keys and stem != place and _kind_at(stem, keys):
        place, text = stem, _read_file(text)
    if kind := _kind_at(place, keys):
        return place, _parse(text, kind)
    near = difflib.get_close_matches(_name_of(place), names, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists all keys."
    raise ConfigError([f"there is no key {'.'.join(place)}; {hint}"])


def _parse(text: str, kind: Any) -> object:
    """A list or a table as daemon.toml has it, such as ["ocr", "yolo"]; the text itself if it is none."""
    if get_origin(kind) not in (list, dict):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _read_file(name: str) -> str:
    """Raises ConfigError."""
    try:
        return read_text(Path(name)).rstrip("\r\n")
    except OSError as error:
        raise ConfigError([f"{name} cannot be read: {cause_of(error)}."]) from error
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from None
