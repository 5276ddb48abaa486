"""The commands on models: `visiond models …` and `visiond train …`."""

from __future__ import annotations

import typer

from daemon.display import print_json, print_table, quantity
from daemon.errors import MissingLibrary, VisiondError
from daemon.options import ConfigOption, JsonOption, read_config

models_app = typer.Typer(
    help="Packs of weights: list them, pull the standard one, verify digests.\n\n"
    "Examples: visiond models list, visiond models pull, visiond models verify",
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
    """The packs that are there, with what they hold.

    Example: visiond models list
    """
    from daemon.layout import pack_errors
    from stages import packs

    settings = read_config(config)
    with pack_errors():
        found = [packs.open_pack(name, settings.models.folder) for name in packs.list_packs(settings.models.folder)]
    if as_json:
        keys = ("name", "folder", "bytes", "stages", "notice")
        rows = ((p.name, str(p.folder), p.size_bytes, list(p.manifest.stages), p.notice) for p in found)
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(
            ("pack", "folder", "MiB", "stages", "note"),
            ((p.name, p.folder, p.size_bytes >> 20, ", ".join(p.manifest.stages), p.notice) for p in found),
        )


@models_app.command("pull")
def pull_models(config: ConfigOption = None) -> None:
    """Fetch the standard pack from the model hub, and record revisions and digests that every later start verifies.

    Example: visiond models pull
    """
    from daemon.layout import pack_errors
    from stages import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.pull_standard(settings.models.folder)
    print(f"standard pack in {pack.folder}")


@models_app.command("verify")
def verify_models(config: ConfigOption = None) -> None:
    """Hold the configured pack's files against their digests. Exits 78 and names the file when one is altered.

    Example: visiond models verify
    """
    from daemon.layout import pack_errors
    from stages import packs

    settings = read_config(config)
    with pack_errors():
        pack = packs.open_pack(settings.models.pack, settings.models.folder)
        packs.verify(pack)
    print(f"{pack.name}: {quantity(len(pack.manifest.digests), 'file')} as recorded")
