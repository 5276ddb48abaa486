"""One batch through the stages of a segment: open, decode, then stage after stage, in straight-line code.

An image that cannot be done does not fail the others of its batch: the batch is halved until
the faulty image is alone. After the device's memory was too small, batches are smaller.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from daemon.core.messages import (
    Batch,
    Item,
    Loaded,
    Outcome,
    Output,
    Reply,
    Setup,
    StageRun,
)
from daemon.workers.known_images import draw_page
from stages.contract.base import (
    SIZE_STEP,
    DeviceLost,
    Header,
    Image,
    ImageError,
    OutOfMemory,
    Reason,
    Result,
    Stage,
    StageSpec,
)
from stages.contract.binning import is_decided
from stages.contract.processes import importing
from stages.images.images import decode, inspect
from stages.registry import registry

DECODING = "decoding"
REGROW_CALLS = 100  # that fitted, before a larger one is tried

Input = TypeVar("Input")
Answers = Sequence[Any]  # one for each input: a value or an ImageError


@dataclass(slots=True)
class InFlight:
    """One image of a batch on its way through the chain."""

    header: Header | None = None
    image: Image | None = None
    error: ImageError | None = None
    is_known: bool = False  # a known image: all stages run
    payloads: dict[str, bytes] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        header = self.header
        form = (header.format, header.width, header.height) if header else ("", 0, 0)
        pages = header.pages if header else 1
        if self.error is None:
            return Outcome(*form, self.outputs, pages=pages)
        return Outcome(*form, self.outputs, self.error.reason, self.error.detail, self.error.transient, pages)


@dataclass(slots=True)
class BatchCost:
    """What one batch cost, for the metrics."""

    runs: list[StageRun] = field(default_factory=list)
    out_of_memory: int = 0  # times that something did not fit into the device's memory


class Allowance:
    """How many items one call may have. Unlimited until the memory runs out, then half of what was too much,
    and doubled after every REGROW_CALLS calls that fitted, because another user of the device may have left.
    """

    def __init__(self) -> None:
        self.most = sys.maxsize
        self._fitted = 0

    def shrink(self, count: int) -> None:
        # Another thread may have set it lower.
        self.most, self._fitted = min(self.most, max(1, count // 2)), 0

    def note_fit(self, count: int) -> None:
        if count == self.most:
            self._fitted += 1
        if self._fitted >= REGROW_CALLS:
            self.most, self._fitted = 2 * self.most, 0


class Chain:
    """The stages of one segment, from bytes to results."""

    def __init__(self, setup: Setup, slab: memoryview) -> None:
        self.setup = setup
        self._slab = slab
        self.stages: list[Stage] = []
        self._decode: Callable[[Sequence[InFlight]], Answers] | None = None
        self._allowances: defaultdict[str, Allowance] = defaultdict(Allowance)
        # By stage: the last answer, and how many images in a row had the very same one. Threads may miscount a little.
        self._last: dict[str, bytes] = {}
        self.repeats: dict[str, int] = {}

    def load(self, report: Callable[[Loaded], None] = lambda _: None) -> dict[str, float]:
        """Build and load every stage, and report each; returns the seconds of each."""
        seconds = {}
        with importing():  # all libraries, because loading may wait for kernels
            for spec in self.setup.stages:
                started = time.perf_counter()
                self.stages.append(registry.build(spec, self.setup.device))
                seconds[spec.name] = time.perf_counter() - started
            if any(stage.reads_pixels for stage in self.stages):
                self._decode = _decoding(self.setup)
                if self.setup.rehearse and self.setup.device.startswith("cuda"):
                    self._open_jpeg_decoder()
        for stage in self.stages:
            started = time.perf_counter()
            stage.load()
            seconds[stage.name] += time.perf_counter() - started
            report(Loaded(stage.name, seconds[stage.name]))
        self._uses = {name for stage in self.stages for name in registry.find_stage(stage.name).uses}
        return seconds

    def _open_jpeg_decoder(self) -> None:
        """Open the GPU's decoder while the models load: the driver does that for one process after another, even on
        different GPUs. Errors are ignored, because the canary decodes the same page again."""
        from stages.images.devices import run_in_background
        from stages.images.images import find_jpeg_decoder, open_jpeg_decoder

        find_jpeg_decoder()  # imports torchvision, as some models do: two threads must not do so at once
        run_in_background(partial(open_jpeg_decoder, draw_page(self.setup.limits), self.setup.device))

    def run(self, batch: Batch, slab: memoryview | None = None, *, whole: bool = False) -> Reply:
        """Take every image through every stage that it still needs. slab: in place of that of the user's images. whole: these
        are known images: every stage runs, also in mode cascade. Raises DeviceLost when this process can do no more work."""
        entries = [self._open(item, slab or self._slab) for item in batch.items]
        for entry in entries:
            entry.is_known = whole
        tally = BatchCost()
        for group in _groups(entries, self._allowances[DECODING].most, self.setup):
            self._run_group(group, tally)
        return Reply(batch.id, [entry.outcome() for entry in entries], tally.runs, tally.out_of_memory)

    def _run_group(self, group: list[InFlight], tally: BatchCost) -> None:
        """If there is no memory for the pixels of all, one half is finished before the other one is decoded."""
        if self._decode and not self._give_pixels(
            self._decode, [entry for entry in group if self._remaining(entry)], tally
        ):
            release()
            half = len(group) // 2
            self._run_group(group[:half], tally)
            self._run_group(group[half:], tally)
            return
        for stage in self.stages:
            self._apply(stage, [entry for entry in group if stage in self._remaining(entry)], tally)
        for entry in group:
            entry.image = None  # the next group needs the memory

    def _open(self, item: Item, slab: memoryview) -> InFlight:
        """Read the header, and take over results of earlier segments."""
        entry = InFlight(payloads=dict(item.known))
        data = slab[item.offset : item.offset + item.length]
        try:
            header = entry.header = inspect(data, self.setup.limits)
        except ImageError as error:
            entry.error = error
            return entry
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here concerns this image only
            traceback.print_exc()
            entry.error = ImageError(Reason.HEADER, repr(error))
            return entry
        known = {}
        for name in self._uses & item.known.keys():
            with suppress(msgspec.DecodeError):
                # A result that a version with another result type stored is treated as missing.
                known[name] = registry.decode(name, item.known[name])
        entry.image = Image(data, header.width, header.height, results=known)
        return entry

    def _remaining(self, entry: InFlight) -> list[Stage]:
        """The stages that this image still needs; none when it has failed or, in mode cascade, when its bin is decided."""
        if entry.error or entry.image is None:
            return []
        cascade = self.setup.cascade
        if cascade and not entry.is_known and is_decided(entry.payloads, cascade, self.setup.pipeline):
            return []
        return [stage for stage in self.stages if stage.name not in entry.payloads]

    def _give_pixels(
        self, decode: Callable[[Sequence[InFlight]], Answers], entries: list[InFlight], tally: BatchCost
    ) -> bool:
        """Decode the images. Returns whether there was memory for all of them at once."""
        if not entries:
            return True
        try:
            answers = self._try(DECODING, decode, entries, tally)
        except OutOfMemory:
            return False
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, ImageError):
                entry.error = answer
            elif entry.image:
                entry.image.pixels = answer
        return True

    def _apply(self, stage: Stage, entries: list[InFlight], tally: BatchCost) -> None:
        if not entries:
            return
        started = time.perf_counter()
        answers = self._ask(stage.name, stage.run, [entry.image for entry in entries if entry.image], tally)
        seconds = time.perf_counter() - started
        tally.runs.append(StageRun(stage.name, len(entries), seconds))
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, ImageError):
                entry.error = answer
            elif entry.image:
                self._take(stage, entry, entry.image, answer, seconds / len(entries))

    def _take(self, stage: Stage, entry: InFlight, image: Image, answer: Result, seconds: float) -> None:
        """Keep an answer if it can be read back after it was stored; JSON has no NaN."""
        try:
            payload = msgspec.json.encode(answer)
            registry.decode(stage.name, payload)
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            what = f"{stage.name} returned a result that cannot be stored: {error}"
            if isinstance(error, msgspec.DecodeError) and has_nan(msgspec.to_builtins(answer)):
                what += f". {explain_nan(stage.spec)}"
            entry.error = ImageError(Reason.STAGE, what)
            return
        image.results[stage.name] = answer
        entry.payloads[stage.name] = payload
        entry.outputs[stage.name] = Output(payload, seconds)
        if not entry.is_known:
            repeats = self.repeats.get(stage.name, 0) if self._last.get(stage.name) == payload else 0
            self.repeats[stage.name], self._last[stage.name] = repeats + 1, payload

    def _ask(
        self, what: str, run: Callable[[Sequence[Input]], Answers], items: Sequence[Input], tally: BatchCost
    ) -> list[Any]:
        """Call `run` with no more items at once than fitted into the device's memory before."""
        answers: list[Any] = []
        while items:
            part = items[: self._allowances[what].most]
            try:
                answers += self._try(what, run, part, tally)
                items = items[len(part) :]
                continue
            except OutOfMemory:
                pass
            release()  # and now with half of it
        return answers

    def _try(
        self, what: str, run: Callable[[Sequence[Input]], Answers], items: Sequence[Input], tally: BatchCost
    ) -> list[Any]:
        """Call `run`. An error halves the batch, down to the image that causes it.

        Raises OutOfMemory after lowering the allowance; for a single image the answer is an ImageError instead.
        """
        try:
            answers = list(run(items))
            if len(answers) != len(items):
                raise ValueError(f"{len(answers)} answers for {len(items)} images")
            self._allowances[what].note_fit(len(items))
            return answers
        except DeviceLost:
            raise
        except OutOfMemory as error:
            tally.out_of_memory += 1
            self._allowances[what].shrink(len(items))
            if len(items) > 1:
                raise
            return [ImageError(Reason.MEMORY, f"{what}: {error}", transient=True)]
        except Exception as error:  # noqa: BLE001 - an error of a model concerns this batch only
            if len(items) == 1:
                traceback.print_exc()
                return [ImageError(Reason.STAGE, f"{what}: {type(error).__name__}: {error}", transient=True)]
            self._note_failed_batch(error)
        half = len(items) // 2
        return self._try(what, run, items[:half], tally) + self._try(what, run, items[half:], tally)

    def _note_failed_batch(self, error: Exception) -> None:
        """Several images raise an error together; each half is tried next."""


