"""Small models of the types that captioners and readers take, loaded once in a process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stages.pretrained.checkpoints import load_known
from stages.pretrained.language import LanguageStage
from stages.registry import registry
from stages.registry.registry import STAGES
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners, readers

MAKERS = {**captioners.CAPTIONERS, **readers.READERS}
BACKENDS = [("blip", "chat"), ("blip", "blip2"), ("ocr", "reader")]
KNOWN = [model for stage, backend in BACKENDS for model in STAGES[stage].backends[backend].models]
KINDS = [model.type for model in KNOWN]


@lru_cache
def save_known(kind: str) -> Path:
    place = tempfile.mkdtemp(prefix="models-")
    atexit.register(shutil.rmtree, place)
    MAKERS[kind](folder := Path(place) / kind)
    return folder


def make_known(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model of transformers as it is."""
    return load_known(KNOWN, str(save_known(kind)), dtype, device)


def make_stage(kind: str, device: str = "cpu", **settings: object) -> LanguageStage:
    """A stage that has loaded such a model."""
    [name] = [
        stage
        for stage, backend in BACKENDS
        for model in STAGES[stage].backends[backend].models
        if model.type == kind
    ]
    folder = save_known(kind)
    spec = resolve(
        open_pack(folder, folder.parent / "none"), name, {"dtype": "float32", "batch_size": 4, **settings}
    )
    stage = registry.build(spec, device)
    assert isinstance(stage, LanguageStage)
    stage.load()
    return stage
