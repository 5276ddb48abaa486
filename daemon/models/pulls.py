"""`visiond models pull`: downloads from the model hub, with a look at the disk first and one bar in bytes."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from daemon.config.loading import Config
from daemon.core.errors import NotWritable
from daemon.core.files import written_into
from daemon.core.hints import command
from daemon.layout.models import pack_errors
from daemon.models.packs import describe_license
from daemon.system.mounts import find_existing
from daemon.terminal.display import console, printable
from daemon.terminal.progress import LATE_SECONDS, Progress
from stages.contract.manifest import MANIFEST, HubUnreachable, PackError, list_files
from stages.weights.hub import HuggingFaceHub
from stages.weights.names import find_pulled, read_reference
from stages.weights.packs import MINI, STANDARD, Pack
from stages.weights.pulling import Part, partial_of, plan_parts
from stages.weights.standard import MODELS, pull_model, pull_standard

Parts = Mapping[str, Sequence[Part]]  # what to download, by the name of the model
BUNDLE = "models.tar"  # the name that messages give it
UNIT = "MiB"
UNIT_BITS = 20


def pull_named(
    config: Config,
    wanted: Sequence[str],
    *,
    allow_pickle: bool,
    missing: Parts | None = None,
    explain: bool = True,
) -> None:
    """Download models in turn; "standard" is the standard pack. All of them, and the room on the disk, are checked before
    the first download. missing: what `find_missing` found for them, if the caller has checked the room. explain: print what
    to write into the configuration. Raises ModelsUnusable, NotWritable."""
    folder = config.models.folder
    if missing is None:
        missing = find_missing(folder, list_models(wanted, folder), allow_pickle=allow_pickle)
        check_room(folder, missing)
    with hub_errors(folder, missing, allow_pickle=allow_pickle), written_into(folder):
        with counting(folder, missing) as hub:
            for name, parts in missing.items():
                pack = pull_model(name, folder, say, hub, parts, allow_pickle=allow_pickle)
                say(
                    f"License of {name}: {describe_license(pack) or 'not known; read the card of the model'}."
                )
        for name in wanted:
            if name == "mini":
                say(f"The pack mini is inside the package, in {MINI}")
            elif name == STANDARD:
                say(f"The standard pack is in {pull_standard(folder, say).folder}")
            elif explain:
                explain_use(name, pull_model(name, folder, say if name not in missing else ignore))


def say(sentence: str) -> None:
    print(sentence, flush=True)


def ignore(_: str) -> None: ...


def explain_use(name: str, pack: Pack) -> None:
    """Print what to write into the configuration."""
    for stage in pack.manifest.stages:
        print(f'To use {name}, write `model = "{name}"` under [stages.{stage}].')


def list_models(wanted: Iterable[str], folder: Path) -> list[str]:
    """The models to have, of these names: the standard pack has three, unless it is here."""
    here = (folder / STANDARD / MANIFEST).is_file()
    made_of = {"mini": (), STANDARD: () if here else tuple(MODELS.values())}
    return [model for name in wanted for model in made_of.get(name, (name,))]


def find_missing(folder: Path, models: Iterable[str], *, allow_pickle: bool) -> dict[str, list[Part]]:
    """What to download for each model that is not in the folder. Asks the hub only for these. Raises ModelsUnusable."""
    models = list(models)
    with hub_errors(folder, models, allow_pickle=allow_pickle):
        references = {model: read_reference(model) for model in models}
        return {
            model: plan_parts(HuggingFaceHub(say), reference, allow_pickle=allow_pickle)
            for model, reference in references.items()
            if not find_pulled(model, folder)
        }


def check_room(folder: Path, missing: Parts) -> None:
    """Raises NotWritable, before gigabytes are downloaded and not after it."""
    if not missing:
        return
    free = shutil.disk_usage(find_existing(folder)).free + count_begun(folder, missing)
    need = sum(part.disk_bytes for parts in missing.values() for part in parts)
    console.print(
        printable(
            f"Disk: the models need {describe_bytes(need)}; {describe_bytes(free)} are free for {folder}."
        )
    )
    if need > free:
        raise NotWritable(
            f"{folder} has no room for these models: {describe_bytes(need - free)} are missing. Free them, or name a folder "
            "of another disk as `folder` under [models]."
        )


def count_begun(folder: Path, models: Iterable[str]) -> int:
    """The bytes of downloads of these models that were interrupted."""
    places = [partial_of(read_reference(model), folder) for model in models]
    return sum(file.stat().st_size for place in places if place.is_dir() for file in list_files(place))


@contextlib.contextmanager
def counting(folder: Path, missing: Parts) -> Iterator[HuggingFaceHub]:
    """The model hub, with one progress bar for all bytes that are to be downloaded."""
    sizes = [part.size_bytes for parts in missing.values() for part in parts]
    total = None if None in sizes else sum(filter(None, sizes)) - count_begun(folder, missing)
    done = 0
    with Progress(UNIT, after=LATE_SECONDS) as progress:

        def count(more: int) -> None:
            nonlocal done
            done += more
            progress.step(done >> UNIT_BITS, None if total is None else -(-total >> UNIT_BITS))

        yield HuggingFaceHub(say, count)


def describe_size(parts: Iterable[Part]) -> str:
    sizes = [part.size_bytes for part in parts]
    return "size not known" if None in sizes else describe_bytes(sum(filter(None, sizes)))


def describe_bytes(size: int) -> str:
    return f"{-(-size // (1 << UNIT_BITS)):,} {UNIT}"


@contextlib.contextmanager
def hub_errors(folder: Path, models: Iterable[str], *, allow_pickle: bool) -> Iterator[None]:
    """As `pack_errors`; if the hub cannot be reached, with the commands that bring these models into the folder without it."""
    with pack_errors():
        try:
            yield
        except HubUnreachable as error:
            left = [model for model in models if not find_pulled(model, folder)]
            pickles = ["--allow-pickle"] * allow_pickle
            bundle = shlex.join(
                ["visiond", "models", "bundle", *pickles, BUNDLE, *left]
            )  # elsewhere: no --config
            add = command("models", "add", BUNDLE)
            raise PackError(
                f"{', '.join(left)} could not be pulled: {error} Without a network, type `{bundle}` on a machine that has "
                f"one, copy {BUNDLE} here, type `{add}`, and give this command again."
            ) from error
