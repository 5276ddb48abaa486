"""Reads daemon.toml again while the daemon works: some settings change at once, those of models by an exchange
(daemon/service/exchange.py), and the others wait for a restart.

A setting can change at once if one place uses it and no image's result depends on it. The others are part of models,
folders or stations, which are made at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.sections import Section
from daemon.core.errors import ConfigError, ModelsUnusable

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
# Tables whose settings change by an exchange of models.
EXCHANGED = ("models", "stages")
# The keys by which a list's tables are known to be the same ones as before.
SAME = {"inbox": ("path", "url", "name"), "second_look": ("name",)}

Apply = Callable[[Config], None]
M = TypeVar("M")
T = TypeVar("T", bound=Section)


def is_live(table: str, key: str) -> bool:
    """Whether a key of a table can change while the daemon works."""
    return table in LIVE or f"{table}.{key}" in LIVE


def is_exchanged(table: str) -> bool:
    """Whether an exchange of models changes the keys of this table while the daemon works."""
    return table.partition(".")[0] in EXCHANGED


class Reloaded(msgspec.Struct, frozen=True):
    """What a reload did. Keys as in daemon.toml, for example "log.level"."""

    changed: list[str] = []
    waiting: list[str] = []  # settings that differ, and change at the next start
    problems: list[str] = []  # why nothing has changed
    exchanging: list[str] = []  # settings of models, which are being exchanged from now on


class Exchanger(Protocol[M]):
    """Brings other models to the workers, without a restart of the daemon: daemon/service/exchange.py. M: checked models."""

    async def check(self, config: Config, settings: list[str]) -> M:
        """Raises ConfigError or ModelsUnusable if the models of this configuration cannot be used."""

    def begin(self, models: M, settings: list[str]) -> None: ...

    def forget_problem(self) -> None:
        """The configuration names the models that are in use."""


class Reloading(Generic[M]):
    """Reads the configuration again, and passes what can change at once to the parts that use it."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        parts: Sequence[Apply],
        exchange: Exchanger[M] | None = None,
    ) -> None:
        """config: the one in use. read: reads the file, in a thread; raises ConfigError.
        parts: each gets the new configuration. Only the first may raise ConfigError. exchange: None if models wait
        for a restart."""
        self.config = config
        self._read = read
        self._parts = parts
        self._exchange = exchange
        self._one_at_a_time = anyio.Lock()
        # Called after each reload: with why nothing has changed, or nothing.
        self.ended: Callable[[Sequence[str]], None] = lambda problems: None

    async def reload(self) -> Reloaded:
        """Never raises: a configuration with problems changes nothing."""
        async with self._one_at_a_time:
            try:
                found = await to_thread.run_sync(self._read, abandon_on_cancel=True)
                config, done = take_over(self.config, found, exchanges=self._exchange is not None)
                models = (
                    await self._exchange.check(config, done.exchanging)
                    if self._exchange and done.exchanging
                    else None
                )
                self._parts[0](config)
            except (ConfigError, ModelsUnusable) as error:
                problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
                log.error("the configuration was not reloaded; everything stays as it was", problems=problems)
                self.ended(problems)
                return Reloaded(problems=problems)
            log.info("configuration reloaded", changed=done.changed, exchanging=done.exchanging)
            if done.waiting:
                log.warning("some changed settings need a restart of the daemon", settings=done.waiting)
            self._use(config)
            if self._exchange and models is not None:
                self._exchange.begin(models, done.exchanging)
            elif self._exchange:
                self._exchange.forget_problem()
            self.ended(())
            return done

    def go_back(self, config: Config) -> None:
        """The workers have the models of this configuration again."""
        self._use(self.config.model_copy(update={name: getattr(config, name) for name in EXCHANGED}))

    def _use(self, config: Config) -> None:
        self.config = config
        for part in self._parts[1:]:
            part(config)


def take_over(old: Config, new: Config, *, exchanges: bool = False) -> tuple[Config, Reloaded]:
    """The old configuration with those settings of the new one that can change at once. exchanges: also those that an
    exchange of models changes; otherwise they wait."""
    done = Reloaded()
    merged = _merge(old, new, "", done)
    if not exchanges:
        merged = merged.model_copy(update={name: getattr(old, name) for name in EXCHANGED})
        done.waiting.extend(done.exchanging)
        done.exchanging.clear()
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
            keys = done.exchanging if is_exchanged(where) else keys
            if key not in keys:
                keys.append(key)
            if keys is not done.waiting:
                updates[name] = after
    return old.model_copy(update=updates)


def _identities(key: str, tables: Sequence[Section]) -> list[tuple[object, ...]]:
    return [tuple(getattr(table, name) for name in SAME[key]) for table in tables]
