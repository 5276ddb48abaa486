"""Whether the inboxes of a configuration are there, at a start."""

from __future__ import annotations

import structlog

from daemon.config.loading import Config, find_shared_folders
from daemon.core.errors import ConfigError
from daemon.inbox.origin import origin_of
from daemon.system.mounts import ask, describe_missing

log = structlog.get_logger()


def check_inboxes(config: Config) -> None:
    """Raises ConfigError when an inbox does not exist. It is not created, because that might hide a missing mount.
    Also when folders that must be apart are not, through links or mounts. Raises MissingLibrary."""
    there = [(inbox, origin_of(inbox.root).is_there()) for inbox in config.inbox]
    for inbox in [inbox for inbox, answer in there if answer is None]:
        log.warning(
            "inbox does not answer; its mount may be dead; other inboxes are processed", path=inbox.place
        )
    if missing := [inbox.path for inbox, answer in there if answer is False]:
        raise ConfigError([describe_missing(path) for path in missing])
    if problems := ask(lambda: find_shared_folders(config)):
        raise ConfigError(problems)
