"""Which stages there are, in which order, and what can run each of them. Imports no torch.

A backend's module is imported only when a stage is built, so the daemon can read this file and a
machine without a backend's libraries can still run the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import msgspec

from stages.base import Caption, Clip, Objects, Ocr, Result, Stage, StageSpec

BACKENDS = {
    "ocr": {"ppocr": "stages.ocr:OcrStage", "fake": "stages.fake:FakeOcr"},
    "yolo": {"ultralytics": "stages.yolo:YoloStage", "fake": "stages.fake:FakeYolo"},
    "clip": {"transformers": "stages.clip:ClipStage", "fake": "stages.fake:FakeClip"},
    "blip": {"transformers": "stages.blip:BlipStage", "fake": "stages.fake:FakeBlip"},
}

# Part of every fingerprint. Raise a number when a change of that backend's code changes its answers.
VERSIONS = {"ppocr": 1, "ultralytics": 1, "transformers": 1, "fake": 1}


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rest of the project has to know of a stage: its key in the sidecar and its result's type."""

    key: str
    result: type[Result]


STAGES = {
    "ocr": Kind("ocr", Ocr),
    "yolo": Kind("objects", Objects),
    "clip": Kind("clip", Clip),
    "blip": Kind("caption", Caption),
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


def locate(stage: str, backend: str) -> str:
    """Where a backend's class is, as "module:class". Raises UnknownName."""
    if stage not in BACKENDS:
        raise UnknownName("stage", stage, BACKENDS)
    if backend not in BACKENDS[stage]:
        raise UnknownName(f"backend for {stage} called", backend, BACKENDS[stage])
    return BACKENDS[stage][backend]


def build(spec: StageSpec, device: str) -> Stage:
    """The stage that a spec describes, not loaded yet. Raises UnknownName."""
    module, _, name = locate(spec.name, spec.backend).partition(":")
    stage: Stage = getattr(import_module(module), name)(spec, device)
    return stage


def decode(stage: str, payload: bytes | memoryview) -> Result:
    """A stage's result from its JSON. Raises UnknownName, and msgspec.DecodeError on other JSON."""
    if stage not in _DECODERS:
        raise UnknownName("stage", stage, _DECODERS)
    return _DECODERS[stage].decode(payload)
