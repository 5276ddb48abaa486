"""Steps of transformers' `generate` as CUDA graphs.

Python needs about ten times as long as a GPU for one more token of each text in a batch. transformers has all that a
recorded step needs: keys and values in buffers of a fixed size (StaticCache), the position as a number on the device,
and masks that are made before the call. It would give such a step to torch.compile; here it is recorded as it is, which
takes a second instead of minutes, and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Blip2ForConditionalGeneration, StaticCache

LENGTHS = 128  # the length of a cache is a multiple of it, so that prompts of similar lengths share one


class Decoder:
    """The cache for batches of one size, and the steps on it, which transformers' `generate` uses if it gets that cache."""

    def __init__(self, model: Any, new_tokens: int) -> None:
        """model: one that is_steady. new_tokens: the most that a text may have."""
        self.model, self.new_tokens = model, new_tokens
        self.cache: Any = None
        self.length = 0
        # BLIP-2 lets its language model generate; all others do it themselves.
        writer = model.language_model if isinstance(model, Blip2ForConditionalGeneration) else model
        self.step = GraphedCall(writer)
        writer.get_compiled_call = lambda _: self.step

    def clear_cache(self, prompt: int) -> Any:
        """The cache for texts after a prompt of so many tokens; a longer one than before if need be."""
        if (needed := prompt + self.new_tokens) > self.length:
            self.length = -(-needed // LENGTHS) * LENGTHS
            self.cache = None  # so that there is memory for the new one
            self.step.forget()
            self.cache = make_cache(self.model, self.length)
        self.cache.reset()
        return self.cache


class GraphedCall:
    """Calls of a model on one cache for one token of each text: a CUDA graph for each shape of the inputs. On the CPU
    plain calls on the same buffers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: dict[Any, tuple[dict[str, Tensor], Callable[[], Any]]] = {}

    def __call__(self, **inputs: Any) -> Any:
        """inputs: of the model's forward. The outputs are valid until the next call."""
        given = flatten(inputs)
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in given.items())
        if key not in self.calls:
            self.calls[key] = self._record(inputs)
        buffers, call = self.calls[key]
        for name, tensor in given.items():
            buffers[name].copy_(tensor)
        return call()

    def forget(self) -> None:
        """Call it when the cache is replaced: graphs have its addresses."""
        self.calls.clear()

    def _record(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Callable[[], Any]]:
        """The buffers of the inputs, and the call on them."""
        held = {name: clone_tensors(value) for name, value in inputs.items()}
        if self.model.device.type != "cuda":
            return flatten(held), lambda: self.model(**held)
        self._try_out(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self.model(**held)

        def replay() -> Any:
            graph.replay()
            return outputs

        return flatten(held), replay

    def _try_out(self, inputs: Mapping[str, Any]) -> None:
        """Run outside a graph first: libraries initialize themselves on first use, which cannot be recorded."""
        device = self.model.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.model(**inputs)
            for layer in inputs["past_key_values"].layers:
                layer.cumulative_length.sub_(1)  # what was written there is written again
        torch.cuda.current_stream(device).wait_stream(stream)


def is_steady(model: Any) -> bool:
    """Whether each step of a model runs the same kernels on the same buffers: not if it lies on several devices, has the
    output of an encoder beside its cache, or keeps only the newest tokens."""
    several = len({*getattr(model, "hf_device_map", {}).values()}) > 1
    if several or model.config.is_encoder_decoder:
        return False
    return not any(layer.is_sliding for layer in make_cache(model, 1).layers)


def make_cache(model: Any, length: int) -> Any:
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)


def clone_tensors(value: Any) -> Any:
    """A tensor, or a dictionary of them (masks by type of layer), in memory of its own; anything else as it is."""
    if isinstance(value, dict):
        return {name: clone_tensors(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def flatten(inputs: Mapping[str, Any], before: str = "") -> dict[str, Tensor]:
    """All tensors, also of dictionaries among the inputs, by their path."""
    found: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{before}{name}.")
        elif isinstance(value, Tensor):
            found[before + name] = value
    return found
