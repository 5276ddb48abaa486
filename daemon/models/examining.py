"""What `visiond check` says of plug-ins, rules, models and their stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from daemon.core.notices import list_notices
from daemon.layout.layout import Layout
from daemon.layout.second_looks import lay_out
from daemon.models.tryouts import RuleFailed, try_choice, try_rule, try_stages
from daemon.terminal.display import Finding, graded
from daemon.workers.tryout import Tryout
from stages.contract.base import StageSpec
from stages.registry.registry import PROBLEMS, SOURCES, find_backend
from stages.weights.layouts import describe_weights, describe_words


def examine_plugins(config: Config) -> Iterator[Finding]:
    yield from graded("warning", PROBLEMS.values())
    for name, source in SOURCES.items():
        use = "in use" if name in config.stage_names else "not in use: [pipeline] stages does not name it"
        yield Finding("ok", f"plug-in {source}: stage {name} is installed and {use}.")


def examine_rules(config: Config) -> Iterator[Finding]:
    tries = [partial(try_rule, config)] if config.binning.rules else []
    tries += [partial(try_choice, config, look) for look in config.second_look if look.function]
    for attempt in tries:
        try:
            yield Finding("ok", attempt())
        except RuleFailed as error:
            yield Finding("error", str(error))


def examine_models(config: Config, *, quick: bool) -> Iterator[Finding]:
    try:
        layout, looks = lay_out(config)
    except VisiondError as error:
        yield from graded("error", str(error).splitlines())
        return
    yield from _weights(config, layout)
    for look in looks:
        yield Finding("ok", f"{look.segment.name}: {look.describe()}; {describe_weights(look.spec)}.")
        if words := describe_words(look.spec, look.name):
            yield Finding("warning", f"{look.segment.name}: {words}")
        notices = list_notices([(look.segment.name, look.spec.notice)])
        yield from graded("warning", (f"{line}." for line in notices))
    if quick:
        return
    for tryout in try_stages(layout):
        yield from _findings(f"stage {tryout.stage}", tryout)
    for look in looks:
        for tryout in try_stages(look.layout):
            yield from _findings(look.segment.name, tryout)


def _weights(config: Config, layout: Layout) -> Iterator[Finding]:
    real = {name: spec for name, spec in layout.specs.items() if spec.backend != "fake"}
    for name, spec in real.items():
        yield Finding("ok", f"models: {name}: {describe_weights(spec)}, {_source(config, spec)}.")
    for spec in real.values():
        if words := describe_words(spec):
            yield Finding("warning", f"models: {words}")
    if real:
        yield Finding("ok", "models: the digests of all files in use are as recorded.")
    yield from graded("warning", (f"models: {line}." for line in list_notices(layout.notices().items())))
    for library, license_ in layout.licenses().items():
        yield Finding("ok", f"models: {library} is in use, which is under {license_}.")
    yield Finding("ok", f"placement: {layout.placement.why}.")


def _source(config: Config, spec: StageSpec) -> str:
    """Where the weights of a stage are from, and its tags if it has any."""
    model = getattr(config.stages, spec.name).model
    source = f"from {model or f'the pack {config.models.pack}'}" if spec.files else "without weights"
    if find_backend(spec.name, spec.backend).includes(spec.files):
        source = "included"
    if spec.options.get("labels") is not None:
        return f"{source}, tags from stages.{spec.name}.options.labels"
    return f"{source}, tags from {spec.files['labels']}" if "labels" in spec.files else source


def _findings(what: str, tryout: Tryout) -> Iterator[Finding]:
    if tryout.problem:
        yield Finding("error", f"{what} on {tryout.device}: {tryout.problem}")
    else:
        yield Finding("ok", f"{what} on {tryout.device}: {tryout.summary}.")
    if tryout.warning:
        yield Finding("warning", f"{what} on {tryout.device}: {tryout.warning}")
