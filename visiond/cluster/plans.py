"""Which inputs are planned, and which are finished: 8 bytes for each input, never its row.

OUTPUT/_visiond/plan-00000.npz and so on have the digests of the inputs of each unit, and a unit is finished when its
part exists. So a resume reads 8 bytes for each input, and lists the parts. docs/cluster.md has the figures.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.config.loading import Config
from daemon.core.errors import VisiondError
from visiond.cluster.job import Shards
from visiond.cluster.places import ClusterPlace
from visiond.cluster.reading.keeping import NOTHING, Kept

FOLDER = "_visiond"  # readers of Parquet skip names that begin with _
SETTINGS = f"{FOLDER}/settings.json"
FRESH, FINISHED = -1, -2  # in place of a unit's number

Ids = NDArray[np.uint64]


class OutputTaken(VisiondError):
    """OUTPUT has parts of another run."""

    exit_status = os.EX_USAGE


class OtherDriver(VisiondError):
    """Another run has planned into the same OUTPUT meanwhile."""

    exit_status = os.EX_TEMPFAIL


def name_of(ids: Ids) -> str:
    """The name of a unit with these inputs."""
    return hashlib.sha256(ids.tobytes()).hexdigest()[:24]


def part_of(unit: str) -> str:
    return f"part-{unit}.parquet"


class Plans:
    """What OUTPUT knew at the start."""

    def __init__(
        self,
        place: ClusterPlace,
        plans: Sequence[tuple[Ids, NDArray[np.int64]]],
        parts: set[str],
    ) -> None:
        """plans: the digests of each, unit after unit, and where each unit ends. parts: names that exist."""
        self.place = place
        self._next = len(plans)
        self._driver = np.frombuffer(secrets.token_bytes(16), np.uint8)
        ids = [plan[0] for plan in plans]
        sizes = [np.diff(ends, prepend=0) for _, ends in plans]
        bounds = [np.split(digests, ends[:-1]) for digests, ends in plans]
        self.units = [name_of(unit) for plan in bounds for unit in plan]
        self.sizes = np.concatenate([np.zeros(0, np.int64), *sizes])
        done = np.array([part_of(unit) in parts for unit in self.units], bool)
        owner = np.repeat(np.where(done, FINISHED, np.arange(len(self.units))), self.sizes).astype(np.int32)
        everything = np.concatenate([np.zeros(0, np.uint64), *ids])
        order = np.argsort(everything)
        self._ids, self._owner = everything[order], owner[order]

    @classmethod
    def open(
        cls,
        place: ClusterPlace,
        config: Config,
        *,
        resume: bool,
        shards: Shards = Shards.none,
        kept: Kept = NOTHING,
        float16: bool = False,
    ) -> Plans:
        """Raises OutputTaken if there are results, and this run is not to go on with them, or has other settings."""
        names = sorted(name for name in place.names(FOLDER) if name.startswith("plan-"))
        if names and not resume:
            raise OutputTaken(
                f"{place.url} has results of an earlier run. --resume goes on with it; or name another OUTPUT."
            )
        check_settings(place, describe_settings(config, shards, kept, float16=float16))
        parts = {name for name in place.names("") if name.endswith(".parquet")}
        plans = [read_plan(place.read(f"{FOLDER}/{name}")) for name in names]
        return cls(place, plans, parts)

    def look_up(self, ids: Ids) -> NDArray[np.int32]:
        """For each digest FINISHED, FRESH, or the number of its unit, which is planned and not finished."""
        if not len(self._ids):
            return np.full(len(ids), FRESH, np.int32)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        found: NDArray[np.int32] = np.where(self._ids[places] == ids, self._owner[places], FRESH).astype(
            np.int32
        )
        return found

    def write(self, units: Sequence[Ids]) -> None:
        """Write down new units, each by its inputs; only then they may be handed out. Raises OtherDriver."""
        if not units:
            return
        file = io.BytesIO()
        np.savez(
            file,
            ids=np.concatenate(units),
            ends=np.cumsum(list(map(len, units))),
            # No other driver writes these bytes, so a store that has them has ours (places.py). Nobody reads them.
            driver=self._driver,
        )
        if not self.place.write_whole(f"{FOLDER}/plan-{self._next:05d}.npz", file.getvalue()):
            raise OtherDriver(
                f"Another run is writing into {self.place.url}. When it has ended, --resume does what is left."
            )
        self._next += 1


def read_plan(data: bytes) -> tuple[Ids, NDArray[np.int64]]:
    with np.load(io.BytesIO(data)) as plan:
        return plan["ids"], plan["ends"]


def check_settings(place: ClusterPlace, settings: bytes) -> None:
    """Write them, or compare them with those that OUTPUT was made with. Raises OutputTaken."""
    found = settings if place.write_whole(SETTINGS, settings) else place.read(SETTINGS)
    if "kept" not in msgspec.json.decode(found):
        raise OutputTaken(
            f"{place.url} was begun by an older visiond, whose parts have fewer columns. Go on with that version, or name "
            "another OUTPUT."
        )
    if found != settings:
        raise OutputTaken(
            f"{place.url} was made with other [models], [stages], [binning] or [pipeline] stages, mode or limits, "
            "with other `unpack` or [unpacking], or with other --shards, --keep, --keep-all or --float16. Name another "
            "OUTPUT, or use the settings that made this one."
        )


def describe_settings(config: Config, shards: Shards, kept: Kept, *, float16: bool) -> bytes:
    """Everything that decides what is written."""
    pipeline = config.pipeline
    settings: dict[str, object] = {
        "models": config.models.pack,
        "stages": {
            name: getattr(config.stages, name).model_dump(exclude={"batch_size"})
            for name in config.stage_names
        },
        "binning": config.binning.model_dump(),
        "mode": pipeline.mode,
        "limits": msgspec.to_builtins(pipeline.limits()),
        "kept": kept.describe(),
    }
    if shards:
        settings["shards"] = shards
    if float16:
        settings["float16"] = True
    if kinds := config.inbox[0].unpack:
        settings["unpack"] = [sorted(kinds), config.unpacking.model_dump()]
    return msgspec.json.encode(settings, order="sorted") + b"\n"


class DigestSet:
    """A growing set of digests, as a few sorted arrays: 8 bytes for each."""

    def __init__(self) -> None:
        self._runs: list[Ids] = []

    def add(self, ids: Ids) -> NDArray[np.bool_]:
        """Add digests; returns which of them are new. The first of several equal ones is."""
        single, first = np.unique(ids, return_index=True)
        kept = np.ones(len(single), bool)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, single), len(run) - 1)
            kept &= run[places] != single
        new = np.zeros(len(ids), bool)
        new[first[kept]] = True
        if kept.any():
            self._runs.append(single[kept])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")  # two sorted runs: one pass
            self._runs.append(merged)
        return new
