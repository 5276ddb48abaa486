"""Recorded steps of transformers' `generate`.

A step adds one token to each text of a batch. Python needs several times as long to start its kernels as a GPU
needs to run them. So each step is recorded when the model is loaded, and replayed for each token. `generate` stays as it
is: it reads the prompts, makes the masks, chooses the tokens, and calls `RecordedSteps.step` instead of a compiled model.

A recording repeats the same kernels on the same memory (keyvalues.py), so there is one for each shape of a batch:

- Numbers of texts are powers of two, and the largest batch. Another batch uses the next larger recording. The rows after
  its texts cost a little in each step, but no prompt is read for them. Two recordings one after the other (64 and 32
  texts for 96) would read all weights of the model twice for each token.
- Lengths double. Attention reads a cache up to its length, so a batch begins with a short one, which becomes longer with
  the texts. Nothing is copied for that.

A prompt that is too long for the memory gets transformers' own growing cache, and no recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Blip2ForConditionalGeneration, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from stages.contract.base import OutOfMemory
from stages.pretrained.keyvalues import (
    CacheMemory,
    CacheShape,
    align,
    bytes_per_token,
    plan_lengths,
    plan_sizes,
)
from stages.pretrained.recording import Recorder

DRY_RUN_TOKENS = 2  # the first is from the prompt, the second from a step
DYNAMIC_ROPES = {"dynamic", "longrope"}  # kinds of rotary embeddings
CACHE = "past_key_values"  # as transformers names it among a model's inputs


@dataclass(frozen=True)
class Recording:
    """A recorded step. inputs: buffers by path. constants: what else the model got, which the recording cannot change.
    replay: reads the buffers, and writes the logits of RecordedSteps."""

    inputs: dict[str, Tensor]
    constants: dict[str, Any]
    replay: Callable[[], None]

    def __call__(self, inputs: Mapping[str, Any], texts: int) -> None:
        """inputs: of `texts` texts, which may be fewer than recorded: the rows after them keep older values, and no
        text reads another."""
        for path, tensor in divide(inputs)[0].items():
            self.inputs[path].narrow(find_texts(path, tensor), 0, texts).copy_(tensor)
        self.replay()

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the inputs are those of the recording, except for their values and the number of texts."""
        tensors, constants = divide(inputs)
        if constants != self.constants or tensors.keys() != self.inputs.keys():
            return False
        pairs = [(find_texts(path, tensor), tensor, self.inputs[path]) for path, tensor in tensors.items()]
        return all(
            tensor.dtype == buffer.dtype and tensor.shape == buffer.narrow(dim, 0, tensor.shape[dim]).shape
            for dim, tensor, buffer in pairs
        )


