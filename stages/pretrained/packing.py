"""Vision towers that put the patches of all images of a batch into one sequence, as Qwen's.

transformers computes the attention and the positions of each image by itself, and waits for the GPU in each layer.
For small images that takes longer than all else. Here images of one size are computed at once.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from stages.pretrained.fusing import become

PACKED = "visiond_flash"  # with "flash" in it, transformers gives the whole sequence to it, with the lengths
LENGTHS = "cu_seqlens"
TEXTS_KEPT = 1024  # some 30 kB each


def pack_images(model: nn.Module) -> None:
    """Compute the images of a batch at once where a model computes one after another."""
    AttentionInterface.register(PACKED, attend)
    for part in list(model.modules()):
        if LENGTHS in inspect.signature(type(part).forward).parameters and hasattr(part, "config"):
            part.config._attn_implementation = PACKED  # type: ignore[union-attr]
        if hasattr(type(part), "get_rope_index"):
            become(part, RememberedPositions)
            part.known = {}  # type: ignore[assignment]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention within each image, as an attention function of transformers. query, key, value: [1, heads, patches
    of all images, head size]. cu_seq_lens_q: where each image begins, and the last one ends. max_length_q: patches of
    the largest. Returns [1, patches, heads, head size]."""
    images, patches = len(cu_seq_lens_q) - 1, query.shape[2]
    if images * max_length_q == patches:
        query, key, value = (
            tensor.view(-1, images, max_length_q, tensor.shape[-1]).transpose(0, 1)
            for tensor in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, scale=scaling)
        return attended.transpose(1, 2).flatten(0, 1)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    each = zip(
        *(torch.split_with_sizes(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True
    )
    attended = torch.cat([F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in each], dim=2)
    return attended.transpose(1, 2), None


class RememberedPositions(nn.Module):
    """Of a model that gives each token of an image a row and a column. They depend only on the tokens and the image's
    size, and transformers finds them on the GPU, for one text after another, with some 20 waits for each."""

    known: dict[bytes, tuple[Tensor, Tensor]]

    def get_rope_index(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """As of the model: positions of three axes, [3, texts, tokens], and what to add to those of later tokens,
        [texts, 1]."""
        find = super().get_rope_index  # type: ignore[misc]
        if image_grid_thw is None or attention_mask is None or len(image_grid_thw) != len(input_ids):
            return find(  # type: ignore[no-any-return]
                input_ids,
                mm_token_type_ids,
                image_grid_thw=image_grid_thw,
                attention_mask=attention_mask,
                **others,
            )
        given = [tensor.cpu() for tensor in (input_ids, mm_token_type_ids, image_grid_thw, attention_mask)]
        found = []
        for place in range(len(input_ids)):
            ids, types, size, mask = (tensor[place : place + 1] for tensor in given)
            key = b"".join(tensor.numpy().tobytes() for tensor in (ids, types, size, mask))
            if key not in self.known:
                if len(self.known) >= TEXTS_KEPT:
                    self.known.clear()
                self.known[key] = find(ids, types, image_grid_thw=size, attention_mask=mask)
            found.append(self.known[key])
        positions, deltas = zip(*found, strict=True)
        return torch.cat(positions, dim=1).to(input_ids.device), torch.cat(deltas).to(input_ids.device)
