"""The commands `visiond plan`, `visiond tune` and `visiond warm`: where the stages run, with which settings they are
fastest, and their kernels."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer

from daemon.core.errors import ConfigError, NotWritable, WrongArgument
from daemon.core.hints import command, quantity
from daemon.system.signals import INTERRUPTED, ORDERS, interruptible
from daemon.terminal.display import console, errors, print_json, print_table, printable
from daemon.terminal.options import (
    ConfigOption,
    JsonOption,
    WandbOption,
    check_trackers,
    find_config,
    flag,
    option,
    read_config,
)

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.layout.profile import Profile, Trial
    from daemon.measure.throwaway import Say
    from daemon.measure.tuner import Report, TuningPlan
    from daemon.system.gpus import Gpu
    from daemon.workers.compiler import CompileProgress, Want

CAPABILITY = re.compile(r"(?:sm_)?(\d+)\.?(\d)")


def plan(
    config: ConfigOption = None,
    machine: Annotated[
        str, option("--gpus GPUS", "Plan for these GPUs instead, for example 4xA100-40GB.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show on which devices the stages would run, how fast, and why.

    With --gpus: for a machine that you do not have, with automatic settings.

    Examples:
      visiond plan
      visiond plan --gpus 4xA100-40GB
      visiond plan --json
    """
    from daemon.layout.recorded import read_gpus
    from daemon.measure.explain import explain, explain_other

    settings = read_config(config)
    explanation = explain_other(settings, read_gpus(machine)) if machine else explain(settings)
    if as_json:
        print_json(explanation)
        return
    for sentence in explanation.sentences:
        console.print(printable(sentence))


