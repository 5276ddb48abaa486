"""Opens the ledger, and enters what the configuration has: inboxes, models, second looks."""

from __future__ import annotations

import contextlib

import structlog
from anyio import to_thread

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.layout.layout import Layout
from daemon.layout.second_looks import LookPlan
from daemon.ledger.identity import describe_lost_ledger
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.monitoring.metrics import Metrics
from daemon.results.judge import LONGEST_PAUSE_SECONDS
from daemon.system.retry import Retry

log = structlog.get_logger()


async def open_ledger(
    stack: contextlib.ExitStack,
    config: Config,
    layout: Layout,
    plans: list[LookPlan],
    metrics: Metrics,
    retry: Retry,
) -> tuple[Ledger, list[int]]:
    """The ledger, and the numbers of the inboxes in it."""
    if warning := await to_thread.run_sync(describe_lost_ledger, config):
        log.warning(warning)
    ledger = Ledger(config.state.path / LEDGER, metrics.commit_seconds.observe, retry)
    stack.callback(ledger.close)
    if ledger.remark:
        log.warning(ledger.remark)
    numbers = await ledger.register(
        [(inbox.root, inbox.priority) for inbox in config.inbox],
        [*map(Model.of, layout.specs.values())],
        [Model.of(plan.spec) for plan in plans],
        [inbox.root for inbox in config.inbox if inbox.unpack],
        config.kept_inboxes,
        [inbox.root for inbox in config.inbox if not config.keeps_in_place(inbox)],
    )
    if dropped := await ledger.begin_looks([plan.name for plan in plans]):
        log.warning("second looks that are no longer configured were dropped", images=dropped)
    await ledger.bound_waits(config.pipeline.retry_seconds, LONGEST_PAUSE_SECONDS)
    return ledger, numbers
