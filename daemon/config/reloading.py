"""Reads daemon.toml again while the daemon works: some settings change at once, and the others wait for a restart.

A setting can change at once if one place uses it and no image's result depends on it. The others are part of models,
folders or executors, which are made at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.sections import Section
from daemon.core.errors import ConfigError

log = structlog.get_logger()

# Tables and keys that can change while the daemon works.
LIVE = {
    "inbox.ignore",
    "inbox.settle_seconds",
    "upkeep",
    "pipeline.drain_seconds",
    "pipeline.rescan_seconds",
    "second_look.images_per_second",
    "http.token_file",
    "http.tls_certificate",
    "http.tls_key",
    "log.level",
}
# The keys by which a list's tables are known to be the same ones as before.
SAME = {"inbox": ("path", "url", "name"), "second_look": ("name",)}

Apply = Callable[[Config], None]
T = TypeVar("T", bound=Section)


def is_live(table: str, key: str) -> bool:
    """Whether a key of a table can change while the daemon works."""
    return table in LIVE or f"{table}.{key}" in LIVE


class Reloaded(msgspec.Struct, frozen=True):
    """What a reload did. Keys as in daemon.toml, for example "log.level"."""

    changed: list[str] = []
    waiting: list[str] = []  # settings that differ, and change at the next start
    problems: list[str] = []  # why nothing has changed


class Reloading:
    """Reads the configuration again, and passes what can change at once to the parts that use it."""

    def __init__(self, config: Config, read: Callable[[], Config], parts: Sequence[Apply]) -> None:
        """config: the one in use. read: reads the file, in a thread; raises ConfigError.
        parts: each gets the new configuration. Only the first may raise ConfigError."""
        self.config = config
        self._read = read
        self._parts = parts
        self._one_at_a_time = anyio.Lock()
        # Called after each reload: with why nothing has changed, or nothing.
        self.ended: Callable[[Sequence[str]], None] = lambda problems: None

    async def reload(self) -> Reloaded:
        """Never raises: a configuration with problems changes nothing."""
        async with self._one_at_a_time:
            try:
                found = await to_thread.run_sync(self._read, abandon_on_cancel=True)
                config, done = take_over(self.config, found)
                self._parts[0](config)
            except ConfigError as error:
                log.error(
                    "the configuration was not reloaded; everything stays as it was", problems=error.problems
                )
                self.ended(error.problems)
                return Reloaded(problems=error.problems)
            log.info("configuration reloaded", changed=done.changed)
            if done.waiting:
                log.warning("some changed settings need a restart of the daemon", settings=done.waiting)
            self.config = config
            for part in self._parts[1:]:
                part(config)
            self.ended(())
            return done


def take_over(old: Config, new: Config) -> tuple[Config, Reloaded]:
    """The old configuration with those settings of the new one that can change at once."""
    done = Reloaded()
    merged = _merge(old, new, "", done)
    # the pages would need another server
    if bool(old.http.tls_certificate) != bool(new.http.tls_certificate):
        merged = merged.model_copy(update={"http": old.http})
        tls = [key for key in done.changed if key.startswith("http.")]
        done.waiting.extend(tls)
        done.changed[:] = [key for key in done.changed if key not in tls]
    return merged, done


def _merge(old: T, new: T, where: str, done: Reloaded) -> T:
    """The section with what can change at once; notes the keys that differ."""
    updates: dict[str, object] = {}
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        key = f"{where}.{name}".lstrip(".")
        if before == after:
            continue
        if isinstance(before, Section):
            updates[name] = _merge(before, after, key, done)
        elif key in SAME and _identities(key, before) == _identities(key, after):
            updates[name] = [_merge(b, a, key, done) for b, a in zip(before, after, strict=True)]
        else:
            keys = done.changed if is_live(where, name) else done.waiting
            if key not in keys:
                keys.append(key)
            if keys is not done.waiting:
                updates[name] = after
    return old.model_copy(update=updates)


def _identities(key: str, tables: Sequence[Section]) -> list[tuple[object, ...]]:
    return [tuple(getattr(table, name) for name in SAME[key]) for table in tables]
