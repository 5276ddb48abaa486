"""Finds modules whose parts would be on different devices, although each must be on one device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.pretrained.spreading import map_layers


def find_divided(model: PreTrainedModel, folder: Path) -> list[str]:
    """The entries of the map for 2 to 6 devices that are inside a layer, or inside a module without layers."""
    whole = [
        f"{name}."
        for name, module in model.named_modules()
        if name and not any(isinstance(part, nn.ModuleList) for part in module.modules())
    ]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    whole += [f"{name}.{number}." for name, module in lists.items() for number in range(len(module))]
    return [
        name
        for count in (2, 3, 4, 6)
        for name in map_layers(
            type(model), str(folder), torch.float32, [f"cpu:{number}" for number in range(count)]
        )
        if name.startswith(tuple(whole))
    ]
