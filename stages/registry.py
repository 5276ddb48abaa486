"""Which stages there are, in which order, and what can run each of them. Imports no torch.

A backend's module is imported only when a stage is built, so the daemon can read this file and a
machine without a backend's libraries can still run the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

import msgspec

from stages.base import Caption, Clip, Objects, Ocr, Result, Stage, StageSpec
from stages.options import BlipOptions, ClipOptions, FakeOptions, OcrOptions, YoloOptions, read_options


class Backend(NamedTuple):
    """place: of its class, as "module:class"."""

    place: str
    options: type[msgspec.Struct]


BACKENDS = {
    "ocr": {"ppocr": Backend("stages.ocr.stage:OcrStage", OcrOptions), "fake": Backend("stages.fake:FakeOcr", FakeOptions)},
    "yolo": {
        "ultralytics": Backend("stages.yolo.stage:YoloStage", YoloOptions),
        "fake": Backend("stages.fake:FakeYolo", FakeOptions),
    },
    "clip": {
        "transformers": Backend("stages.clip.stage:ClipStage", ClipOptions),
        "fake": Backend("stages.fake:FakeClip", FakeOptions),
    },
    "blip": {
        "transformers": Backend("stages.blip.stage:BlipStage", BlipOptions),
        "fake": Backend("stages.fake:FakeBlip", FakeOptions),
    },
}

# Part of every fingerprint. Raise a number when a change of that backend's code changes its answers.
VERSIONS = {"ppocr": 2, "ultralytics": 2, "transformers": 2, "fake": 1}


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rest of the project has to know of a stage. key: in the sidecar. half: the half precision that suits it.

    OCR and YOLO tell places: bfloat16's eight bits move OCR's boxes by up to three pixels, which changes some texts, and lose
    some of YOLO's. CLIP's and BLIP's answers bear bfloat16, which does not overflow.
    """

    key: str
    result: type[Result]
    half: Literal["float16", "bfloat16"]


STAGES = {
    "ocr": Kind("ocr", Ocr, "float16"),
    "yolo": Kind("objects", Objects, "float16"),
    "clip": Kind("clip", Clip, "bfloat16"),
    "blip": Kind("caption", Caption, "bfloat16"),
}
ORDER = tuple(STAGES)

_DECODERS: dict[str, msgspec.json.Decoder[Result]] = {name: msgspec.json.Decoder(kind.result) for name, kind in STAGES.items()}


class UnknownName(ValueError):
    """No stage, backend or pack is called so; the message names the nearest that is."""

    def __init__(self, what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(names)}{otherwise}."
        super().__init__(f'there is no {what} "{name}"; {hint}')


def find_backend(stage: str, backend: str) -> Backend:
    """Raises UnknownName."""
    if stage not in BACKENDS:
        raise UnknownName("stage", stage, BACKENDS)
    if backend not in BACKENDS[stage]:
        raise UnknownName(f"backend for {stage} called", backend, BACKENDS[stage])
    return BACKENDS[stage][backend]


def check_options(specs: Iterable[StageSpec]) -> list[str]:
    """What is wrong with the stages' options, a sentence for each stage."""
    problems = []
    for spec in specs:
        try:
            read_options(spec, find_backend(spec.name, spec.backend).options)
        except ValueError as error:
            problems.append(str(error))
    return problems


def build(spec: StageSpec, device: str) -> Stage:
    """The stage that a spec describes, not loaded yet. Raises UnknownName."""
    module, _, name = find_backend(spec.name, spec.backend).place.partition(":")
    stage: Stage = getattr(import_module(module), name)(spec, device)
    return stage


def decode(stage: str, payload: bytes | memoryview) -> Result:
    """A stage's result from its JSON. Raises UnknownName, and msgspec.DecodeError on other JSON."""
    if stage not in _DECODERS:
        raise UnknownName("stage", stage, _DECODERS)
    return _DECODERS[stage].decode(payload)
