"""The commands `visiond models …`, `visiond train …` and `visiond warm`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from daemon.core.errors import MissingLibrary, VisiondError
from daemon.core.hints import command, quantity
from daemon.terminal.display import console, print_error, printable
from daemon.terminal.options import ConfigOption, flag, option, read_config

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.system.gpus import Gpu
    from daemon.workers.compiler import CompileProgress, Want

CAPABILITY = re.compile(r"(?:sm_)?(\d+)\.?(\d)")

models_app = typer.Typer(
    help="List, download, make and verify packs of model weights.\n\n"
    "Examples:\n  visiond models list\n  visiond models pull siglip2-b16-224\n  visiond models verify",
    no_args_is_help=True,
)
train_app = typer.Typer(
    help="Train a pack of models.\n\nExamples:\n  visiond train mini --out my-pack", no_args_is_help=True
)


@train_app.command(
    "mini",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def train_mini(context: typer.Context) -> None:
    """Train small models on synthetic scenes, as for the mini pack.
    `visiond train mini --help` lists its options. The distribution in the
    folder minipack of visiond's repository does it; install that first.

    Examples:
      visiond train mini --out my-pack
    """
    from daemon.layout.layout import pack_errors

    try:
        from visiond_mini import children, options, recipe
    except ImportError as error:
        if error.name == "visiond_mini":
            raise MissingLibrary(
                "Training the mini pack is a distribution of its own, which is not installed. In a checkout of visiond's "
                "repository, type: pip install --no-deps ./minipack"
            ) from error
        raise MissingLibrary(
            f"Training needs more libraries ({error}). Install them: pip install 'visiond[train]'."
        ) from error
    try:
        with pack_errors():
            recipe.train_mini(
                options.parse_options(recipe.__doc__, context.args), lambda text: print(text, flush=True)
            )
    except (recipe.TrainingFailed, children.InUse) as error:
        raise VisiondError(str(error)) from error


@models_app.command("list")
def list_models(
    stage: Annotated[
        str | None, option("--stage", metavar="STAGE", help="Only what this stage can use.")
    ] = None,
    catalog: Annotated[
        bool,
        flag("--catalog", help="Only the models that can be downloaded; with --json, their sources too."),
    ] = False,
    config: ConfigOption = None,
    as_json: Annotated[
        bool, flag("--json", help="Print JSON: the packs, or with --catalog the models.")
    ] = False,
) -> None:
    """List the packs that are here, and the models that can be downloaded.

    A pack is listed with the stages that it provides and those that use it.
    Weights that the configuration names by path are listed too. The weights
    of OCR come with the program. `visiond models pull NAME` downloads a model.

    Examples:
      visiond models list
      visiond models list --stage clip
      visiond models list --catalog --json
    """
    from daemon.cli.packs import print_catalog, print_catalog_json, print_packs, print_packs_json
    from stages.registry.registry import UnknownName, find_stage

    try:
        stages = [find_stage(stage).name] if stage else None
    except UnknownName as error:
        raise typer.BadParameter(str(error)) from error
    settings = read_config(config)
    problems = []
    if not catalog:
        problems = (print_packs_json if as_json else print_packs)(settings, stages)
    if not as_json and not catalog:
        print()
    if catalog or not as_json:
        (print_catalog_json if as_json else print_catalog)(settings, stages)
    for problem in problems:
        print_error(problem)


@models_app.command("pull")
def pull_models(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="A name that `visiond models list` shows, or a repository of the model hub: org/name, org/name@revision, "
            "org/name/file.pt. Default: the standard pack.",
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        flag(
            "--allow-pickle",
            help="Read pickled weights of a NAME that has no others. A pickle can run code: allow only models that you trust.",
        ),
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Download models, or the standard pack, from the model hub.

    Records the commit and the digest of every file; every later start
    compares them. Use a model by its name: `model = "NAME"` under the table
    of its stage. If a download is interrupted, the same command continues it.

    Examples:
      visiond models pull
      visiond models pull siglip2-b16-224 rf-detr-small
      visiond models pull yolo26s --allow-pickle
    """
    from daemon.cli.packs import pull_named

    pull_named(read_config(config), names or ["standard"], allow_pickle=allow_pickle)


@models_app.command("make")
def make_models(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the new pack.")],
    ocr: Annotated[
        Path | None,
        typer.Option(
            "--ocr", metavar="PATH", help="PP-OCR's ONNX file or folder, or a page reader's folder."
        ),
    ] = None,
    yolo: Annotated[
        Path | None,
        typer.Option(
            "--yolo",
            metavar="PATH",
            help="A .pt file, a .safetensors file with yolo.json beside it, or a folder of a transformers detector.",
        ),
    ] = None,
    clip: Annotated[
        Path | None, typer.Option("--clip", metavar="FOLDER", help="A CLIPModel as transformers saves it.")
    ] = None,
    blip: Annotated[
        Path | None,
        typer.Option(
            "--blip",
            metavar="FOLDER",
            help="A captioner as transformers saves it: BLIP, BLIP-2, Florence-2, or a chat model such as Qwen3-VL.",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels",
            metavar="FILE",
            help="CLIP's tags, one per line. Default: YOLO's classes and common scenes.",
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        flag(
            "--allow-pickle",
            help="Read pickled weights. A pickle can run code: allow only files that you trust.",
        ),
    ] = False,
    force: Annotated[bool, flag("--force", help="Replace FOLDER if it is a pack.")] = False,
) -> None:
    """Make a pack from checkpoints on disk, without the model hub.

    Converts weights to safetensors, tries each stage on two test images, and
    records the digest of every file. The pack has the stages whose options
    you use. Without --ocr, OCR has the weights that come with the program.

    Examples:
      visiond models make my-pack --yolo best.pt --allow-pickle
      visiond models make my-pack --clip clip-folder --blip blip-folder
      visiond models make my-pack --ocr ocr-folder
    """
    from daemon.cli.making import explain_use, make_pack

    named = {"ocr": ocr, "yolo": yolo, "clip": clip, "blip": blip}
    sources = {stage: path for stage, path in named.items() if path}
    if not sources:
        raise typer.BadParameter("use at least one of --ocr, --yolo, --clip and --blip")
    manifest = make_pack(
        folder,
        sources,
        lambda text: print(text, flush=True),
        labels=labels,
        allow_pickle=allow_pickle,
        force=force,
    )
    print(*explain_use(folder, manifest), sep="\n")


@models_app.command("verify")
def verify_models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Packs or models. Default: the configured pack."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Compare the files of packs or models with their recorded digests.

    Exits with 78 and names the file if one has changed.

    Examples:
      visiond models verify
      visiond models verify siglip2-b16-224
    """
    from daemon.cli.packs import verify_named

    verify_named(read_config(config), names)


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
    from daemon.ledger.files import written_into
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
    from daemon.layout.layout import resolve_models, used_gpus
    from daemon.layout.second_looks import lay_out
    from daemon.placement.devices import assume_gpus
    from daemon.placement.placement import Segment
    from daemon.workers.kernels import list_wants

    if not capabilities:
        layout, looks = lay_out(settings)
        parts = [layout, *(look.layout for look in looks)]
        found = [want for part in parts for want in part.wanted_kernels()]
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
