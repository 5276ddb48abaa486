"""Changes keys of daemon.toml and nothing else: comments, order and blank lines stay."""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from daemon.core.errors import ConfigError
from daemon.core.files import written_whole
from daemon.layout.profile import TunedSettings

Keys = Mapping[tuple[str, ...], Any]  # path of a key → its value


def keys_of(settings: TunedSettings) -> Keys:
    """The keys of daemon.toml that are these settings."""
    return {
        ("pipeline", "placement"): settings.placement,
        ("pipeline", "workers_per_device"): settings.workers,
        **{("stages", name, "batch_size"): batch for name, batch in settings.batches.items()},
    }


def set_keys(text: str, keys: Keys) -> str:
    """The text with these keys changed or added. Raises ConfigError if it is written in a way that cannot be
    changed without a change of something else."""
    expected = tomllib.loads(text)
    changed = text
    try:
        for path, value in keys.items():
            changed = _set_key(changed, path, value)
            _put(expected, path, value)
        if tomllib.loads(changed) == expected:
            return changed
    except (tomllib.TOMLDecodeError, TOMLKitError, TypeError, AttributeError):
        pass
    lines = "; ".join(f"{'.'.join(path)} = {tomlkit.item(value).as_string()}" for path, value in keys.items())
    raise ConfigError([f"the file cannot be changed automatically. Set these keys yourself: {lines}."])


def show_difference(before: str, after: str, file: Path) -> str:
    lines = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), str(file), f"{file} (tuned)"
    )
    return "".join(lines)


def replace_file(file: Path, text: str, ledger: Path, command: str) -> Path:
    """Write the file completely or not at all; returns where the old one is kept, with the command in its name. Raises
    NotWritable."""
    file = file.resolve()  # the target of a link, not the link
    kept = file.with_name(f"{file.name}.before-{command}")
    found = file.stat()
    for target, content in ((kept, file.read_bytes()), (file, text.encode())):
        with written_whole(target, ledger, force=True) as partial:
            partial.write_bytes(content)
            partial.chmod(stat.S_IMODE(found.st_mode))
            if os.geteuid() == 0:
                os.chown(partial, found.st_uid, found.st_gid)  # or its owner could not read it any more
    return kept


def _set_key(text: str, path: tuple[str, ...], value: Any) -> str:
    """Change the key where it is; else write it in place of its commented default, or below its table's
    header; else add the table at the end."""
    *tables, key = path
    document = tomlkit.parse(text)
    table: Any = document
    for name in tables:
        table = table.get(name, {})
    if key in table:
        table[key] = value
        return tomlkit.dumps(document)
    line = f"{key} = {tomlkit.item(value).as_string()}"
    name = r"\s*\.\s*".join(map(re.escape, tables))
    header = re.search(rf"^[ \t]*\[\s*{name}\s*\].*$", text, re.MULTILINE)
    if not header:
        if tables[-1] in _parent(document, tables):  # an inline table, or dotted keys
            table[key] = value
            return tomlkit.dumps(document)
        return text + ("" if text.endswith("\n") or not text else "\n") + f"\n[{'.'.join(tables)}]\n{line}\n"
    following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, header.end())
    end = following.start() if following else len(text)
    default = re.compile(rf"^[ \t]*#[ \t]*{re.escape(key)}[ \t]*=.*$", re.MULTILINE).search(
        text, header.end(), end
    )
    if default:
        return text[: default.start()] + line + text[default.end() :]
    return f"{text[: header.end()]}\n{line}{text[header.end() :]}"


def _parent(document: Any, tables: list[str]) -> Any:
    for name in tables[:-1]:
        document = document.get(name, {})
    return document


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        document = document.setdefault(name, {})
    document[path[-1]] = value
