"""What `visiond check` says of inboxes, and of the folders that the daemon writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial

import msgspec

from daemon.config.ignored import describe_added
from daemon.config.loading import Config, find_shared_folders
from daemon.config.sections import Inbox
from daemon.config.state import LEDGER
from daemon.core.stores import find_trouble
from daemon.inbox.walk import find_unread
from daemon.monitoring.disks import find_blocked, list_written_folders
from daemon.results.destinations import Destination
from daemon.system.mounts import ask as ask_files
from daemon.system.mounts import describe_missing, find_existing, is_network_mount, is_there
from daemon.terminal.display import Finding, graded
from daemon.unpacking.kinds import find_missing

LEAST_FREE_BYTES = 1 << 30


def examine_inboxes(config: Config) -> Iterator[Finding]:
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


def examine_unpacking(config: Config) -> Iterator[Finding]:
    wanted = {kind for inbox in config.inbox for kind in inbox.unpack}
    if missing := find_missing(wanted):
        yield Finding("error", f"{missing}.")
    elif wanted:
        yield Finding("ok", f"files of these kinds are unpacked: {', '.join(sorted(wanted))}.")


def examine_folders(config: Config) -> Iterator[Finding]:
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
