"""Smaller weights: the linear layers of a model in 8 or 4 bits, by torchao.

All else stays in bfloat16, in which layers also exchange their values: embeddings, norms, convolutions, the last layer
(which scores words), and the experts of mixtures (DeepSeek-OCR 2), which transformers does not store as linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from stages.contract.base import StageUnusable
from stages.contract.recognition import describe_quantized

GROUP = 64  # inputs of an int4 layer that share a scale
# The least compute capability of a GPU for whose kernels torch has. int8 also runs on a CPU.
NEEDS = {"float8": (8, 9), "int4": (8, 0)}
LANGUAGE_MODEL, LAST_LAYER = "language_model", "lm_head"  # as parts of models are named in transformers


def check_small(dtype: str, device: str) -> None:
    """Raises StageUnusable if a model's weights cannot have this dtype on this device."""
    if not find_spec("torchao"):
        raise StageUnusable(
            f"dtype = \"{dtype}\" needs torchao: pip install 'visiond[small]', then restart visiond."
        )
    if not (least := NEEDS.get(dtype)):
        return
    needs = f'dtype = "{dtype}" needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or later'
    if not device.startswith("cuda"):
        raise StageUnusable(f'{needs}, and {device} is none; set dtype = "int8" or "auto".')
    if (found := torch.cuda.get_device_capability(device)) < least:
        raise StageUnusable(f'{needs}, and {device} has {found[0]}.{found[1]}; set dtype = "int8" or "half".')


def make_smaller(model: nn.Module, dtype: str, device: str | None = None) -> None:
    """Replace the weights of linear layers. Call check_small first.

    int8: one scale for each output, inputs in bfloat16. float8: e4m3 with one scale for each output; inputs likewise, with
    one scale for each row, so that the product is one of float8 matrices. int4: only in the language model; a scale and a
    zero point for each group of 64 inputs, found by half-quadratic quantization (https://dropbox.github.io/hqq_blog/).
    device: where layers are moved, one after another, before they become smaller: the model as it was need not fit there.
    """
    from torchao.quantization import quantize_

    def fits(module: nn.Module, name: str) -> bool:
        parts = name.split(".")
        is_inner = isinstance(module, nn.Linear) and LAST_LAYER not in parts
        return is_inner and (dtype != "int4" or LANGUAGE_MODEL in parts)

    quantize_(model, make_config(dtype), fits, device=device)


def make_config(dtype: str) -> Any:
    """torchao's configuration. Without set_inductor_config=False it changes how this process compiles everything."""
    from torchao import quantization
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm, Int4PackingFormat

    if dtype == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    if dtype == "float8":
        return quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow(),
            kernel_preference=KernelPreference.TORCH,
            set_inductor_config=False,
        )
    return quantization.Int4WeightOnlyConfig(
        group_size=GROUP,
        int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D,
        int4_choose_qparams_algorithm=Int4ChooseQParamsAlgorithm.HQQ,
        set_inductor_config=False,
    )


def refuse_quantized(folder: str, config: Mapping[str, Any]) -> None:
    """Raises StageUnusable if the weights in a folder are quantized. config: the content of its config.json."""
    if quantized := describe_quantized(folder, config):
        raise StageUnusable(quantized)
