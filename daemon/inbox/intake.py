"""Reads the images of jobs, each from the origin of its inbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.core.jobs import Extent, Job, Read
from daemon.inbox.origin import origin_of
from daemon.workers.slab import Slab


def read_files(jobs: Sequence[tuple[Job, Extent]], slab: Slab, roots: Mapping[int, bytes]) -> dict[int, Read]:
    """Read each job's file into its extent of the slab; returns what came of that, by image. roots: the inboxes' folders or
    URLs. Runs in a thread.

    Raises OSError if no file at all can be read for now. It may then be called again."""
    groups: dict[int, list[tuple[Job, Extent]]] = {}
    for job, extent in jobs:
        groups.setdefault(job.inbox, []).append((job, extent))
    read: dict[int, Read] = {}
    for inbox, group in groups.items():
        read |= origin_of(roots[inbox]).read(group, slab)
    return read
