"""Packs of the mini pack's architectures with random weights."""

from __future__ import annotations

from pathlib import Path

from stages.contract.manifest import Manifest
from stages.weights.published import BLANK_NOTICE, Vocabulary, save_models
from visiond_mini.mini import Sizes, make_models


def make_blank_pack(folder: Path, seed: int, sizes: Sizes | None = None) -> None:
    models = make_models(seed, Vocabulary.of_scenes(), sizes or Sizes())
    about = Manifest(name="mini", description="Small blank models.", trained=False, notice=BLANK_NOTICE)
    save_models(models, folder, about)
