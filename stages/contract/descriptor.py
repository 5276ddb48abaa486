"""Describes a stage for the rest of the program. Imports no torch.

The descriptor of a stage is beside its code, as in stages/ocr/descriptor.py, or in another distribution,
where an entry point in the group `visiond.stages` names it. Everything else is derived from descriptors: the
order of the stages, the tables of the configuration, the fields of the sidecar, the columns of an export,
fingerprints, fakes and a stage's share of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

# dtypes of weights alone, with a weight's share of the bytes that it has in half precision
SHARES = {"int8": 0.5, "float8": 0.5, "int4": 0.3}
SMALL = tuple(SHARES)
MODULES = "modules.json"  # how the library Sentence Transformers makes embeddings of a model's answers
BYTES = ("int8", "float8")

Files = Mapping[str, Path]  # by role
# Makes the result of a fake from a number below 64, the image's width and height in pixels,
# and the earlier stages that it may use.
Fake = Callable[[int, int, int, frozenset[str]], msgspec.Struct]


def find_nothing(path: Path) -> dict[str, str]:
    return {}


def find_no_license(files: Files) -> str:
    return ""


def check_nothing(files: Files, *, allow_pickle: bool) -> None:
    return


@dataclass(frozen=True, slots=True)
class KnownModel:
    """How to recognize a transformers model by its config.json and its weights.

    type: its model_type.
    name: of its class.
    foreign: prefixes of weights, and types of the vision tower, that only another class of the same family has, and that
        class: a config.json may have no class, or a wrong one.
    parts: what it needs in addition to its weights: an "image processor", a "tokenizer".
    loaded_as: the class of transformers that loads it, if that has another name.
    role: of its folder among the files of its stage.
    version: as that of a Backend, where a change of the code changes only the answers of this model.
    has_size: its vision tower takes images of one size, that of its config.json.
    embeds: whether MODULES is beside its config.json; None: either. Only that file distinguishes a model for embeddings from
        the model that writes and that it was made from.
    """

    type: str
    name: str
    description: str
    foreign: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("image processor", "tokenizer")
    loaded_as: str = ""
    role: str = "model"
    version: int = 1
    has_size: bool = False
    embeds: bool | None = None

    def fits(self, kind: str, files: Collection[str]) -> bool:
        """Whether it may be a model of this model_type with these files."""
        return self.type == kind and self.embeds in (None, MODULES in files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to run a stage.

    place: "module:class" of its class. Only a worker imports the module.
    options: the type of [stages.NAME.options]; a struct that forbids unknown fields.
    silent: options that change how fast an answer comes, or whether it comes, but not the answer.
    version: part of every fingerprint. Raise it when a change of the code changes answers.
    needs_weights: whether a pack or a folder must have files for it.
    bundled: if a library contains the weights: returns their absolute paths by role. Raises PackError if it
        is not installed.
    roles: of the files that it needs, where a folder may have only some of them: `bundled` has the others.
    find: returns the files of the backend's weights in a folder, or in the file that was named, by role and
        relative to the folder; {} if there are none.
    check: raises PackError if files are damaged, or of another model than the backend takes. allow_pickle:
        whether they may be pickles.
    shares: role → another stage and its role whose files are used here too, so that the answers of both can
        be compared.
    models: the models of transformers that it takes.
    vocabulary: roles whose files are not weights but words, so that a model without them uses those of the
        configured pack; an option of the same name replaces them.
    small: the dtypes of smaller weights that it can have: some of int8, float8 and int4.
    can_spread: whether the layers of its model can lie on several devices, as StageSpec.spread names them.
    find_license: returns the license of the library that it needs for a model's files, if that library asks something
        of those who offer its answers as a service; else "".
    half: the half precision with which its answers are good enough on a GPU, if not that of the stage.
    dtype: the only one that it has, on every device, whatever "auto" is for others; "": those of StageSpec.
    """

    place: str
    options: type[msgspec.Struct]
    silent: frozenset[str] = frozenset()
    version: int = 1
    needs_weights: bool = True
    bundled: Callable[[], dict[str, str]] | None = None
    roles: tuple[str, ...] = ()
    find: Callable[[Path], dict[str, str]] = find_nothing
    check: Callable[..., None] = check_nothing
    shares: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    models: tuple[KnownModel, ...] = ()
    vocabulary: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    can_spread: bool = False
    find_license: Callable[[Files], str] = find_no_license
    half: Literal["float16", "bfloat16"] | None = None
    dtype: str = ""

    def includes(self, files: Mapping[str, str]) -> bool:
        """Whether all of these weights, by role, are those of `bundled`."""
        return self.bundled is not None and set(files.values()) <= set(self.bundled().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """A stage.

    name: in the configuration, the metrics and the ledger. key: of its result in the sidecar.
    result: the type of an image's result. Its JSON is checked against this type.
    backends: by name; the first is the default.
    uses: the earlier stages whose results it uses if they run. It runs after them.
    half: the half precision with which its answers are good enough on a GPU.
    cost: its time for an image as a share of that of the four stages of the standard job, which is 1.
    takes_memory: whether each image of a batch takes more than some 20 MB of GPU memory. On GPUs with little of it,
        such stages have smaller batches than others.
    has_variants: whether it may run several times, each time with a model, options and a result of its own: as the stages
        NAME_x and NAME_y.
    fake: makes the answers of the backend "fake"; None: answers are made up from the type of the result.
    """

    name: str
    key: str
    result: type[msgspec.Struct]
    backends: Mapping[str, Backend]
    uses: tuple[str, ...] = ()
    half: Literal["float16", "bfloat16"] = "float16"
    cost: float = 0.1
    takes_memory: bool = False
    has_variants: bool = False
    fake: Fake | None = None

    @property
    def models(self) -> list[KnownModel]:
        """The models of transformers that its backends take."""
        return [model for backend in self.backends.values() for model in backend.models]
