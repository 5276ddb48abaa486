"""The memory for the keys and values of a batch: one for all batches of a model, whatever their shape.

transformers' StaticCache has the addresses that a recorded step needs, but it is made for one number of texts and one
length. Here the layers of such caches are views of one memory: the first texts, and the first tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, NamedTuple

from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

# So that prompts of similar lengths share a recording, and attention kernels run fast.
LENGTHS_ALIGNED_TO = 128


class CacheShape(NamedTuple):
    """Of a cache: the number of texts, and the tokens that each may have with its prompt."""

    texts: int
    length: int


@dataclass(frozen=True)
class LayerMemory:
    """keys, values: [texts, heads, length, head size]. cached_tokens: int64 [], the number of tokens of each text
    that are there."""

    keys: Tensor
    values: Tensor
    cached_tokens: Tensor


class PromptedLayer(StaticLayer):  # type: ignore[misc]
    """A layer whose prompt is written at once, as its first tokens: in half the time of writing each to its place."""

    has_prompt = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        tokens = key_states.shape[-2]
        if self.has_prompt or tokens == 1:
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *arguments, **options)
            return both
        self.has_prompt = True
        self.keys[:, :, :tokens], self.values[:, :, :tokens] = key_states, value_states
        self.cumulative_length.add_(tokens)
        return self.keys, self.values


class CacheMemory:
    """Caches of any smaller shape are views of it, so only one of them is in use at a time."""

    def __init__(self, used: StaticCache, config: Any, shape: CacheShape) -> None:
        """used: a cache that the model has written to; it shows the shape of each layer. config: of the language
        model. Raises torch.OutOfMemoryError."""
        self.config = config
        self.layers = [
            LayerMemory(
                allocate(layer.keys, shape),
                allocate(layer.values, shape),
                layer.cumulative_length.new_zeros(()),
            )
            for layer in used.layers
        ]

    @property
    def parts(self) -> list[Tensor]:
        """The keys and the values of all layers."""
        return [part for layer in self.layers for part in (layer.keys, layer.values)]

    def make_cache(self, shape: CacheShape) -> StaticCache:
        cache = StaticCache(config=self.config, max_cache_len=shape.length)
        cache.layers = [PromptedLayer(layer.max_cache_len) for layer in cache.layers]
        self.resize(cache, shape)
        return cache

    def resize(self, cache: StaticCache, shape: CacheShape) -> None:
        """Change the shape of a cache. What was written at the beginning of this memory stays there."""
        for layer, memory in zip(cache.layers, self.layers, strict=True):
            layer.keys = memory.keys[: shape.texts, :, : shape.length]
            layer.values = memory.values[: shape.texts, :, : shape.length]
            layer.cumulative_length = memory.cached_tokens
            layer.max_cache_len = shape.length
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized = True

    def clear(self, texts: int) -> None:
        """Remove the texts of the batch before. An infinite value among their keys or values would otherwise turn
        every later text into NaN, although the mask excludes it."""
        for part in self.parts:
            part[:texts].zero_()
        self.fill(0)

    def fill(self, tokens: int) -> None:
        """Set how many tokens of each text are there."""
        for memory in self.layers:
            memory.cached_tokens.fill_(tokens)


def allocate(part: Tensor, shape: CacheShape) -> Tensor:
    """part: keys or values of a layer, [any, heads, any, head size]."""
    return part.new_zeros(shape.texts, part.shape[1], shape.length, part.shape[3])


def bytes_per_token(used: StaticCache) -> int:
    """Bytes of one token of one text, in all layers of a cache that the model has written to."""
    parts = [part for layer in used.layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


def plan_sizes(most_texts: int) -> list[int]:
    """Numbers of texts: the powers of two below the largest batch, and the largest batch; ascending."""
    return sorted({most_texts} | {1 << power for power in range(most_texts.bit_length())})


def plan_lengths(least: int, longest: int, most: int) -> list[int]:
    """Lengths of caches in tokens, ascending from `least`: each is twice the one before, and the last is for the longest
    text, or shorter if there is memory only for `most` tokens. Empty if there is not even memory for `least`."""
    last = min(max(align(longest), least), most // LENGTHS_ALIGNED_TO * LENGTHS_ALIGNED_TO)
    if last < least:
        return []
    doubled = takewhile(lambda length: length < last, (least << power for power in count()))
    return [*doubled, last]


def align(tokens: int) -> int:
    return -(-tokens // LENGTHS_ALIGNED_TO) * LENGTHS_ALIGNED_TO
