"""Parts of transformers' vision towers over the same weights, arranged as a GPU runs them fastest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.devices import has_kernels_for


class FastAttention(nn.Module):
    """BlipAttention by PyTorch's fused attention in place of its own matrix products and softmax: 2.3 times as fast."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.qkv, self.projection = attention.qkv, attention.projection

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden_states: [batch, tokens, dim]."""
        batch, tokens, dim = hidden_states.shape
        parts = self.qkv(hidden_states).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value)
        return self.projection(seen.transpose(1, 2).reshape(batch, tokens, dim)), None


def speed_up_attention(vision: Any) -> None:
    """Put FastAttention, over the same weights, into a BlipVisionModel."""
    for layer in vision.encoder.layers:
        layer.self_attn = FastAttention(layer.self_attn)


class FastMlp(nn.Module):
    """BlipMLP with its GELU in the first product's own kernel, where cuBLAS has the hyperbolic tangent's: at most 5e-4 beside
    the error function's, which half precision does not tell from rounding. A pass of its own takes half as long again."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = mlp.fc1, mlp.fc2

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [batch, tokens, dim]."""
        rows = hidden_states.flatten(0, 1)
        wide = torch._addmm_activation(self.fc1.bias, rows, self.fc1.weight.T, use_gelu=True)
        narrow: Tensor = self.fc2(wide)
        return narrow.view(hidden_states.shape)


def speed_up_mlp(vision: Any) -> None:
    """Put FastMlp, over the same weights, into a BlipVisionModel."""
    for layer in vision.encoder.layers:
        layer.mlp = FastMlp(layer.mlp)


class Patches(nn.Module):
    """The first layer, a convolution whose windows do not overlap, as the matrix product that it is.

    cuDNN takes four times as long for it, and plans it anew for every thread and size of batch.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [batch, channels, height, width]. Returns [batch, dim, rows, columns]."""
        tall, wide = self.weight.shape[2:]
        batch, channels, height, width = pixels.shape
        tiles = pixels.reshape(batch, channels, height // tall, tall, width // wide, wide)
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


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
    """hidden + update, and that normed; on a GPU in one pass over both, which is half of what two take."""
    if has_kernels_for(hidden):
        from stages.kernels import launch

        return launch.add_norm(hidden, update, norm)
    total = hidden + update
    return total, norm(total)


def speed_up_patches(vision: Any) -> None:
    """Put Patches, over the same weights, into a BlipVisionModel or a CLIP vision model."""
    vision.embeddings.patch_embedding = Patches(vision.embeddings.patch_embedding)
