"""Faster forms of what transformers' language models and vision towers are made of, with the same weights.

Between their matrix products they go over memory five to ten times for each norm and each rotation of queries and keys.
On a GPU in half precision that is more time than the products of a vision tower take. So these parts are replaced, by
their form, in any model: what is of another form stays as it is. Elsewhere they compute as before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from stages.images.devices import has_kernels_for
from stages.pretrained.vision import Patches, is_patching

HALF = (torch.bfloat16, torch.float16)
# functions of transformers
TEXT_ROTATION, PATCH_ROTATION = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # the parts of an MLP with a gate
ACTIVATIONS = ("activation_fn", "act_fn", "act")
SILU, TANH_GELU = type(ACT2FN["silu"]), type(ACT2FN["gelu_pytorch_tanh"])
GATE_ALIGNED_TO = 16  # values of a tensor

Rotation = Callable[..., tuple[Tensor, Tensor]]


class FastNorm(nn.Module):
    """Of an RMS norm."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., dim]."""
        if not can_fuse(hidden_states) or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        from stages.kernels import language

        return language.rms_norm(hidden_states.contiguous(), self.weight, self.variance_epsilon)


class FastLayerNorm(nn.LayerNorm):
    """PyTorch's own takes 1.6 times as long."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., dim]."""
        if not can_fuse(hidden_states) or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        from stages.kernels import language

        return language.layer_norm(hidden_states.contiguous(), self.weight, self.bias, self.eps)


