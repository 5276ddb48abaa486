"""What the log of a start says about stages, models, second looks and older results."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from daemon.core.hints import command
from daemon.core.jobs import Outdated
from daemon.core.notices import list_notices
from daemon.layout.layout import Layout
from daemon.layout.second_looks import LookPlan
from stages.registry.registry import PROBLEMS
from stages.weights.layouts import describe_words

log = structlog.get_logger()


def announce(layout: Layout, plans: Iterable[LookPlan], *, with_notices: bool) -> None:
    """Log what runs where, what each second look does, and what a user should know about the models and plug-ins."""
    segments = [list(segment.stages) for segment in layout.placement.segments]
    log.info("placement", segments=segments, why=layout.placement.why)
    if near := layout.cores.describe():
        log.info("workers run on the cores of their GPU's NUMA node", cores=near)
    for line in list_notices(layout.notices().items()) if with_notices else ():
        log.warning("models have a notice", notice=line)
    for words in filter(None, map(describe_words, layout.specs.values())):
        log.warning(words)
    for library, license_ in layout.licenses().items():
        log.info("a library has a license with conditions", library=library, license=license_)
    for problem in PROBLEMS.values():
        log.warning(problem)
    for plan in plans:
        log.info(plan.segment.name, what=plan.describe())
        if words := describe_words(plan.spec, plan.name):
            log.warning(words)


def warn_of_outdated(outdated: Outdated | None) -> None:
    """Log how many files have results that this configuration would not make."""
    if outdated:
        log.warning(
            f"{'files' if outdated.files else 'some files may'} have results of earlier models or options",
            files=outdated.files,
            at_least=outdated.at_least,
            fix=command("redo", "--stale"),
        )
