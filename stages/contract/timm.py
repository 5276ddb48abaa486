"""Whether a model of transformers has parts of the library timm, which is an extra. Imports neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Types whose backbone is timm's if config.json has no backbone_config, as in the models that their authors published.
BY_DEFAULT = ("detr", "conditional_detr", "deformable_detr", "dab-detr")

# Files of timm with the classes of models that have no names of their own, by the number of classes.
IMAGENETS = {
    1000: "imagenet_synsets.txt",
    11221: "imagenet21k_miil_synsets.txt",
    11821: "imagenet12k_synsets.txt",
    21841: "imagenet22k_synsets.txt",
    21842: "imagenet22k_ms_synsets.txt",
    21843: "imagenet21k_goog_synsets.txt",
}
# model_type and class of transformers for any model of timm
WRAPPER = ("timm_wrapper", "TimmWrapperForImageClassification")


def is_of_timm(config: Mapping[str, Any]) -> bool:
    """Whether it is the config.json of timm's own repositories, which names no class of transformers."""
    return "pretrained_cfg" in config and not config.get("model_type")


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
    if is_of_timm(config) or kind == WRAPPER[0]:
        return True
    return kind in BY_DEFAULT and config.get("use_timm_backbone") is not False


def has_timm() -> bool:
    spec = importlib.util.find_spec("timm")
    return spec is not None and spec.origin is not None  # not only a folder that pip left behind


def read_classes(count: Any) -> list[str]:
    """The names of so many classes, as timm has them for those of ImageNet; [] for another number. They are read from its
    files, as its modules import torch."""
    spec = importlib.util.find_spec("timm")
    if count not in IMAGENETS or spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0], "data", "_info")
    lines = (folder / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    words = dict(line.split("\t", 1) for line in lines)
    return [words[each] for each in (folder / IMAGENETS[count]).read_text(encoding="utf-8").split()]
