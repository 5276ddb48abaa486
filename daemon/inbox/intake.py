"""Reads the images of jobs, each from the origin of its inbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.inbox.origin import origin_of
from daemon.jobs import Job
from daemon.workers.slab import Slab


def read_files(jobs: Sequence[Job], slab: Slab, roots: Mapping[int, bytes]) -> None:
    """Read each job's image into its extent and set its digest; else its `failure`, or `gone` when
    it has changed since it was seen. `roots` are the inboxes' folders or URLs. Runs in a thread.

    Raises OSError if no file at all can be read for now. It may then be called again."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        job.digest, job.failure, job.gone = b"", None, False  # from a call that ended before it had read all
        groups.setdefault(job.inbox, []).append(job)
    for inbox, group in groups.items():
        origin_of(roots[inbox]).read(group, slab)