def tune(
    config: ConfigOption = None,
    images: Annotated[
        Path | None, option("--images FOLDER", "Measure with images like these. Default: the standard job.")
    ] = None,
    count: Annotated[int, option("--count -n N", "Number of different images.", min=1)] = 200,
    seconds: Annotated[float, option("--seconds SECONDS", "Time of each measurement.", min=0.1)] = 15,
    job: Annotated[
        int, option("--job N", "Print how long this number of images will take.", min=1)
    ] = 10_000_000,
    dry_run: Annotated[bool, flag("--dry-run", "Write nothing; print how daemon.toml would change.")] = False,
    force: Annotated[bool, flag("--force", "Measure although a daemon is running.")] = False,
    wandb: WandbOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest placement, number of workers and batch sizes.

    Runs a daemon in a temporary folder with one setting after another, and
    measures images per second. Then writes the best settings into daemon.toml,
    and keeps the old file beside it. After Ctrl-C, the next `visiond tune`
    continues.

    Examples:
      visiond tune
      visiond tune --images /data/photos --count 500
      visiond tune --dry-run
    """
    from daemon.config.values import read_text
    from daemon.measure.edit import keys_of, set_keys
    from daemon.measure.tuner import TuningPlan, refuse_needless
    from daemon.measure.tuner import tune as search

    settings, file = read_config(config, needs_file=True), find_config(config)
    refuse_needless(settings)
    if images and not images.is_dir():
        raise typer.BadParameter(f"--images: there is no folder {images}")
    text = read_text(file) if file else ""
    if file:
        refuse_early(file, lambda: set_keys(text, {("pipeline", "workers_per_device"): 1}), dry_run=dry_run)
    order = TuningPlan(images.absolute() if images else None, count, seconds)
    errors.print("Each setting starts a daemon and measures it. Ctrl-C stops at any time.")
    with stoppable(settings, keep=not dry_run) as check, progress(check) as say:
        report = reporting(settings, order, send=wandb)
        profile = search(settings, order, keep=not dry_run, force=force, say=say, reporting=report)
    best = profile.best
    assert best
    if as_json:
        print_json(
            {"best": best, "job": {"images": job, "seconds": best.seconds_for(job)}, "profile": profile}
        )
    else:
        print_profile(profile, best, job)
    if file:
        tuned = set_keys(text, keys_of(best.settings))
        write_settings(settings, file, text, tuned, dry_run=dry_run)
    elif not dry_run:
        errors.print("There is no daemon.toml to change; `auto` uses these settings from now on.")


def refuse_early(file: Path, change: Callable[[], object], *, dry_run: bool) -> None:
    """Raise ConfigError or NotWritable before minutes of work, not after them."""
    try:
        change()
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem}" for problem in error.problems]) from None
    if not dry_run and not os.access(file.resolve().parent, os.W_OK):
        raise NotWritable(f"{file.resolve().parent} is not writable. Use --dry-run, which writes nothing.")


@contextlib.contextmanager
def stoppable(config: Config, *, keep: bool) -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM end the search in an orderly way: the daemon is stopped, its folder removed.
    Yields the check of `interruptible`."""
    from daemon.layout.profile import read_profile

    try:
        with interruptible(*ORDERS) as check:
            yield check
    except KeyboardInterrupt:
        profile = read_profile(config.state.path, finished=False) if keep else None
        kept = len(profile.trials) if profile else 0
        again = f"; {quantity(kept, 'trial')} kept: `{command('tune')}` continues" if kept else ""
        errors.print(f"Stopped{printable(again)}.")
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def progress(check: Callable[[], None]) -> Iterator[Say]:
    """On a terminal: a line on stderr that changes. Otherwise nothing: finished trials are printed anyway.
    check: called whenever there is something to say."""
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(errors.status("")) if sys.stderr.isatty() else None

        def say(text: str) -> None:
            check()
            if status:
                status.update(printable(text))

        yield say


def print_trial(number: int, trial: Trial) -> None:
    found = trial.failure or f"{trial.images_per_second:,.4g} images/s"
    errors.print(printable(f"trial {number}: {trial.settings}: {found}"))


@contextlib.contextmanager
def reporting(config: Config, order: TuningPlan, *, send: bool) -> Iterator[Report]:
    """Yields what prints a trial, and sends it if asked to, as a step of a run whose files are in the state folder. Raises
    MissingLibrary, WrongArgument."""
    if not send:
        yield print_trial
        return
    check_trackers(["wandb"])
    import wandb

    about = {"images": f"{order.images or 'the standard job'}", "seconds": order.seconds}
    try:
        run = wandb.init(project="visiond-tune", dir=config.state.path, config=about)
    except wandb.Error as error:
        raise WrongArgument(f"--wandb: {error}") from error

    def report(number: int, trial: Trial) -> None:
        print_trial(number, trial)
        run.log(msgspec.to_builtins(trial), step=number)

    with run:
        run.define_metric("images_per_second", summary="max")
        yield report


def print_profile(profile: Profile, best: Trial, job: int) -> None:
    from daemon.layout.profile import GAIN
    from daemon.measure.explain import describe_duration

    print_table(
        ("settings", "images/s", "spread", "GPU MiB", "host MiB", "limit", ""),
        (
            (
                trial.settings,
                f"{trial.images_per_second:,.4g}" if trial.images_per_second else "-",
                f"{trial.slowest:,.4g} to {trial.fastest:,.4g}" if trial.images_per_second else "-",
                trial.gpu_bytes >> 20,
                trial.host_bytes >> 20,
                trial.limited_by or "-",
                "chosen" if trial is best else trial.failure,
            )
            for trial in profile.trials
        ),
    )
    console.print(
        printable(
            f"Chosen: {best.settings}, {best.images_per_second:,.4g} images/s. No other setting was more than "
            f"{GAIN - 1:.0%} faster. MiB are for each worker."
        )
    )
    console.print(f"{quantity(job, 'image')} will take about {describe_duration(best.seconds_for(job))}.")


def write_settings(config: Config, file: Path, before: str, after: str, *, dry_run: bool) -> None:
    """Change daemon.toml, or print how it would change."""
    from daemon.config.state import LEDGER
    from daemon.measure.edit import replace_file, show_difference

    if before == after:
        errors.print(printable(f"{file} has these settings already."))
    elif dry_run:
        for line in show_difference(before, after, file).splitlines():
            errors.print(printable(line))
    else:
        kept = replace_file(file, after, config.state.path / LEDGER, "tune")
        errors.print(printable(f"{file} is changed; the old one is {kept}. Restart the daemon to use it."))


def warm(
    capabilities: Annotated[
        list[str] | None,
        option(
            "--gpu CAPABILITY",
            "Compile for GPUs of this compute capability, such as 9.0, instead of the GPUs of this machine. Repeatable.",
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Compile the GPU kernels ahead of the first start.

    The daemon compiles them itself at its first start, which then takes some
    seconds longer. Use this command in an installer, or when you build an
    image. Run it as the user who runs the daemon. The kernels are stored in
    `kernels` in the state folder; do not move it. With --gpu the machine needs
    no GPU.

    Examples:
      visiond warm
      visiond warm --gpu 9.0 --config /etc/visiond/daemon.toml
    """
    from daemon.config.state import KERNELS
    from daemon.workers.kernels import list_missing

    settings = read_config(config)
    folder, (wants, gpus) = settings.state.path / KERNELS, find_wants(settings, capabilities)
    if not wants:
        console.print(explain_nothing(gpus, named=bool(capabilities)))
        return
    missing = list_missing(folder, wants)
    kinds = " and ".join(sorted({want.capability for want in wants}))
    if not missing:
        console.print(f"All kernels for compute capability {kinds} are compiled, in {printable(folder)}.")
        return
    started = time.monotonic()
    last = anyio.run(compile_missing, folder, missing)
    console.print(
        f"{quantity(last.done, 'kernel')} for compute capability {kinds} compiled in "
        f"{time.monotonic() - started:.1f} s, in {printable(folder)}"
    )


async def compile_missing(folder: Path, missing: list[Want]) -> CompileProgress:
    """Compile, and show the progress. Raises KernelsMissing, NotWritable."""
    from daemon.core.errors import KernelsMissing
    from daemon.core.files import written_into
    from daemon.terminal.progress import Progress
    from daemon.workers.compiler import CompileProgress
    from daemon.workers.kernels import compiling

    last, problems = CompileProgress(0, 0), dict[str, None]()
    with written_into(folder), Progress("kernels") as progress:
        async with compiling(folder, missing, patient=True) as steps:
            assert steps is not None
            async for last in steps:
                progress.step(last.done, last.known)
                if last.problem:
                    problems[last.problem] = None
    if problems:
        raise KernelsMissing(last.done, last.known, list(problems))
    return last


def find_wants(settings: Config, capabilities: list[str] | None) -> tuple[list[Want], list[Gpu]]:
    """The stages with kernels, and the GPUs that they run on: those of this machine, or of the named kinds."""
    from daemon.layout.devices import assume_gpus, used_gpus
    from daemon.layout.models import resolve_models
    from daemon.layout.placement import Segment
    from daemon.layout.second_looks import lay_out
    from daemon.workers.kernels import list_wants, wants_of

    if not capabilities:
        layout, looks = lay_out(settings)
        found = wants_of([layout, *(look.layout for look in looks)])
        return found, used_gpus(layout.config, layout.gpus)
    wants, used = [], []
    settings = assume_gpus(settings)
    for capability in map(parse_capability, capabilities):
        if gpus := used_gpus(settings, pretend_gpus(capability)):
            specs = resolve_models(settings, gpus)
            wants += list_wants([Segment(tuple(specs), (gpus[0].device,))], specs, gpus)
            used += gpus
    return wants, used


def parse_capability(text: str) -> str:
    """Raises BadParameter."""
    if not (found := CAPABILITY.fullmatch(text)):
        raise typer.BadParameter(
            f"{text} is not a compute capability; for an H100 or H200 write --gpu 9.0. "
            "`visiond gpus` shows those of this machine"
        )
    return f"{int(found[1])}.{found[2]}"


def pretend_gpus(capability: str) -> list[Gpu]:
    from daemon.system.gpus import Gpu

    return [Gpu(0, "GPU-0", "", 1 << 36, 1 << 36, 0, capability, None, ())]


def explain_nothing(gpus: Sequence[Gpu], *, named: bool) -> str:
    """Why there is nothing to compile for the GPUs that are used. named: whether --gpu named their kinds."""
    from stages.kernels.cache import OLDEST_GPU, can_compile_for

    if not gpus and named:
        return 'Nothing to compile: with `devices = ["cpu"]` under [pipeline] no stage runs on a GPU.'
    if not gpus:
        return (
            "Nothing to compile: with this configuration no stage runs on a GPU of this machine. For another "
            f"machine, name the compute capability of its GPUs: `{command('warm', '--gpu', '9.0')}`."
        )
    if find_spec("triton") is None:
        return "Nothing to compile: Triton is not installed, so the stages run without their own kernels."
    if not any(can_compile_for(gpu.compute_capability) for gpu in gpus):
        oldest = ".".join(map(str, OLDEST_GPU))
        return (
            f"Nothing to compile: kernels are for GPUs of compute capability {oldest} or later; "
            "older ones run the stages without them."
        )
    return "Nothing to compile: all stages are fake."