def release() -> None:
    """Free what a failed call had on the device. Its error may be part of a cycle with the frames of the call (it is,
    once it has passed through a context manager of Python 3.12), and then their tensors live until the next
    collection: each half would meet a full device, down to the single images."""
    gc.collect()


def has_nan(answer: object) -> bool:
    """Whether an answer, as builtin types, has a float that is NaN or infinite, which JSON writes as null."""
    if isinstance(answer, float):
        return not math.isfinite(answer)
    parts = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, list) else ()
    return any(map(has_nan, parts))


def explain_nan(spec: StageSpec) -> str:
    what = "A value is NaN or infinite: the model's weights are damaged"
    if spec.dtype == "float32":
        return f"{what}. Copy them again, or take another model"
    fix = f'Set dtype = "float32" under [stages.{spec.name}], or take another model'
    return f"{what}, or too large for {spec.dtype}. {fix}"


def _decoding(setup: Setup) -> Callable[[Sequence[InFlight]], Answers]:
    """A function that decodes entries to pixels on the worker's device, or to errors."""
    from stages.images.decoder import Decoders

    decoders = Decoders(setup.decoders, setup.limits)

    def decode_entries(entries: Sequence[InFlight]) -> Answers:
        wanted = [(entry.image.data, entry.header) for entry in entries if entry.image and entry.header]
        return decode(wanted, setup.device, decoders)

    return decode_entries


def _groups(entries: list[InFlight], most: int, setup: Setup) -> Iterator[list[InFlight]]:
    """Split the batch into groups with a limited number of pixels and of images, so that one huge image does not fail with
    the others or take their memory. A batch that is split has no groups that a GPU would have to fill up."""
    while entries:
        count = min(_count_fitting(entries, setup), most)
        if SIZE_STEP < count < len(entries):
            count -= count % SIZE_STEP
        yield entries[:count]
        entries = entries[count:]


def _count_fitting(entries: Sequence[InFlight], setup: Setup) -> int:
    """How many of the first entries may be decoded at once, at least one. What a GPU does not decode is in the host's memory
    first, which has a limit of its own."""
    pixels = on_host = 0
    for count, entry in enumerate(entries):
        area = entry.header.width * entry.header.height if entry.header else 0
        pixels += area
        on_host += area if entry.header and entry.header.format != "JPEG" else 0
        if count and (pixels > setup.group_pixels or on_host > setup.host_group_pixels):
            return count
    return len(entries)