class RecordedSteps:
    """Generates the texts of a model with recorded steps, one batch at a time."""

    def __init__(self, model: Any, most_texts: int) -> None:
        """model: one that is_steady. most_texts: of a batch."""
        # Whose `generate` is used: BLIP-2 lets its language model do it, all others do it themselves.
        self.language_model = (
            model.language_model if isinstance(model, Blip2ForConditionalGeneration) else model
        )
        self.config = model.config.get_text_config(decoder=True)
        self.sizes = plan_sizes(most_texts)
        self.lengths: list[int] = []
        self.recordings: dict[CacheShape, Recording] = {}
        self.memory: CacheMemory | None = None
        self.logits: Any = None  # [most texts, 1, words], where all recordings write them
        self.recorder: Recorder | None = None  # only while steps are recorded
        # Of the batch in work: its cache, the shape of that cache, and how many tokens of each text are in it.
        self.cache: StaticCache | None = None
        self.shape, self.cached_tokens = CacheShape(0, 0), 0
        self.language_model.get_compiled_call = lambda _: self.step

    def record(
        self,
        recorder: Recorder,
        generate: Callable[[StaticCache], object],
        prompt: int,
        longest: int,
        budget: int,
    ) -> None:
        """Make the memory and record all steps. If it fails, call `release`.

        generate: generates DRY_RUN_TOKENS tokens about one small image, with the cache that it gets.
        prompt: tokens of that image's prompt. longest: tokens of the longest text that is to have recorded steps.
        budget: most bytes of the memory.
        Raises OutOfMemory if the budget is too small, RuntimeError if `generate` does not call `step`, and the
        errors of torch.
        """
        least = align(prompt + DRY_RUN_TOKENS)
        generate(used := StaticCache(config=self.config, max_cache_len=least))
        needed = self.sizes[-1] * bytes_per_token(used)
        self.lengths = plan_lengths(least, longest, budget // needed)
        if not self.lengths:
            raise OutOfMemory(
                f"a cache for {self.sizes[-1]} texts of {least} tokens needs {needed * least >> 20:,} MiB, and "
                f"{budget >> 20:,} MiB may be used for it"
            )
        self.memory = CacheMemory(used, self.config, CacheShape(self.sizes[-1], self.lengths[-1]))
        self.recorder = recorder
        for length in reversed(self.lengths):  # the temporary memory of the longest is enough for all others
            self.memory.clear(self.sizes[-1])
            generate(self._start(self.memory, CacheShape(1, length), prompt))
        self.recorder = None
        if len(self.recordings) != len(self.sizes) * len(self.lengths):
            raise RuntimeError(
                "transformers compiles no steps of this model: disable_compile is set in its generation_config.json, "
                "or its quantized weights do not allow it"
            )

    def release(self) -> None:
        """Give all memory back. From now on the model generates as before."""
        vars(self.language_model).pop("get_compiled_call", None)
        self.lengths, self.recordings = [], {}
        self.memory = self.logits = self.cache = self.recorder = None

    def begin(self, texts: int, prompt: int, new_tokens: int) -> StaticCache | None:
        """An empty cache for a batch, to be given to `generate`; None if the texts may become too long for the memory.
        prompt: tokens of each text before the first new one."""
        size = self._find_size(texts)
        if self.memory is None or not size or prompt + new_tokens > self.lengths[-1]:
            return None
        self.memory.clear(size)
        length = next(length for length in self.lengths if length > prompt)
        return self._start(self.memory, CacheShape(texts, length), prompt)

    def step(self, **inputs: Any) -> Any:
        """What `generate` calls for each token but the first, instead of the model. The logits are valid until the
        next call."""
        if self.memory is None or self.cache is None or inputs.get(CACHE) is not self.cache:
            return self.language_model(**inputs)
        if self.recorder:
            self._record_sizes(self.memory, inputs, self.recorder)
        recording = self.recordings.get(CacheShape(self._find_size(self.shape.texts), self.shape.length))
        if recording and recording.fits(inputs):
            recording(inputs, self.shape.texts)
            outputs = CausalLMOutputWithPast(
                logits=self.logits[: self.shape.texts], past_key_values=self.cache
            )
        else:
            outputs = self.language_model(**inputs)
        self.cached_tokens += 1
        if self.cached_tokens == self.shape.length != self.lengths[-1]:
            self.shape = CacheShape(
                self.shape.texts, self.lengths[self.lengths.index(self.cached_tokens) + 1]
            )
            self.memory.resize(self.cache, self.shape)
        return outputs

    def _start(self, memory: CacheMemory, shape: CacheShape, prompt: int) -> StaticCache:
        self.cache, self.shape, self.cached_tokens = memory.make_cache(shape), shape, prompt
        return self.cache

    def _find_size(self, texts: int) -> int:
        """The number of texts of the recording that a batch uses; 0 if it is too large."""
        return next((size for size in self.sizes if size >= texts), 0)

    def _record_sizes(self, memory: CacheMemory, inputs: Mapping[str, Any], recorder: Recorder) -> None:
        """Record the step of each number of texts at the length of the cache in work. inputs: of one text."""
        rewind = partial(memory.fill, self.cached_tokens)
        if self.logits is None:
            logits = self.language_model(**inputs).logits[:, -1:]
            self.logits = logits.new_zeros(self.sizes[-1], *logits.shape[1:])
        for size in reversed(self.sizes):
            shape = CacheShape(size, self.shape.length)
            held = {**repeat(inputs, size), CACHE: memory.make_cache(shape)}
            replay = recorder.record(partial(self._write_logits, held, size), rewind)
            self.recordings[shape] = Recording(*divide(held), replay)

    def _write_logits(self, inputs: Mapping[str, Any], texts: int) -> None:
        self.logits[:texts].copy_(self.language_model(**inputs).logits[:, -1:])


def is_steady(model: Any) -> bool:
    """Whether each step of a model runs the same kernels on the same memory. Not if the model lies on several devices,
    has the output of an encoder beside its cache, uses a sliding window, or recomputes its rotary frequencies for
    longer texts, which copies the length to the host."""
    several = len({*getattr(model, "hf_device_map", {}).values()}) > 1
    if several or model.config.is_encoder_decoder:
        return False
    if any(is_dynamic(getattr(module, "rope_type", "")) for module in model.modules()):
        return False
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1)
    return all(type(layer) is StaticLayer for layer in cache.layers)


def is_dynamic(rope_type: Any) -> bool:
    """rope_type: a name, or names by type of layer."""
    names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(name in DYNAMIC_ROPES for name in names)


def divide(inputs: Mapping[str, Any], before: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors among a model's inputs and all else but the cache, by path: masks may be a dictionary by type of layer."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            inner = divide(value, f"{before}{name}.")
            tensors |= inner[0]
            constants |= inner[1]
        elif isinstance(value, Tensor):
            tensors[before + name] = value
        elif name != CACHE:
            constants[before + name] = value
    return tensors, constants


def repeat(inputs: Mapping[str, Any], texts: int, before: str = "") -> dict[str, Any]:
    """The inputs of one text as those of several, in memory of their own."""

    def repeat_one(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return repeat(value, texts, f"{before}{name}.")
        if isinstance(value, Tensor):
            return value.repeat_interleave(texts, find_texts(before + name, value))
        return value

    return {name: repeat_one(name, value) for name, value in inputs.items()}


def find_texts(path: str, tensor: Tensor) -> int:
    """The dimension of a model's input that counts texts."""
    return 1 if path == "position_ids" and tensor.ndim == 3 else 0  # [axes of an image, texts, tokens]
