"""Whether a model of transformers has parts of the library timm, which is an extra. Imports neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Whose backbone is timm's where config.json has no backbone_config, as in those that their authors published.
BY_DEFAULT = ("detr", "conditional_detr", "deformable_detr", "dab-detr")


def describe_missing(folder: Path | str, config: Mapping[str, Any]) -> str:
    """A sentence if the model in a folder needs timm, and it is not installed; "" otherwise. config: the content of its
    config.json."""
    if not needs_timm(config) or has_timm():
        return ""
    return (
        f"the model in {folder} has parts of the library timm, which is not installed: pip install 'visiond[timm]', then "
        "restart visiond."
    )


def needs_timm(config: Mapping[str, Any]) -> bool:
    backbone = config.get("backbone_config")
    if isinstance(backbone, dict):
        return backbone.get("model_type") == "timm_backbone"
    kind = config.get("model_type")
    return kind in BY_DEFAULT and config.get("use_timm_backbone") is not False


def has_timm() -> bool:
    spec = importlib.util.find_spec("timm")
    return spec is not None and spec.origin is not None  # not only a folder that pip left behind
