"""Chooses the dtype of a stage's weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stages.contract.descriptor import SMALL
from stages.contract.manifest import PackError
from stages.registry import registry
from stages.weights.layouts import name_models

LARGE = ("float32", "float16", "bfloat16", "half")  # every model takes them


def choose_dtype(stage: str, backend: str, files: Mapping[str, Path], wanted: str) -> str:
    """The dtype of StageSpec: the only one of the backend; else the wanted one, which may be "half", the half precision
    of the backend. Raises PackError if the model cannot have such weights."""
    kind = registry.find_backend(stage, backend)
    if kind.dtype:
        return kind.dtype
    if wanted == "half":
        return kind.half or registry.find_stage(stage).half
    if wanted in SMALL and wanted not in kind.small:
        found = name_models(kind, files)
        model = found[0] if found else f"the model of the backend {backend}"
        taken = ", ".join(f'"{dtype}"' for dtype in (*kind.small, *LARGE))
        raise PackError(
            f'stages.{stage}.dtype: {model} does not support dtype "{wanted}". It supports {taken} and "auto". '
            f'Set dtype = "auto" under [stages.{stage}].'
        )
    return wanted
