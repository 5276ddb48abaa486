"""Runs the daemon in this process: locks its folders, sets up its log, and imports the rest only then."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Callable
from functools import partial

import structlog

from daemon.config.loading import Config, find_shared_folders
from daemon.config.state import LEDGER, lock_state
from daemon.core.errors import ConfigError
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.ledger.schema import keep_temporary_files, trouble_named
from daemon.monitoring.disks import find_blocked
from daemon.monitoring.snapshot import Snapshot
from daemon.system.log import set_up as set_up_log
from daemon.system.mounts import ask, describe_missing
from stages.contract.processes import importing

log = structlog.get_logger()


def run(
    config: Config,
    *,
    once: bool = False,
    limit: int = 0,
    show: Callable[[Snapshot], None] | None = None,
    read: Callable[[], Config] | None = None,
) -> Counter[JobStatus]:
    """Run the daemon; returns the number of images by status, PENDING included. read: reads the configuration
    again, for a reload. Raises VisiondError; AlreadyRunning before it does anything."""
    if blocked := ask(partial(find_blocked, config)):
        raise ConfigError(list(blocked.values()))
    is_first = not config.state.path.exists()
    if is_first:  # if it fails, it leaves no folders behind
        set_up_log(config.log.level, config.log.format)
        check_inboxes(config)
    with lock_state(config.state.path), trouble_named(config.state.path / LEDGER):
        with importing():
            import anyio

            from daemon.results.folder_locks import lock_outputs
            from daemon.service.lifecycle import run_service
            from daemon.system.lines import written_aside
            from daemon.system.printed import catch

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # The soft limit is low only for the sake of programs that use select(2).
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        keep_temporary_files(config.state.path)
        with written_aside():
            set_up_log(config.log.level, config.log.format)
            catch()
            if not is_first:
                check_inboxes(config)
            results = config.output.results
            if (config.state.path / LEDGER).exists() and not results.exists():
                fix = f"stop the daemon and move the old one back, or let `{command('repair')}` write all results again"
                log.warning("the folder of results is gone; a new one is made", path=str(results), fix=fix)
            work = partial(
                run_service, config, once=once, limit=limit, show=show, ends_process=True, read=read
            )
            gc.freeze()  # what is loaded by now stays, and need not be looked at
            gc.set_threshold(10_000, 20, 20)  # to look at thousands of jobs takes long, and finds little
            with lock_outputs(config):
                return anyio.run(work, backend_options={"use_uvloop": True})


def check_inboxes(config: Config) -> None:
    """Raises ConfigError when an inbox does not exist. It is not created, because that might hide a missing mount.
    Also when folders that must be apart are not, through links or mounts. Raises MissingLibrary."""
    from daemon.inbox.origin import origin_of

    there = [(inbox, origin_of(inbox.root).is_there()) for inbox in config.inbox]
    for inbox in [inbox for inbox, answer in there if answer is None]:
        log.warning(
            "inbox does not answer; its mount may be dead; other inboxes are processed", path=inbox.place
        )
    if missing := [inbox.path for inbox, answer in there if answer is False]:
        raise ConfigError([describe_missing(path) for path in missing])
    if problems := ask(lambda: find_shared_folders(config)):
        raise ConfigError(problems)
