"""What to type if the model hub cannot be reached: models come from a machine with a network, in one file."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from daemon.core.hints import command
from daemon.layout.layout import pack_errors
from stages.contract.manifest import HubUnreachable, PackError
from stages.weights import names

BUNDLE = "models.tar"  # the name that messages give it


@contextlib.contextmanager
def hub_errors(folder: Path, models: Iterable[str], *, allow_pickle: bool) -> Iterator[None]:
    """As `pack_errors`; if the hub cannot be reached, with the commands that bring these models into the folder without it."""
    with pack_errors():
        try:
            yield
        except HubUnreachable as error:
            left = [model for model in models if not names.find_pulled(model, folder)]
            pickles = ["--allow-pickle"] * allow_pickle
            bundle = shlex.join(
                ["visiond", "models", "bundle", *pickles, BUNDLE, *left]
            )  # elsewhere: no --config
            add = command("models", "add", BUNDLE)
            raise PackError(
                f"{', '.join(left)} could not be pulled: {error} Without a network, type `{bundle}` on a machine that has "
                f"one, copy {BUNDLE} here, type `{add}`, and give this command again."
            ) from error
