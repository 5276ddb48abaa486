"""`visiond models bundle` and `add`: models in one file, for machines without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daemon.config.loading import Config
from daemon.config.state import LEDGER
from daemon.core.errors import WrongArgument
from daemon.core.files import written_into, written_whole
from daemon.core.hints import command
from daemon.layout.models import pack_errors
from daemon.models.packs import name_weights
from daemon.models.pulls import BUNDLE, describe_bytes, pull_named, say
from stages.weights import bundles, catalog, names, packs, sets


def bundle_named(
    config: Config, file: Path, wanted: Sequence[str], *, force: bool, allow_pickle: bool
) -> None:
    """Write models and packs into a file; those that are not here are pulled first. wanted: none for all that the
    configuration names. Raises ModelsUnusable, NotWritable, WrongArgument."""
    if str(file) in (*sets.SETS, packs.STANDARD, *catalog.CATALOG):
        whole = command("models", "bundle", BUNDLE, file, *wanted)
        raise WrongArgument(f"The file to write is missing: {file} names models. Type for example `{whole}`.")
    named = choose_named(config, wanted)
    pull_named(config, [name for name in named if is_pulled(name)], allow_pickle=allow_pickle, explain=False)
    begins = (bundles.CONTENTS.encode(),)
    with (
        written_whole(file, config.state.path / LEDGER, force=force, begins=begins) as partial,
        pack_errors(),
    ):
        opened = [packs.open_pack(name, config.models.folder, base=config.folder) for name in named]
        found = {pack.folder: pack for pack in opened}
        for pack in found.values():
            if pack.plain:
                raise WrongArgument(
                    f"{pack.folder} is no pack, so it is not taken in a bundle. `visiond models make` makes one of it."
                )
        bundles.write(partial, list(found.values()), say)
    say(
        f"{file} is written ({describe_bytes(file.stat().st_size)}). On the other machine: `visiond models add {file.name}`"
    )


def choose_named(config: Config, wanted: Sequence[str]) -> list[str]:
    """The models to take, each once: those of a set of `visiond setup` in its place. wanted: as of `bundle_named`."""
    named: list[str] = []
    for name in wanted or name_weights(config):
        named += sets.choose_models(name, permissive=False).values() if name in sets.SETS else [name]
    chosen = [name for name in dict.fromkeys(named) if name not in ("", "mini")]
    if not chosen:
        raise WrongArgument(
            "The configuration names only models that are in the package. Name others, or a set: fast, balanced or best."
        )
    return chosen


def is_pulled(name: str) -> bool:
    """Whether a name is one of the model hub, and not the path of a folder."""
    return name == packs.STANDARD or names.parse(name) is not None


def add_bundle(config: Config, file: Path) -> None:
    """Raises ModelsUnusable, NotWritable."""
    folder = config.models.folder
    if not file.is_file():
        raise WrongArgument(f"there is no file {file}.")
    with pack_errors(), written_into(folder):
        bundles.read(file, folder, say)
