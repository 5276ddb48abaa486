"""The canary: a worker runs known images through its whole chain, from their bytes on, and looks at the answers.

A broken GPU, driver or library may give wrong answers without an error. So this happens in each thread before its first
image, if the setup says so, and again and again between two batches, or once an hour in a worker that rests. It costs at most a
thousandth of the work, or what one look an hour costs if that is more, and a hundredth while answers raise doubts (`is_due`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from daemon.core.messages import Batch, Item, Outcome, Reply, Setup
from daemon.workers.chain import Chain
from daemon.workers.judging import find_faults
from daemon.workers.known_images import VERSION, draw_known
from daemon.workers.stream import AnswerStream
from stages.contract.base import Reason
from stages.contract.files import read_file
from stages.registry import registry

PAUSE_SECONDS = 50.0  # at least, between two looks: so a fault is noticed within a minute
HOUR_SECONDS = 3600.0  # at most, between two looks
SHARE = 1000  # images of work for each known image
REST = 100  # seconds without work for each second that a look takes
EARLY_SECONDS = 300.0  # at least, between two looks that answers to the user's images make necessary
READ_SECONDS = 0.25  # at least, between two batches whose answers are read for doubts
MOST_READ = 8  # of a batch: with READ_SECONDS at most a thousandth of the time


class FirstAnswers(msgspec.Struct, frozen=True):
    """The first answers of these models to the known images that were not wrong in themselves: JSON by stage."""

    worker: str  # that gave them
    answers: list[dict[str, msgspec.Raw]]
    made_at: float  # Unix seconds


class Canary:
    """The known images of one worker. Its threads share it."""

    def __init__(self, chain: Chain, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._chain, self._clock = chain, clock
        self._lock = threading.Lock()
        self._reference: list[dict[str, bytes]] = []
        self._began_at = clock()  # the last look
        self._seconds = 0.0  # that a look takes; the first one costs too little to be put off
        self._images = 0  # since the last look
        self._rested = 0.0  # seconds since then that threads had no work; of each thread
        self._early_at = -math.inf  # the last look that a doubt made necessary
        self._read_at = -math.inf  # the last batch whose answers were read
        self._looked = False  # once before
        specs = chain.setup.stages
        self._streams = {spec.name: AnswerStream(registry.find_stage(spec.name).result) for spec in specs}

    def note(self, reply: Reply) -> None:
        """Answers to images of the user: some of them are read."""
        with self._lock:
            if self._clock() < self._read_at + READ_SECONDS:
                return
            self._read_at = self._clock()
            step = math.ceil(len(reply.outcomes) / MOST_READ)
            outputs = [outcome.outputs for outcome in reply.outcomes[::step]]
            for stage, stream in self._streams.items():
                stream.note([output[stage].payload for output in outputs if stage in output])

    def suspicious(self) -> list[str]:
        """The stages whose answers raise a doubt that no look has settled, or are the same for all images."""
        return [name for name, each in self._streams.items() if each.is_doubtful or each.is_collapsed]

    def is_due(self, images: int, rested: float = 0.0) -> bool:
        """Whether the caller is to look now. images: of its last batch; rested: seconds that it waited for that batch.

        The pictures are no larger than usual images, so after a thousand images for each of them a look costs at most a
        thousandth of the work. The same after a thousand times what the last look took: a worker with few images looks too;
        and sooner if it has rested for a hundred times as long, as the rate then loses nothing. After an hour it is due
        whatever it costs. If answers to the user's images have become others (stream.py), it is due after the pause, but not
        again within some minutes, and not for more than a hundredth of the time.
        """
        with self._lock:
            self._images += images
            self._rested += rested
            now = self._clock()
            passed = now - self._began_at
            if passed < PAUSE_SECONDS:
                return False
            unused = passed >= SHARE * self._seconds or self._rested >= REST * self._seconds
            paid = unused or self._images >= SHARE * len(draw_known(self._chain.setup.limits))
            early = not paid and now >= self._early_from()
            if not (paid or early or passed >= HOUR_SECONDS):
                return False
            self._early_at = now if early else self._early_at
            self._began_at, self._images, self._rested = now, 0, 0.0
            self._seconds = math.inf  # not known until it has ended
            return True

    def wait_seconds(self) -> float:
        """How long a thread without images may wait until it asks whether a look is due. A worker that rests has its first look
        after the pause, and then one an hour, so that it seldom wakes a GPU that saves power."""
        with self._lock:
            longest = HOUR_SECONDS if self._seconds else PAUSE_SECONDS
            return max(0.0, min(self._began_at + longest, self._early_from()) - self._clock())

    def _early_from(self) -> float:
        """When a look is due because of a doubt."""
        is_looking = self._seconds == math.inf
        if is_looking or not any(stream.is_doubtful for stream in self._streams.values()):
            return math.inf
        pause = max(EARLY_SECONDS, REST * self._seconds)
        return max(self._began_at + PAUSE_SECONDS, self._early_at + pause)

    def look(self) -> dict[str, str]:
        """What is wrong with the answers now, by stage; empty if nothing is. What is wrong must be wrong twice in a row: a
        helper process may be killed by others, once. Raises DeviceLost."""
        return self._look() and self._look()

    def _look(self) -> dict[str, str]:
        began_at = self._clock()
        outcomes = self._run(draw_known(self._chain.setup.limits))
        with self._lock:
            self._seconds = self._clock() - began_at
        if any(outcome.reason == Reason.MEMORY for outcome in outcomes):
            return {}  # others use the device's memory: that says nothing about the answers
        specs = self._chain.setup.stages
        with self._lock:
            is_complete = all(len(outcome.outputs) == len(specs) for outcome in outcomes)
            # A stage may be unable to process a known image; or what hindered it passes, and its answers are known then.
            may_agree = not self._reference and (is_complete or self._looked)
            if may_agree and not find_faults(specs, outcomes, []):
                self._reference = self._agree(outcomes)
            self._looked = True
            wrong = find_faults(specs, outcomes, self._reference)
            for stream in self._streams.values() if not wrong else ():
                stream.settle()
            return wrong

    def _run(self, pictures: Sequence[bytes]) -> list[Outcome]:
        """Where images come alone, so do the known ones: what is prepared for a size of batch is then ready for the first
        image."""
        ends = itertools.accumulate(map(len, pictures))
        items = [Item(end - len(data), len(data), {}) for end, data in zip(ends, pictures, strict=True)]
        known = memoryview(b"".join(pictures))
        is_single = any(spec.single for spec in self._chain.setup.stages)
        batches = [[item] for item in items] if is_single else [items]
        replies = [self._chain.run(Batch(0, batch), known, whole=True) for batch in batches]
        return [outcome for reply in replies for outcome in reply.outcomes]

    def _agree(self, outcomes: Sequence[Outcome]) -> list[dict[str, bytes]]:
        """The reference that all workers with these models have: the first one of them that asks writes it. Without a file,
        or if the disk does not take it, these answers: then only what changes in this process is noticed."""
        answers = [{stage: said.payload for stage, said in outcome.outputs.items()} for outcome in outcomes]
        setup = self._chain.setup
        if not setup.references:
            return answers
        path = Path(setup.references, f"{digest_models(setup)}.json")
        raw = [{stage: msgspec.Raw(payload) for stage, payload in said.items()} for said in answers]
        with contextlib.suppress(OSError):
            write_reference(path, FirstAnswers(setup.name, raw, time.time()))
        return read_reference(path) or answers


def digest_models(setup: Setup) -> str:
    """Of what decides the answers to the known images: the models, and the size of the pictures."""
    fingerprints = [[spec.name, spec.backend, spec.fingerprint] for spec in setup.stages]
    decisive = [VERSION, setup.limits.max_pixels, fingerprints]
    return hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()[:16]


def read_reference(path: Path) -> list[dict[str, bytes]]:
    """The answers for each picture; none if the file is not there, or damaged."""
    try:
        kept = msgspec.json.decode(read_file(path), type=FirstAnswers)
    except (OSError, msgspec.MsgspecError):
        return []
    return [{stage: bytes(payload) for stage, payload in answers.items()} for answers in kept.answers]


def write_reference(path: Path, reference: FirstAnswers) -> None:
    """Unless another worker was first. A damaged file is replaced. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(reference))
    try:
        if path.exists() and not read_reference(path):
            partial.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
