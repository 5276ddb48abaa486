"""The commands on models: `visiond models …` and `visiond train …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from daemon.cli.display import print_error, print_json, print_table
from daemon.cli.options import ConfigOption, JsonOption, read_config
from daemon.errors import MissingLibrary, VisiondError
from daemon.hints import quantity

models_app = typer.Typer(
    help="Packs of weights: list them, pull the standard one, make one of your own, verify digests.\n\n"
    "Examples: visiond models list, visiond models pull, visiond models make my-pack --yolo best.pt, visiond models verify",
    no_args_is_help=True,
)
train_app = typer.Typer(help="Train a pack of models.\n\nExample: visiond train mini --out my-pack", no_args_is_help=True)


@train_app.command("mini", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def train_mini(context: typer.Context) -> None:
    """The pack inside the package: small models and synthetic scenes. Its options: visiond train mini --help

    Example: visiond train mini --out my-pack
    """
    from daemon.layout import pack_errors

    try:
        from stages.training import children, recipe
    except ImportError as error:
        raise MissingLibrary(f"Training cannot be loaded: {error}. Its libraries: pip install 'visiond[train]'.") from error
    try:
        with pack_errors():
            recipe.train_mini(recipe.parse_options(context.args), lambda text: print(text, flush=True))
    except (recipe.TrainingFailed, children.InUse) as error:
        raise VisiondError(str(error)) from error


@models_app.command("list")
def list_models(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the packs, what they contain, and for which stages the configuration uses them. Weights that it names by path are
    listed too. OCR's weights come with the program.

    Example: visiond models list
    """
    from daemon.cli.packs import list_shelf

    shelf = list_shelf(read_config(config))
    if as_json:
        keys = ("name", "folder", "bytes", "stages", "used_for", "notice")
        rows = ((p.name, str(p.folder), p.size_bytes, list(p.manifest.stages), used, p.notice) for p, used in shelf.packs)
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        columns = ("pack", "folder", "MiB", "stages", "used for", "note")
        cells = (
            (p.name, p.folder, p.size_bytes >> 20, ", ".join(p.manifest.stages), ", ".join(used) or "-", p.notice)
            for p, used in shelf.packs
        )
        print_table(columns, cells)
    for problem in shelf.problems:
        print_error(problem)


@models_app.command("pull")
def pull_models(config: ConfigOption = None) -> None:
    """Fetch the standard pack from the model hub, and record revisions and digests that every later start verifies.

    Example: visiond models pull
    """
    from daemon.layout import pack_errors
    from stages.weights import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.pull_standard(settings.models.folder)
    print(f"standard pack in {pack.folder}")


@models_app.command("make")
def make_models(
    folder: Annotated[Path, typer.Argument(help="Folder of the new pack.")],
    yolo: Annotated[
        Path | None, typer.Option("--yolo", help="YOLO: a .pt file, or .safetensors with a yolo.json beside it.")
    ] = None,
    clip: Annotated[Path | None, typer.Option("--clip", help="CLIP: a folder as transformers saves a CLIPModel.")] = None,
    blip: Annotated[
        Path | None, typer.Option("--blip", help="BLIP: a folder as transformers saves a BlipForConditionalGeneration.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option("--labels", help="CLIP's tags, one per line; default: YOLO's classes and common scenes.")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights. A pickle is a program: allow only what you trust.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing pack.")] = False,
) -> None:
    """Make a pack from checkpoints on disk, without the model hub. Converts weights to safetensors, tries each stage on a page,
    and records every file's digest. For a pack without a stage, leave out its option.

    Example: visiond models make my-pack --yolo best.pt --clip clip-folder --blip blip-folder --allow-pickle
    """
    from daemon.cli.making import make_pack, tell_use

    sources = {stage: path for stage, path in (("yolo", yolo), ("clip", clip), ("blip", blip)) if path}
    if not sources:
        raise typer.BadParameter("name at least one of --yolo, --clip and --blip")
    manifest = make_pack(
        folder, sources, lambda text: print(text, flush=True), labels=labels, allow_pickle=allow_pickle, force=force
    )
    print(*tell_use(folder, manifest), sep="\n")


@models_app.command("verify")
def verify_models(config: ConfigOption = None) -> None:
    """Compare the configured pack's files with their recorded digests. Exits 78 and names the file when one is altered.

    Example: visiond models verify
    """
    from daemon.layout import pack_errors
    from stages.weights import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.open_pack(settings.models.pack, settings.models.folder)
        packs.verify(pack)
    print(f"{pack.name}: {quantity(len(pack.manifest.digests), 'file')} as recorded")
