"""Lanczos resizing in transformers' image processors, with the same pixels on every device.

torchvision has had this filter since 0.27, on the CPU only. Without it, transformers uses a processor that works with Pillow on
the host, or a bicubic filter on a GPU, and different pixels can change the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from PIL.Image import Resampling
from torch import Tensor
from torchvision.transforms import InterpolationMode
from transformers.utils import is_torchvision_greater_or_equal

from stages.images.devices import has_kernels_for, split_batches
from stages.images.resize import (
    CACHED_AXES,
    LANCZOS,
    PIXELS_AT_ONCE,
    prepare_axis,
    resize_in_torch,
    resize_to_bytes_with_kernels,
)

ON_CPU = is_torchvision_greater_or_equal("0.27")  # whether torchvision has the filter there
NAMES = (Resampling.LANCZOS, InterpolationMode.LANCZOS)

make_axis = lru_cache(CACHED_AXES)(prepare_axis)


def resize_by_lanczos(images: Tensor, height: int, width: int, *, with_kernels: bool | None = None) -> Tensor:
    """uint8 [images, 3, any height, any width] to uint8 [images, 3, height, width], in the integer arithmetic of
    torchvision's filter. with_kernels: None for where there are kernels."""
    rows, columns = (
        make_axis(size, resized, 0, resized, str(images.device), LANCZOS)
        for size, resized in zip(images.shape[-2:], (height, width), strict=True)
    )
    if has_kernels_for(images) if with_kernels is None else with_kernels:
        return resize_to_bytes_with_kernels(list(images), [(rows, columns)] * len(images))
    largest = max(math.prod(images.shape[-2:]), height * width)
    parts = split_batches(range(len(images)), max(PIXELS_AT_ONCE // largest, 1))
    return torch.cat([resize_in_torch(images[part[0] : part[-1] + 1], rows, columns) for part in parts])


def make_exact(processor: Any) -> None:
    """Make an image processor of transformers (its torchvision version) that uses Lanczos give the same pixels on every
    device."""
    if uses_lanczos(processor):
        processor.resize = with_lanczos(processor.resize)


def uses_lanczos(processor: Any) -> bool:
    return getattr(processor, "resample", None) in NAMES


def with_lanczos(resize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize_exactly(image: Tensor, size: Any, resample: Any = None, **kwargs: Any) -> Tensor:
        if resample not in NAMES or (ON_CPU and image.device.type == "cpu"):
            return resize(image, size, resample=resample, **kwargs)
        # Each processor has its own rule for the size; a tensor without pixels shows it.
        shape = resize(image.to("meta"), size, resample=Resampling.BICUBIC, **kwargs).shape
        return resize_by_lanczos(image, *shape[-2:])

    return resize_exactly
