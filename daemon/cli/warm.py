"""The command `visiond warm`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from daemon.cli.display import console, printable
from daemon.cli.options import ConfigOption, option, read_config
from daemon.hints import command, quantity

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.system.gpus import Gpu
    from daemon.workers.compiler import Step, Want

CAPABILITY = re.compile(r"(?:sm_)?(\d+)\.?(\d)")
NAMED_GPUS = 64  # a configuration may name any of them


def warm(
    capabilities: Annotated[
        list[str] | None,
        option(
            "--gpu",
            metavar="CAPABILITY",
            help="Compile for GPUs of this compute capability, such as 9.0, instead of the GPUs of this machine. Repeatable.",
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Compile the GPU kernels ahead of the first start.

    The daemon does this by itself at its first start, which takes some seconds
    longer for it. In an image or an installer, this command does it before.
    The kernels are in the folder `kernels` below [state] path; run the command
    as the user who runs the daemon, and keep that folder where it is. With
    --gpu the machine needs no GPU.

    Examples:
      visiond warm
      visiond warm --gpu 9.0 --config /etc/visiond/daemon.toml
    """
    from daemon.state import KERNELS
    from daemon.workers.kernels import list_missing

    settings = read_config(config)
    folder, (wants, gpus) = settings.state.path / KERNELS, find_wants(settings, capabilities)
    if not wants:
        console.print(explain_nothing(gpus))
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


async def compile_missing(folder: Path, missing: list[Want]) -> Step:
    """Compile, and show the progress. Raises KernelsMissing, NotWritable."""
    from daemon.cli.progress import Progress
    from daemon.errors import KernelsMissing
    from daemon.ledger.files import written_into
    from daemon.workers.compiler import Step
    from daemon.workers.kernels import compiling

    last, problems = Step(0, 0), dict[str, None]()
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
    from daemon.layout import Layout, resolve_models, used_gpus
    from daemon.placement import Segment
    from daemon.workers.kernels import list_wants

    if not capabilities:
        layout = Layout.of(settings)
        return layout.wanted_kernels(), used_gpus(settings, layout.gpus)
    wants, used = [], []
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

    return [
        Gpu(number, f"GPU-{number}", "", 1 << 36, 1 << 36, 0, capability, None, ())
        for number in range(NAMED_GPUS)
    ]


def explain_nothing(gpus: Sequence[Gpu]) -> str:
    """Why there is nothing to compile for the GPUs that are used."""
    from stages.kernels.cache import OLDEST_GPU, can_compile_for

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
