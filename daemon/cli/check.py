"""`visiond check`: whether `run` would work with this configuration on this machine, and how to fix what would not."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from daemon.config.ignored import describe_added
from daemon.config.loading import Config, find_shared_folders
from daemon.config.secrets import list_open
from daemon.config.sections import Http, Inbox
from daemon.config.state import CONTROL, LEDGER, PAGE_TOKEN
from daemon.core.errors import ConfigError, NothingFound, VisiondError
from daemon.core.hints import quantity
from daemon.core.stores import find_trouble
from daemon.inbox.names import find_left_out, find_renamed
from daemon.inbox.walk import find_unread
from daemon.layout.devices import select_devices
from daemon.layout.slabs import open_slab, size_slab
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.records import open_reader
from daemon.ledger.schema import DURATION, WITH_ORDER, check_room, newest, read_version
from daemon.models.examining import examine_models, examine_plugins, examine_rules
from daemon.monitoring.disks import find_blocked, list_written_folders
from daemon.pipeline.tracing import check_traces
from daemon.results.destinations import Destination
from daemon.results.sinks import open_sinks
from daemon.results.uploads import StoreSink
from daemon.server.app import listen, load_certificate, read_page_token, read_token, risks
from daemon.server.control import ask
from daemon.system.gpus import list_gpus
from daemon.system.host import Host
from daemon.system.mounts import ask as ask_files
from daemon.system.mounts import describe_missing, find_existing, is_network_mount, is_there
from daemon.terminal.display import Finding, graded
from daemon.unpacking.kinds import find_missing

LEAST_FREE_BYTES = 1 << 30
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
    surroundings = (_inboxes, _unpacking, _folders, _sinks, _uploads, _ledger, _address, _page, _traces)
    machine = (_shared_memory, _limits, _gpus)
    yield Finding("ok", source)
    for key, variable in config.variables.items():
        yield Finding("ok", f"configuration: {key} comes from the variable {variable}.")
    yield from graded("warning", list_open(file) if file else ())
    for examination in (
        *surroundings,
        *machine,
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


def _inboxes(config: Config) -> Iterator[Finding]:
    yield from graded("error", ask_files(partial(find_shared_folders, config)) or ())
    for inbox in config.inbox:
        if (config.state.path / LEDGER).exists() and (added := describe_added(inbox.ignore)):
            yield Finding("warning", f"inbox {inbox.place}: {added}.")
        yield from _bucket(inbox) if inbox.url else _folder(config, inbox)


def _bucket(inbox: Inbox) -> Iterator[Finding]:
    if problem := find_trouble(inbox.url):
        yield Finding("error", f"inbox {problem}.")
    else:
        yield Finding("ok", f"inbox {inbox.url} answers; it is listed regularly, as stores send no events.")


def _folder(config: Config, inbox: Inbox) -> Iterator[Finding]:
    there = is_there(inbox.path)
    if there is None:
        said = f"inbox {inbox.path} does not answer; is its mount dead? `run` processes the other inboxes."
        yield Finding("warning", said)
    elif not there:
        yield Finding("error", describe_missing(inbox.path))
    elif not os.access(inbox.path, os.R_OK | os.X_OK):
        yield Finding("error", f"inbox {inbox.path} cannot be read by this user; fix its permissions.")
    elif (setting := _what_writes(config, inbox)) and not os.access(inbox.path, os.W_OK):
        yield Finding("error", f"inbox {inbox.path} cannot be written, but {setting}; fix its permissions.")
    else:
        scanned = is_network_mount(inbox.path)
        how = "scanned regularly: network mounts send no events" if scanned else "watched for events"
        yield Finding("ok", f"inbox {inbox.path} is {how}.")
        yield from _folders_within(inbox, Destination.of(inbox, config).longest_path)


def _folders_within(inbox: Inbox, longest: int) -> Iterator[Finding]:
    """Folders that `run` would skip. A large inbox is checked only in part."""
    unread, whole = find_unread(inbox, longest)
    if len(unread):
        lines = unread.lines()
        more = [f"and {len(unread) - len(lines):,} more"] if len(unread) > len(lines) else []
        fix = "give the daemon's user permission to list and enter them, or move their files up."
        yield Finding("warning", f"{unread.summary()}: {'; '.join(lines + more)}; {fix}")
    if not whole:
        yield Finding("ok", f"inbox {inbox.path} is large: only some of its folders were checked.")


def _what_writes(config: Config, inbox: Inbox) -> str:
    """The setting for which the inbox must be writable, and what it does; empty if there is none."""
    if inbox.uploads:
        return "uploads = true writes files there"
    if inbox.unpack:
        return f"unpack = {msgspec.json.encode(inbox.unpack).decode()} makes folders there"
    if config.output.bins == "move":
        return 'output.bins = "move" moves or removes files'
    return "" if inbox.on_success == "keep" else f'on_success = "{inbox.on_success}" moves or removes files'


def _unpacking(config: Config) -> Iterator[Finding]:
    wanted = {kind for inbox in config.inbox for kind in inbox.unpack}
    if missing := find_missing(wanted):
        yield Finding("error", f"{missing}.")
    elif wanted:
        yield Finding("ok", f"files of these kinds are unpacked: {', '.join(sorted(wanted))}.")


def _folders(config: Config) -> Iterator[Finding]:
    blocked = ask_files(partial(find_blocked, config)) or {}
    yield from graded("error", blocked.values())
    for key, folder in list_written_folders(config).items():
        if key in blocked:
            continue
        try:
            there = find_existing(folder)
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            yield Finding("error", f"{key}: {folder} cannot be written: {error.strerror}.")
            continue
        free = shutil.disk_usage(there).free
        if free < LEAST_FREE_BYTES:
            yield Finding(
                "warning", f"{key}: {folder} has only {free >> 20} MiB free; visiond pauses when it is full."
            )
        else:
            yield Finding("ok", f"{key}: {folder} {'is writable' if there == folder else 'can be created'}.")
    if is_network_mount(config.state.path):
        said = f"state.path: {config.state.path} is on a network mount; SQLite's locks need a local disk."
        yield Finding("error", said)


def _uploads(config: Config) -> Iterator[Finding]:
    if not (url := config.upkeep.backup_url):
        return
    problem = find_trouble(url)
    yield Finding("error" if problem else "ok", f"backups: {problem or f'{url} can be listed'}.")


def _sinks(config: Config) -> Iterator[Finding]:
    for name, sink in open_sinks(config).items():
        problem = sink.ask_store() if isinstance(sink, StoreSink) else sink.problem()
        yield Finding("error" if problem else "ok", f"sink {name}: {problem or 'can take records'}.")


def _ledger(config: Config) -> Iterator[Finding]:
    """Only whether it opens; `verify` reads it from end to end."""
    path = config.state.path / LEDGER
    try:
        with open_reader(config) as reader:
            images = sum(reader.counts().values())
            yield from graded("error", find_renamed(config, reader))
            yield from graded("warning", find_left_out(config, reader))
            with reader.lend() as connection:
                version = read_version(path, connection)
        if version < WITH_ORDER:
            check_room(path, version)
            yield Finding(
                "warning",
                f"ledger: the next start migrates it from schema {version} to {newest()}; {DURATION}.",
            )
        yield Finding("ok", f"ledger: {path} is readable and has {quantity(images, 'version')} of files.")
    except NothingFound:  # `run` creates it
        if warning := describe_lost_ledger(config):
            yield Finding("warning", warning)
    except VisiondError as error:
        yield Finding("error", f"ledger: {error}")


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
