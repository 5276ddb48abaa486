"""All stages, their order, and their backends. Imports no torch.

A backend's module is imported only when a stage is built. So the daemon can import this file,
and a machine without the libraries of one backend can run the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

import msgspec

from stages.blip.descriptor import BLIP
from stages.classifier.descriptor import CLASSIFIER
from stages.clip.descriptor import CLIP
from stages.contract import plugins
from stages.contract.base import Result, Stage, StageSpec
from stages.contract.descriptor import Backend, Descriptor, Files
from stages.contract.options import FakeOptions, read_options
from stages.contract.processes import importing
from stages.hash.descriptor import HASH
from stages.ocr.descriptor import OCR
from stages.yolo.descriptor import YOLO

BUILT_IN = (OCR, YOLO, CLIP, BLIP)  # those that run unless the configuration says otherwise
OPTIONAL = (CLASSIFIER, HASH)
STAGES, SOURCES, PROBLEMS = plugins.gather(BUILT_IN, OPTIONAL)
# The optional ones run after these, and so do those of plug-ins that have variants.
ORDER = tuple(
    name
    for name, stage in STAGES.items()
    if stage in BUILT_IN or (stage not in OPTIONAL and not stage.has_variants)
)
FAKE = Backend(  # of every stage
    place="stages.registry.fake:FakeStage",
    options=FakeOptions,
    silent=frozenset(FakeOptions.__struct_fields__) - {"salt"},
    needs_weights=False,
    can_spread=True,  # it stands for any model
)

_DECODERS: dict[str, msgspec.json.Decoder[Result]] = {
    name: msgspec.json.Decoder(kind.result) for name, kind in STAGES.items()
}


class UnknownName(ValueError):
    """There is no stage, backend or pack of this name; the message names the nearest one."""

    def __init__(
        self, what: str, name: str, known: Iterable[str], otherwise: str = "", others: Iterable[str] = ()
    ) -> None:
        """others: known names too, but too many to list them all."""
        names = sorted(known)
        near = difflib.get_close_matches(name.lower(), [*names, *others], n=1, cutoff=0.5)
        all_ = f"choose one of {', '.join(names)}" if names else ""
        hint = f'did you mean "{near[0]}"?' if near else f"{all_}{otherwise}."
        super().__init__(f'there is no {what} "{name}"; {hint}')


def kind_of(name: str) -> str:
    """The stage whose descriptor a stage has: "classifier" of its variant "classifier_safety"; else the name itself."""
    kind, _, variant = name.partition("_")
    is_variant = kind in STAGES and STAGES[kind].has_variants and plugins.NAME.fullmatch(variant)
    return kind if is_variant else name


def list_variants(kind: str, names: Iterable[str]) -> list[str]:
    """Of these stages those that have a stage's descriptor, in the order in which they run."""
    return sort_stages(name for name in names if kind_of(name) == kind)


def has_stage(name: str) -> bool:
    """Whether there is a stage of this name, or one whose variant it is."""
    return kind_of(name) in STAGES


def find_stage(name: str) -> Descriptor:
    """Raises UnknownName."""
    if name in STAGES:
        return STAGES[name]
    if not has_stage(name):
        raise UnknownName("stage", name, STAGES)
    return replace(STAGES[kind_of(name)], name=name, key=name)


def find_backend(stage: str, backend: str) -> Backend:
    """Raises UnknownName."""
    backends = {**find_stage(stage).backends, "fake": FAKE}
    if backend not in backends:
        raise UnknownName(f"backend for {stage} called", backend, backends)
    return backends[backend]


def find_license(stage: str, backend: str, files: Files) -> str:
    """The license of the library that a model needs, if it asks something of those who use it; else "".
    files: of the model, by role."""
    return find_backend(stage, backend).find_license(files)


def sort_stages(names: Iterable[str]) -> list[str]:
    """Sort stages in the order in which they run; those that are not installed are last."""
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(names, key=lambda name: (places.get(kind_of(name), len(places)), name))


def check_options(specs: Iterable[StageSpec]) -> list[str]:
    """What is wrong with the stages' options: one sentence for each wrong option."""
    problems = []
    for spec in specs:
        try:
            read_options(spec, find_backend(spec.name, spec.backend).options)
        except ValueError as error:
            problems += str(error).splitlines()
    return problems


def find_class(spec: StageSpec) -> type[Stage]:
    """The class of the stage that a spec describes; imports its module. Raises UnknownName."""
    module, _, name = find_backend(spec.name, spec.backend).place.partition(":")
    with importing(freeze=False):
        kind: type[Stage] = getattr(import_module(module), name)
    return kind


def build(spec: StageSpec, device: str) -> Stage:
    """The stage that a spec describes, not yet loaded. Raises UnknownName."""
    return find_class(spec)(spec, device)


def decode(stage: str, payload: bytes | memoryview) -> Result:
    """A stage's result from its JSON. Raises UnknownName, and msgspec.DecodeError if the JSON does not fit."""
    decoder = _DECODERS.get(stage) or _DECODERS.get(kind_of(stage))
    if decoder is None:
        raise UnknownName("stage", stage, _DECODERS)
    return decoder.decode(payload)
