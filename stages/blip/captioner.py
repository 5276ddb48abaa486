"""Greedy captions by BLIP's text decoder, without running transformers' Python code for each token.

The weights are those of transformers' BlipTextLMHeadModel, and the tokens are those of its `generate` with
do_sample=False and num_beams=1. The GPU never waits for Python:

- All keys and values are in buffers of a fixed size. A step is always the same kernels at the same addresses,
  and is replayed from one CUDA graph for each batch size.
- The image's keys and values for cross-attention are computed once for a caption, not for each token.
- A token of the prompt is a step like any other; only its choice is known in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BlipConfig, BlipForConditionalGeneration

from stages.blip.vision import add_norm
from stages.pretrained.keyvalues import plan_sizes
from stages.pretrained.recording import CudaRecorder

STEPS_BETWEEN_CHECKS = 4  # of whether all captions have ended, on a GPU; each check waits for the GPU
KEYS_ALIGNED_TO = 8  # the attention kernels need this of a mask's last dimension


class DecoderLayer:
    """One decoder layer with its key-value caches, on the modules of transformers' BlipTextLayer."""

    def __init__(self, module: Any, batch: int, slots: int, image_tokens: int) -> None:
        self.attention, self.cross = module.attention, module.crossattention
        self.expand, self.contract = module.intermediate, module.output
        own = self.attention.self
        self.heads, self.width = own.num_attention_heads, own.attention_head_size
        self.own_weight, self.own_bias = fuse(own.query, own.key, own.value)
        self.cross_weight, self.cross_bias = fuse(self.cross.self.key, self.cross.self.value)
        # [keys or values, batch, heads, slots, width], and [batch, image tokens, keys or values, heads, width]
        self.cache = self.own_weight.new_zeros(2, batch, self.heads, slots, self.width)
        self.image = self.own_weight.new_zeros(batch, image_tokens, 2, self.heads, self.width)

    def cache_images(self, embeddings: Tensor) -> None:
        """Compute the keys and values of the images for cross-attention. embeddings: [batch, image tokens, dim]."""
        out = self.image[: len(embeddings)].flatten(2).flatten(0, 1)
        torch.addmm(self.cross_bias, embeddings.flatten(0, 1), self.cross_weight.T, out=out)

    def __call__(self, hidden: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """hidden: [batch, dim] of the token at `position` [1]. mask: bool [1, 1, 1, slots], true up to that position."""
        batch, dim = hidden.shape
        projected = F.linear(hidden, self.own_weight, self.own_bias).view(batch, 3, self.heads, 1, self.width)
        query, keys_values = projected[:, 0], projected[:, 1:].transpose(0, 1)
        cache, image = self.cache[:, :batch], self.image[:batch].permute(2, 0, 3, 1, 4)
        cache.index_copy_(3, position, keys_values)
        attended = F.scaled_dot_product_attention(query, cache[0], cache[1], attn_mask=mask)
        hidden = add_and_norm(self.attention.output, attended.reshape(batch, dim), hidden)
        query = self.cross.self.query(hidden).view(batch, self.heads, 1, self.width)
        attended = F.scaled_dot_product_attention(query, image[0], image[1])
        hidden = add_and_norm(self.cross.output, attended.reshape(batch, dim), hidden)
        return add_and_norm(self.contract, self.expand(hidden), hidden)


class Captioner:
    """Computes the token ids of captions from the vision tower's output."""

    def __init__(
        self,
        model: BlipForConditionalGeneration,
        *,
        prompt: Sequence[int],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        batch_size: int,
    ) -> None:
        """prompt: the ids that every caption begins with, the beginning-of-text id first."""
        config: BlipConfig = model.config
        text = config.text_config
        self.end, self.padding = text.sep_token_id, text.pad_token_id
        self.embeddings, self.head = model.text_decoder.bert.embeddings, model.text_decoder.cls
        self.min_new_tokens, self.max_new_tokens = min(min_new_tokens, max_new_tokens), max_new_tokens
        self.steps = len(prompt) + max_new_tokens - 1
        if self.steps > text.max_position_embeddings:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit into the caption model's "
                f"{text.max_position_embeddings} positions; lower max_new_tokens."
            )
        weight = self.embeddings.word_embeddings.weight
        image_tokens = model.vision_model.embeddings.num_positions
        slots = -(-self.steps // KEYS_ALIGNED_TO) * KEYS_ALIGNED_TO
        modules = model.text_decoder.bert.encoder.layer
        self.layers = [DecoderLayer(module, batch_size, slots, image_tokens) for module in modules]
        self.slots = torch.arange(slots, device=weight.device)
        self.prompt = torch.tensor(list(prompt), device=weight.device)
        self.position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.tokens = torch.zeros(batch_size, self.steps + 1, dtype=torch.long, device=weight.device)
        self.finished = torch.zeros(batch_size, dtype=torch.bool, device=weight.device)
        self.step = GraphedStep(self._step, self.position.zero_, batch_size, weight.device)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """embeddings: [images, image tokens, dim]. Returns padded ids [images, prompt + max_new_tokens] on the host."""
        images = len(embeddings)
        batch = self.step.size_for(images)
        self._begin(images, batch)
        for layer in self.layers:
            layer.cache_images(embeddings)
        for taken in range(1, self.steps + 1):
            self.step(batch)
            if self._all_ended(batch, taken):
                break
        return self.tokens[:images].cpu()

    def _begin(self, images: int, batch: int) -> None:
        """Reset the buffers. Rows from `images` to `batch` only
        fill up a batch: they count as finished from the start."""
        self.position.zero_()
        self.tokens[:batch].fill_(self.padding)
        self.tokens[:batch, : len(self.prompt)] = self.prompt
        self.finished[:images].fill_(False)
        self.finished[images:batch].fill_(True)

    def _all_ended(self, batch: int, taken: int) -> bool:
        if self.min_new_tokens == self.max_new_tokens:
            return False
        every = STEPS_BETWEEN_CHECKS if self.position.is_cuda else 1
        return taken % every == 0 and bool(self.finished[:batch].all())

    def _step(self, batch: int) -> None:
        """Read the token at the position, choose the next one, and move on. Nothing is copied to the host."""
        following = self.position + 1
        chosen = self._score(batch).argmax(dim=-1)
        chosen = torch.where(self.finished[:batch], self.padding, chosen)
        prompting = following < len(self.prompt)
        chosen = torch.where(prompting, self.tokens[:batch].index_select(1, following).squeeze(1), chosen)
        self.tokens[:batch].index_copy_(1, following, chosen[:, None])
        self.finished[:batch] |= (chosen == self.end) & ~prompting
        self.position.copy_(following)

    def _score(self, batch: int) -> Tensor:
        """Logits [batch, vocabulary] in float32. The end token is excluded while a caption is too short."""
        words = self.embeddings.word_embeddings(self.tokens[:batch].index_select(1, self.position).squeeze(1))
        hidden = self.embeddings.LayerNorm(words + self.embeddings.position_embeddings(self.position))
        mask = (self.slots <= self.position)[None, None, None]
        for layer in self.layers:
            hidden = layer(hidden, self.position, mask)
        logits: Tensor = self.head(hidden).float()
        too_short = self.position + 1 < len(self.prompt) + self.min_new_tokens
        logits[:, self.end].masked_fill_(too_short, float("-inf"))
        return logits


class GraphedStep:
    """A step as a CUDA graph for each power of two up to the batch size; on the CPU the plain function."""

    def __init__(
        self, step: Callable[[int], None], rewind: Callable[[], object], most: int, device: torch.device
    ) -> None:
        """rewind: resets the position before each of the trial runs that a recording needs.
        most: the largest batch."""
        self.step, self.rewind, self.most, self.device = step, rewind, most, device
        self.recorded: dict[int, Callable[[], None]] = {}

    def size_for(self, images: int) -> int:
        """The batch size to which `images` are filled up."""
        return min((size for size in self.recorded if size >= images), default=images)

    def __call__(self, batch: int) -> None:
        if batch in self.recorded:
            self.recorded[batch]()
        else:
            self.step(batch)

    def capture(self) -> None:
        """Record the graphs, the largest first, so that the others fit into its memory. Does nothing on a CPU.

        Call it before other threads use the device: their work could become a part of a recording.
        """
        if self.device.type != "cuda":
            return
        recorder = CudaRecorder(self.device)
        for size in reversed(plan_sizes(self.most)):
            self.recorded[size] = recorder.record(partial(self.step, size), self.rewind)


def add_and_norm(output: Any, update: Tensor, hidden: Tensor) -> Tensor:
    """transformers' BlipTextSelfOutput and BlipTextOutput."""
    return add_norm(hidden, output.dense(update), output.LayerNorm)[1]


def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor]:
    """The weight and bias of one linear layer that computes several layers of the same input."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears]
    return torch.cat(weights), torch.cat(biases)
