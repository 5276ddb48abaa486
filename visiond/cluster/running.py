"""Read this first: `visiond ray run INPUT OUTPUT`, step by step.

    driver 1   inputs.py      lists INPUT: a reference to each image, or to a tar with many; keeping.py chooses what the
                              parts keep of a list. These two, and what an actor reads with, are in reading/
    driver 2   planning.py    drops what is finished, and forms units of about 1,000 images; plans.py writes each unit
                              down in OUTPUT before it is handed out
    driver 3   pool.py        hands the units to Ray Data: `map_batches` over a fixed pool of actors
    actor  4   actor.py       reads the images of a unit (fetching.py), also those in archives (unpacking.py), annotates
                              them (visiond/engine/annotator.py), reads what the list says of each (joining.py), and writes
                              their rows as one part: one Parquet file, whole or not at all (places.py)
    driver 5   here           counts what came of each unit

What makes each input exactly one row, whatever dies: a unit is a fixed set of inputs with a name, and its part has
that name. Whoever writes it, and however often, it is the same file with rows of the same inputs. A unit is handed
out only after the plan that has it exists in OUTPUT, and a plan is created only if no other has its number. So a
second driver, or an actor that outlives its driver, can repeat a unit, but never put an input into another one.

Units are handed out in waves, because Ray Data takes a list and no stream: the first wave is what is listed in five
seconds, and each further one what was listed meanwhile. When a wave fails, because actors are lost and do not
come back, what is left of it is run again with a new pool.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from daemon.core.errors import VisiondError
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.exports.parquet import FURTHER
from visiond.cluster.job import ClusterJob
from visiond.cluster.places import open_place
from visiond.cluster.planning import Planner, Unit
from visiond.cluster.plans import Plans
from visiond.cluster.pool import ActorPool, WaveLost, check_installed
from visiond.cluster.reading.inputs import InputListing
from visiond.cluster.reading.keeping import choose_kept
from visiond.engine.rows import ResultRows

FIRST_SECONDS = 5.0  # of listing, before the first wave begins
MOST_UNITS = 10_000  # that are listed ahead, and in a wave
ATTEMPTS = 3  # of a wave that loses its actors without finishing a single unit

log = structlog.get_logger()
Show = Callable[[int, int | None], None]


def show_nothing(*_: object) -> None:
    pass


class ClusterLost(VisiondError):
    """The cluster lost its actors again and again."""

    exit_status = os.EX_UNAVAILABLE


@dataclass
class Result:
    """What came of a run. outcomes: images by state."""

    outcomes: Counter[JobStatus] = field(default_factory=Counter)
    parts: int = 0
    finished_before: int = 0  # inputs that an earlier run has finished
    duplicates: int = 0  # inputs that were listed again
    restarts: int = 0  # of the pool
    unread: str = ""  # a sentence about folders that could not be listed
    seconds: float = 0.0  # from the first wave's start


def run(
    job: ClusterJob, show: Show = show_nothing, load: Callable[[int, str], None] = show_nothing
) -> Result:
    """Annotate all inputs. show: called with the images that are done, and with all once that number is known.
    load: called with the images found so far and a sentence, before the first is done.

    Raises VisiondError; with --resume the next run goes on where this one ended.
    """
    check_installed()
    listing = InputListing(job.source, job.config, column=job.column)  # first: a wrong INPUT leaves no OUTPUT
    own = [*ResultRows(job.config.stage_names).kinds, *FURTHER]
    kept = choose_kept(listing, job.keep, own, every=job.keep_all)
    output = open_place(job.output)
    plans = Plans.open(
        output, job.config, resume=job.resume, shards=job.shards, kept=kept, float16=job.float16
    )
    planner = Planner(plans, listing.inputs(), job.part_images)
    result = Result()
    units = planner.units()
    if first := next(units, None):  # Ray takes seconds to start
        load(planner.inputs, "starting Ray")
        with ActorPool(job, output.url, listing.root, kept) as pool:
            load(planner.inputs, f"starting {quantity(pool.chains, 'actor')}")
            began = time.monotonic()
            ahead = _Ahead(itertools.chain([first], units))
            for wave in ahead.waves():
                plans.write([unit.ids for unit in wave if unit.fresh])
                for counts in _finish(pool, wave, result):
                    result.outcomes += counts
                    result.parts += 1
                    show(result.outcomes.total(), planner.inputs if ahead.is_done else None)
            result.seconds = time.monotonic() - began
    result.finished_before, result.duplicates = planner.finished, planner.duplicates
    output.clean()
    if unread := listing.unread:
        result.unread = f"Not every file was found: {unread.summary()}: {'; '.join(unread.lines(3))}"
    return result


def _finish(pool: ActorPool, wave: list[Unit], result: Result) -> Iterator[Counter[JobStatus]]:
    """Run the units of a wave until each has its part."""
    left, idle = {unit.name: unit for unit in wave}, 0
    while left:
        before = len(left)
        try:
            for name, counts in pool.run(list(left.values())):
                if left.pop(name, None):  # Ray may report a unit again that it has repeated
                    yield counts
            if left:
                raise WaveLost(f"{quantity(len(left), 'unit')} came back without a word")
        except WaveLost as error:
            idle = idle + 1 if len(left) == before else 0
            if idle >= ATTEMPTS:
                text = f"The pool of actors was lost {ATTEMPTS} times without finishing anything: {error}."
                raise ClusterLost(f"{text} When the cluster is well, --resume goes on from here.") from error
            result.restarts += 1
            log.warning("the pool of actors is started again", cause=str(error), units_left=len(left))


class _Ahead:
    """Lists and plans in a thread, while earlier units run."""

    def __init__(self, units: Iterator[Unit]) -> None:
        self.is_done = False
        self._units: queue.Queue[Unit | BaseException | None] = queue.Queue(MOST_UNITS)
        self._planned = units
        threading.Thread(target=self._plan, name="listing", daemon=True).start()

    def _plan(self) -> None:
        try:
            for unit in self._planned:
                self._units.put(unit)
            self.is_done = True
            self._units.put(None)
        except BaseException as error:  # noqa: BLE001 - `waves` raises it
            self._units.put(error)

    def waves(self) -> Iterator[list[Unit]]:
        """What was listed since the last wave, and in some seconds more: a wave that is small costs as much to start
        as a large one. These seconds double, so there are few waves also if the work is faster than the listing."""
        patience, ended = FIRST_SECONDS, False
        while not ended:
            wave: list[Unit] = []
            deadline = time.monotonic() + patience
            while not ended and len(wave) < MOST_UNITS:
                left = max(0.0, deadline - time.monotonic()) if wave else None
                try:
                    unit = self._units.get(timeout=left)
                except queue.Empty:
                    break
                if isinstance(unit, BaseException):
                    raise unit
                if unit is None:
                    ended = True
                else:
                    wave.append(unit)
            if wave:
                yield wave
            patience *= 2
