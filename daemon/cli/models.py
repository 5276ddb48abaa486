"""The commands `visiond models …` and `visiond train …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from daemon.core.errors import MissingLibrary, VisiondError
from daemon.terminal.display import print_error
from daemon.terminal.options import ConfigOption, ForceOption, flag, option, read_config
from visiond.training.command import train_app

__all__ = ["models_app", "train_app"]

models_app = typer.Typer(
    help="List, download, make and verify packs of model weights.\n\n"
    "Examples:\n  visiond models list\n  visiond models pull siglip2-b16-224\n  visiond models verify",
    no_args_is_help=True,
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
    from daemon.layout.models import pack_errors

    try:
        from visiond.training.children import InUse
        from visiond_mini import options

        with pack_errors():
            wanted = options.parse_options(context.args)  # before the next line, which imports torch
        from visiond_mini import recipe
    except ImportError as error:
        if error.name == "visiond_mini":
            raise MissingLibrary(
                "Training the mini pack is a distribution of its own, which is not installed. In a checkout of visiond's "
                "repository, type: pip install --no-deps ./minipack"
            ) from error
        raise MissingLibrary(
            f"Training needs more libraries ({error}). Install them: pip install 'visiond[train,ultralytics]'."
        ) from error
    try:
        with pack_errors():
            recipe.train_mini(wanted, lambda text: print(text, flush=True))
    except (recipe.TrainingFailed, InUse) as error:
        raise VisiondError(str(error)) from error


@models_app.command("list")
def list_models(
    stage: Annotated[str | None, option("--stage STAGE", "Only what this stage can use.")] = None,
    catalog: Annotated[
        bool, flag("--catalog", "Only the models that can be downloaded; with --json, their sources too.")
    ] = False,
    sizes: Annotated[
        bool, flag("--sizes", "Ask the model hub how large the models are that are not here.")
    ] = False,
    config: ConfigOption = None,
    as_json: Annotated[bool, flag("--json", "Print JSON: the packs, or with --catalog the models.")] = False,
) -> None:
    """List the packs that are here, and the models that can be downloaded.

    A pack is listed with the stages that it provides and those that use it.
    Weights that the configuration names by path are listed too. The weights
    of OCR come with the program. `visiond models pull NAME` downloads a model.
    MiB is what a model takes on this disk, or with --sizes its download. The
    models of the sets fast, balanced and best are marked.

    Examples:
      visiond models list
      visiond models list --stage clip --sizes
      visiond models list --catalog --json
    """
    from daemon.models.offered import print_catalog, print_catalog_json
    from daemon.models.packs import print_packs, print_packs_json
    from stages.registry.registry import UnknownName, find_stage, kind_of

    try:
        stages = [find_stage(kind_of(stage)).name] if stage else None
    except UnknownName as error:
        raise typer.BadParameter(str(error)) from error
    if sizes and as_json and not catalog:
        raise typer.BadParameter(
            "it is for the models that can be downloaded; add --catalog", param_hint="--sizes"
        )
    settings = read_config(config)
    if catalog:
        problems = (print_catalog_json if as_json else print_catalog)(settings, stages, ask=sizes)
    elif as_json:
        problems = print_packs_json(settings, stages)
    else:
        problems = print_packs(settings, stages)
        print()
        problems += print_catalog(settings, stages, ask=sizes)
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
            "Read pickled weights of a NAME that has no others. A pickle can run code: allow only models that you trust.",
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
    from daemon.models.pulls import pull_named

    pull_named(read_config(config), names or ["standard"], allow_pickle=allow_pickle)


@models_app.command("bundle")
def bundle_models(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, for example models.tar.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Models or packs, or a set of `visiond setup`: fast, balanced or best. "
            "Default: all that the configuration names.",
        ),
    ] = None,
    force: ForceOption = False,
    allow_pickle: Annotated[
        bool, flag("--allow-pickle", "As for `models pull`, for models that are not here.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Write models into one file, for machines without a network.

    Models that are not here are downloaded first. On the other machine,
    `visiond models add FILE` puts them into its models folder.

    Examples:
      visiond models bundle models.tar balanced
      visiond models bundle models.tar siglip2-b16-224 rf-detr-small
    """
    from daemon.models.bundling import bundle_named

    bundle_named(read_config(config), file, names or [], force=force, allow_pickle=allow_pickle)


@models_app.command("add")
def add_models(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `visiond models bundle`.")],
    config: ConfigOption = None,
) -> None:
    """Put the models of a bundle into the models folder, without the model hub.

    Compares every file with its digest. What is here already stays.

    Examples:
      visiond models add models.tar
    """
    from daemon.models.bundling import add_bundle

    add_bundle(read_config(config), file)


@models_app.command("make")
def make_models(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the new pack.")],
    ocr: Annotated[
        Path | None, option("--ocr PATH", "PP-OCR's ONNX file or folder, or a page reader's folder.")
    ] = None,
    yolo: Annotated[
        Path | None,
        option(
            "--yolo PATH",
            "A .pt file, a .safetensors file with yolo.json beside it, or a folder of a transformers detector.",
        ),
    ] = None,
    clip: Annotated[Path | None, option("--clip FOLDER", "A CLIPModel as transformers saves it.")] = None,
    blip: Annotated[
        Path | None,
        option(
            "--blip FOLDER",
            "A captioner as transformers saves it: BLIP, BLIP-2, Florence-2, or a chat model such as Qwen3-VL.",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        option("--labels FILE", "CLIP's tags, one per line. Default: YOLO's classes and common scenes."),
    ] = None,
    allow_pickle: Annotated[
        bool,
        flag(
            "--allow-pickle", "Read pickled weights. A pickle can run code: allow only files that you trust."
        ),
    ] = False,
    force: Annotated[bool, flag("--force", "Replace FOLDER if it is a pack.")] = False,
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
    from daemon.models.making import explain_use, make_pack

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
    from daemon.models.packs import verify_named

    verify_named(read_config(config), names)
