"""The commands `visiond models …` and `visiond train …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from daemon.cli.display import print_error, print_json, print_table
from daemon.cli.options import ConfigOption, JsonOption, flag, read_config
from daemon.errors import MissingLibrary, VisiondError
from daemon.hints import quantity

models_app = typer.Typer(
    help="List, download, make and verify packs of model weights.\n\n"
    "Examples:\n  visiond models list\n  visiond models pull\n  visiond models make my-pack --yolo best.pt --allow-pickle",
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
    `visiond train mini --help` lists its options.

    Examples:
      visiond train mini --out my-pack
    """
    from daemon.layout import pack_errors

    try:
        from stages.training import children, options, recipe
    except ImportError as error:
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
def list_models(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the packs, their stages, and what the configuration uses them for.

    Weights that the configuration names by path are listed too. The weights
    of OCR come with the program.

    Examples:
      visiond models list
    """
    from daemon.cli.packs import list_shelf

    shelf = list_shelf(read_config(config))
    if as_json:
        keys = ("name", "folder", "bytes", "stages", "used_for", "notice")
        rows = (
            (p.name, str(p.folder), p.size_bytes, list(p.manifest.stages), used, p.notice)
            for p, used in shelf.packs
        )
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        columns = ("pack", "folder", "MiB", "stages", "used for", "note")
        cells = (
            (
                p.name,
                p.folder,
                p.size_bytes >> 20,
                ", ".join(p.manifest.stages),
                ", ".join(used) or "-",
                p.notice,
            )
            for p, used in shelf.packs
        )
        print_table(columns, cells)
    for problem in shelf.problems:
        print_error(problem)


@models_app.command("pull")
def pull_models(config: ConfigOption = None) -> None:
    """Download the standard pack from the model hub.

    Records revisions and digests; every later start verifies them.

    Examples:
      visiond models pull
    """
    from daemon.layout import pack_errors
    from stages.weights import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.pull_standard(settings.models.folder)
    print(f"The standard pack is in {pack.folder}")


@models_app.command("make")
def make_models(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the new pack.")],
    yolo: Annotated[
        Path | None,
        typer.Option(
            "--yolo", metavar="FILE", help="A .pt file, or a .safetensors file with yolo.json beside it."
        ),
    ] = None,
    clip: Annotated[
        Path | None, typer.Option("--clip", metavar="FOLDER", help="A CLIPModel as transformers saves it.")
    ] = None,
    blip: Annotated[
        Path | None,
        typer.Option(
            "--blip", metavar="FOLDER", help="A BlipForConditionalGeneration as transformers saves it."
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
    you use.

    Examples:
      visiond models make my-pack --yolo best.pt --allow-pickle
      visiond models make my-pack --clip clip-folder --blip blip-folder
    """
    from daemon.cli.making import explain_use, make_pack

    sources = {stage: path for stage, path in (("yolo", yolo), ("clip", clip), ("blip", blip)) if path}
    if not sources:
        raise typer.BadParameter("use at least one of --yolo, --clip and --blip")
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
def verify_models(config: ConfigOption = None) -> None:
    """Compare the files of the configured pack with their recorded digests.

    Exits with 78 and names the file if one has changed.

    Examples:
      visiond models verify
    """
    from daemon.layout import pack_errors
    from stages.weights import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.open_pack(settings.models.pack, settings.models.folder)
        packs.verify(pack)
    print(f"{pack.name}: {quantity(len(pack.manifest.digests), 'file')} unchanged")