class FastGatedMlp(nn.Module):
    """Of an MLP whose first layer is multiplied by a gate (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    gate_proj: Callable[[Tensor], Tensor]
    up_proj: Callable[[Tensor], Tensor]
    down_proj: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., dim]."""
        if not can_fuse(hidden_states) or hidden_states.numel() % GATE_ALIGNED_TO:
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        from stages.kernels import language

        return self.down_proj(language.gate(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


class FastGeluMlp(nn.Module):
    """Of an MLP with the tanh form of GELU, which cuBLAS computes in the kernel of the first product."""

    layers: ClassVar[tuple[str, str]] = ("fc1", "fc2")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., dim]."""
        if not can_fuse(hidden_states):
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        first, second = (getattr(self, name) for name in self.layers)
        rows = hidden_states.flatten(0, -2)
        hidden = torch._addmm_activation(first.bias, rows, first.weight.T, use_gelu=True)
        out: Tensor = second(hidden)
        return out.view(*hidden_states.shape[:-1], -1)


class FastNumberedMlp(FastGeluMlp):
    """As Qwen3-VL's, which has other names."""

    layers = "linear_fc1", "linear_fc2"


def speed_up(model: nn.Module) -> None:
    """Give these parts of a model their faster forms. It must be on one device, and its weights final."""
    for part in list(model.modules()):
        if faster := find_faster(part):
            become(part, faster)
        for name, child in list(part.named_children()):
            if is_patching(child):
                setattr(part, name, Patches(child))
    speed_up_rotations(model)


def become(part: nn.Module, faster: type[nn.Module]) -> None:
    """Make a part of a model one of a class that is also `faster`, whose methods come first. So its weights and their
    names stay."""
    kind = type(part)
    part.__class__ = type(kind.__name__, (faster, kind), {"__module__": kind.__module__})


def find_faster(part: Any) -> type[nn.Module] | None:
    """The faster form of a part of a model; None if there is none."""
    kind, children = type(part).__name__, dict(part.named_children())
    if kind.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
        return FastNorm
    if type(part) is nn.LayerNorm and part.bias is not None and len(part.normalized_shape) == 1:
        return FastLayerNorm
    return find_faster_mlp(children) if kind.lower().endswith("mlp") else None


def find_faster_mlp(children: Mapping[str, nn.Module]) -> type[nn.Module] | None:
    """children: the parts of the MLP."""
    activation = next((children[name] for name in ACTIVATIONS if name in children), None)
    if isinstance(activation, SILU) and children.keys() == GATED:
        return FastGatedMlp
    if not isinstance(activation, TANH_GELU):
        return None
    for form in FastGeluMlp, FastNumberedMlp:
        if {*form.layers} < children.keys() and is_plain(children[form.layers[0]]):
            return form
    return None


def is_plain(layer: Any) -> bool:
    """Whether a linear layer has a bias, and weights that were not made smaller."""
    return isinstance(layer, nn.Linear) and layer.bias is not None and type(layer.weight.data) is Tensor


def can_fuse(tensor: Tensor) -> bool:
    return tensor.dtype in HALF and has_kernels_for(tensor)


def speed_up_rotations(model: nn.Module) -> None:
    """Replace the functions by which the model's classes rotate queries and keys, if they rotate by halves of a head.
    They belong to a module of transformers, so this is for all models of these classes."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name in (TEXT_ROTATION, PATCH_ROTATION):
            theirs = getattr(module, name, None)
            if theirs is None or hasattr(theirs, "__wrapped__"):
                continue
            if name == TEXT_ROTATION and rotates_by_halves(theirs, (1, 2, 3, 8)):
                setattr(module, name, with_kernel(theirs, orient_text))
            if name == PATCH_ROTATION and rotates_by_halves(theirs, (3, 2, 8)):
                setattr(module, name, with_kernel(theirs, orient_patches))


def rotates_by_halves(rotation: Rotation, shape: tuple[int, ...]) -> bool:
    """Whether a function rotates as the kernel does. shape: of queries for it to try."""
    generator = torch.Generator().manual_seed(0)
    turns = (*shape[:-3], shape[-2], shape[-1]) if len(shape) == 4 else (shape[0], shape[-1])
    query, key, cos, sin = (torch.randn(size, generator=generator) for size in (shape, shape, turns, turns))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        dim = 1 if len(shape) == 4 else -2
        return x * cos.unsqueeze(dim) + turned * sin.unsqueeze(dim)

    try:
        found = rotation(query, key, cos, sin)
    except (TypeError, RuntimeError, ValueError):  # it takes other arguments
        return False
    return all(torch.equal(one, rotate(x)) for one, x in zip(found, (query, key), strict=True))


def orient_text(query: Tensor, turns: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor] | None:
    """query: [batch, heads, tokens, head size]. turns: cosines or sines, [batch or 1, tokens, head size], or without a
    batch for an unsqueeze_dim of 0. Returns both as the kernel takes them, or None if it cannot."""
    if turns.ndim != 3 - (unsqueeze_dim == 0) or turns.dtype != query.dtype or unsqueeze_dim > 1:
        return None
    return query.transpose(1, 2), turns if turns.ndim == 3 else turns[None]


def orient_patches(query: Tensor, turns: Tensor) -> tuple[Tensor, Tensor] | None:
    """As orient_text, with query: [patches, heads, head size], turns: [patches, head size] in float32."""
    return (query[None], turns[None]) if turns.dtype == torch.float32 else None


def with_kernel(theirs: Rotation, orient: Callable[..., tuple[Tensor, Tensor] | None]) -> Rotation:
    @functools.wraps(theirs)
    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rotated = [rotate_one(x, cos, sin, orient, *arguments, **options) for x in (q, k)]
        if rotated[0] is None or rotated[1] is None:
            return theirs(q, k, cos, sin, *arguments, **options)
        return rotated[0], rotated[1]

    return rotate_both


def rotate_one(
    x: Tensor, cos: Tensor, sin: Tensor, orient: Callable[..., Any], *arguments: Any, **options: Any
) -> Tensor | None:
    """None if the kernel cannot rotate it."""
    size = x.shape[-1]
    if not can_fuse(x) or cos.shape[-1] != size or size % 2 or cos.stride() != sin.stride():
        return None
    oriented = orient(x, cos, *arguments, **options), orient(x, sin, *arguments, **options)
    if None in oriented:
        return None
    (heads, cosines), (_, sines) = oriented
    strides = (*heads.stride()[:-1], *cosines.stride()[:-1])
    if {heads.stride(-1), cosines.stride(-1)} != {1} or any(stride % size for stride in strides):
        return None
    from stages.kernels import language

    rotated = language.rotate(heads, cosines, sines)
    return rotated.transpose(1, 2) if x.ndim == 4 else rotated[0]


def launch_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Launch each kernel that a model needs once: see Stage.launch_kernels in stages/contract/base.py. model: without weights,
    on the device "meta"."""
    from stages.kernels import language

    parts: list[Any] = list(model.modules())
    forms = {part: find_faster(part) for part in parts}
    norms = {(len(part.weight), part.variance_epsilon) for part in parts if forms[part] is FastNorm}
    for width, eps in sorted(norms):
        language.rms_norm(torch.zeros(1, width, dtype=dtype), torch.zeros(width, dtype=dtype), eps)
    for width, eps in sorted(
        {(len(part.weight), part.eps) for part in parts if forms[part] is FastLayerNorm}
    ):
        zeros = torch.zeros(width, dtype=dtype)
        language.layer_norm(zeros[None], zeros, zeros, eps)
    if FastGatedMlp in forms.values():
        language.gate(torch.zeros(GATE_ALIGNED_TO, dtype=dtype), torch.zeros(GATE_ALIGNED_TO, dtype=dtype))
    launch_rotations(model, dtype)


def launch_rotations(model: nn.Module, dtype: torch.dtype) -> None:
    from stages.kernels import language

    speed_up_rotations(model)
    parts: list[Any] = list(model.modules())
    rotated = {
        (part.head_dim, turned)
        for part in parts
        for name, turned in ((TEXT_ROTATION, dtype), (PATCH_ROTATION, torch.float32))
        if hasattr(part, "head_dim")
        and hasattr(getattr(sys.modules[type(part).__module__], name, None), "__wrapped__")
    }
    for size, turned in sorted(rotated, key=str):
        turns = torch.zeros(1, 1, size, dtype=turned)
        language.rotate(torch.zeros(1, 1, 1, size, dtype=dtype), turns, turns)
