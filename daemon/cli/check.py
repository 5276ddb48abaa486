"""`visiond check`: whether `run` would work with this configuration on this machine, and how to fix what would not."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from daemon.cli.check_folders import examine_folders, examine_inboxes, examine_unpacking
from daemon.cli.check_ledger import examine_backups, examine_ledger, examine_sinks
from daemon.config.loading import Config
from daemon.config.secrets import list_open
from daemon.config.sections import Http
from daemon.config.state import CONTROL, PAGE_TOKEN
from daemon.core.errors import ConfigError, VisiondError
from daemon.layout.devices import select_devices
from daemon.layout.slabs import open_slab, size_slab
from daemon.models.examining import examine_models, examine_plugins, examine_rules
from daemon.pipeline.tracing import check_traces
from daemon.server.app import listen, load_certificate, read_page_token, read_token, risks
from daemon.server.control import ask
from daemon.system.gpus import list_gpus
from daemon.system.host import Host
from daemon.terminal.display import Finding, graded

LEAST_OPEN_FILES = 1024
WATCHES = Path("/proc/sys/fs/inotify/max_user_watches")
LEAST_WATCHES = 65_536


def examine(config: Config, file: Path | None, *, quick: bool = False) -> Iterator[Finding]:
    """Yield findings as they are made, in the order in which a reader would ask.

    file: the configuration file, if there is one. quick: build no stage.
    """
    source = (
        f"configuration: {file.absolute()}."
        if file
        else "configuration: no daemon.toml in this folder; every key has its default."
    )
    yield Finding("ok", source)
    for key, variable in config.variables.items():
        yield Finding("ok", f"configuration: {key} comes from the variable {variable}.")
    yield from graded("warning", list_open(file) if file else ())
    for examination in (
        examine_inboxes,
        examine_unpacking,
        examine_folders,
        examine_sinks,
        examine_backups,
        examine_ledger,
        _address,
        _page,
        _traces,
        _shared_memory,
        _limits,
        _gpus,
        examine_plugins,
        examine_rules,
        partial(examine_models, quick=quick),
    ):
        yield from examination(config)


def _traces(config: Config) -> Iterator[Finding]:
    if not config.traces.sample:
        return
    try:
        check_traces(config.traces)
    except ConfigError as error:
        yield Finding("error", " ".join(error.problems))
    else:
        yield Finding("ok", f"traces of {config.traces.sample:.2%} of the images are sent.")


def _address(config: Config) -> Iterator[Finding]:
    http = config.http
    if http.listen:
        yield _listen(config, http, "http", " by the daemon of this state folder", "error")
    yield from graded("warning", risks(http))
    for key, file, read in (
        ("token_file", http.token_file, read_token),
        ("tls_certificate", http.tls_certificate, load_certificate),
    ):
        try:
            if (http.listen or config.page.listen) and read(http):
                yield Finding("ok", f"http.{key}: {file} is usable.")
        except ConfigError as error:
            yield Finding("error", str(error))


def _page(config: Config) -> Iterator[Finding]:
    """An address that is in use holds nothing up, so it is only a warning."""
    if not config.page.listen:
        return
    yield _listen(config, config.page_http, "page", ", perhaps by this daemon's page", "warning")
    yield from graded("warning", risks(config.page_http, "page"))
    try:
        made_by_daemon = config.state.path / PAGE_TOKEN  # when it starts
        if not config.http.token_file and made_by_daemon.exists():
            read_page_token(config)
    except (OSError, ConfigError) as error:
        yield Finding("error", f"page: {error}")


def _listen(config: Config, http: Http, section: str, user: str, grade: str) -> Finding:
    """Whether it can be listened at. user: by whom, if a daemon runs. grade: if none does."""
    try:
        listen(http, section).close()
    except ConfigError as error:
        try:
            ask(config.state.path / CONTROL, "GET", "/healthz")
        except VisiondError:
            return Finding(grade, str(error))
        return Finding("ok", f"{section}.listen: {http.listen} is in use{user}.")
    return Finding("ok", f"{section}.listen: {http.listen} is free.")


def _shared_memory(config: Config) -> Iterator[Finding]:
    available = Host.here().free_bytes
    try:
        gpus = list_gpus()
        config = select_devices(config, gpus)
    except ConfigError:
        return  # `examine_models` reports it
    size = size_slab(config, gpus)
    try:
        open_slab(config, gpus).close()
    except ConfigError as error:
        yield Finding("error", str(error))
        return
    if size > available // 2:
        most = f"half of the {available >> 20} MiB of available memory"
        yield Finding("warning", f"pipeline.slab_bytes: {size >> 20} MiB is more than {most}.")


def _limits(config: Config) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # `run` raises its own limit to this
    if files < LEAST_OPEN_FILES:
        yield Finding(
            "warning",
            f"the limit of open files is {files}; raise it to {LEAST_OPEN_FILES} (ulimit -Hn, LimitNOFILE=).",
        )
    if WATCHES.exists() and int(WATCHES.read_text()) < LEAST_WATCHES:
        yield Finding(
            "warning",
            f"{WATCHES} is {WATCHES.read_text().strip()}; with more folders than that visiond scans instead of watching.",
        )


def _gpus(_config: Config) -> Iterator[Finding]:
    gpus = list_gpus()
    for gpu in gpus:
        yield Finding(
            "ok",
            f"{gpu.device}: {gpu.name}, {gpu.uuid}, {gpu.free_bytes >> 20} of {gpu.total_bytes >> 20} MiB free.",
        )
    if not gpus:
        yield Finding("warning", "no NVIDIA GPU found; stages run on the CPU.")
