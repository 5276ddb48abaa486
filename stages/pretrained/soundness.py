"""Refuses weights with which a network would load but answer nonsense, or fail with a library's own error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from stages.contract.base import StageUnusable


def refuse_nan(network: nn.Module, source: str | Path) -> None:
    """Raises StageUnusable if a weight is NaN: then so are scores, and detectors and captioners answer without any error.
    source: the file or folder of the weights."""
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and tensor.amin().isnan():  # NaN if any value is
            raise StageUnusable(
                f"{source} has weights that are not numbers (NaN), {name} first, so its results would be wrong. "
                "Copy the file again; if that does not help, use an earlier checkpoint."
            )


def check_shapes(network: nn.Module, state: Mapping[str, Tensor], source: str | Path, fix: str) -> None:
    """Raises StageUnusable if a state is of another network. fix: what to do then, as a sentence."""
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    held = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [
        name for name in (*shapes, *sorted(held.keys() - shapes.keys())) if shapes.get(name) != held.get(name)
    ]
    if wrong:
        found, expected = (describe_shape(those.get(wrong[0])) for those in (held, shapes))
        raise StageUnusable(
            f"{source} does not hold the weights of the model in its config: {len(wrong)} of {len(shapes)} are missing or of "
            f"another shape, {wrong[0]} first (expected: {expected}, found: {found}). {fix}"
        )


def describe_shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else "×".join(map(str, shape)) or "a number"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
