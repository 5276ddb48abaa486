"""What a stage tells the rest of the program about itself. Imports no torch.

A stage is described beside its code: stages/ocr/descriptor.py is an example, and so is any distribution with an entry point in
the group `visiond.stages` that names a `Descriptor`. From descriptors alone come the order of the stages, the tables of the
configuration, the fields of the sidecar, the columns of an export, fingerprints, fakes and the share that a stage has of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

Files = Mapping[str, Path]  # by role
# The result of a fake: from a number below 64, the image's width and height in pixels, and the earlier stages that it may use.
Fake = Callable[[int, int, int, frozenset[str]], msgspec.Struct]


def find_nothing(path: Path) -> dict[str, str]:
    return {}


def check_nothing(files: Files, *, allow_pickle: bool) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to run a stage.

    place: of its class, as "module:class". Only a worker imports the module.
    options: what [stages.NAME.options] takes; a struct that forbids unknown fields.
    silent: options that change how fast or whether an answer comes, but not which.
    version: part of every fingerprint. Raise it when a change of the code changes answers.
    needs_weights: whether a pack or a folder must have files for it.
    bundled: where a library brings the weights, their absolute paths by role. Raises PackError when it is not installed.
    find: the files of such weights in a folder, or in a file that was named, by role and relative to the folder; empty: none.
    check: raises PackError when files are not whole, or of another model than the backend takes. allow_pickle: whether they
        may be a pickle.
    shares: role → the stage and the role there whose files are used, so that the two stages' answers can be compared.
    takes: what it takes, for the message that refuses something else.
    """

    place: str
    options: type[msgspec.Struct]
    silent: frozenset[str] = frozenset()
    version: int = 1
    needs_weights: bool = True
    bundled: Callable[[], dict[str, str]] | None = None
    find: Callable[[Path], dict[str, str]] = find_nothing
    check: Callable[..., None] = check_nothing
    shares: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    takes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """A stage.

    name: in the configuration, the metrics and the ledger. key: of its result in the sidecar.
    result: the type of an image's result; what its JSON must fit.
    backends: by name; the first is the one that runs where nothing names another.
    uses: the earlier stages whose results it uses where there are any; it runs after them.
    half: the half precision that suits its answers on a GPU.
    cost: its time on an image as a share of the standard job's four stages together, which are 1.
    fake: what backend "fake" answers; None: an answer is made up from the type of the result.
    """

    name: str
    key: str
    result: type[msgspec.Struct]
    backends: Mapping[str, Backend]
    uses: tuple[str, ...] = ()
    half: Literal["float16", "bfloat16"] = "float16"
    cost: float = 0.1
    fake: Fake | None = None
