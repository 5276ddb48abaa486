"""Measures how long near-duplicates take to be grouped, and whether the groups are those of a comparison of all pairs.

The embeddings are invented: clusters in a narrow cone, so that two images have a cosine of about 0.47, as with CLIP; one in a
hundred is pure noise, and a tenth are copies of others with more or less noise. A million need 1 GB of memory and
1.5 GB of disk while they are made.

    python -m benchmarks.duplicates --images 200000
    python -m benchmarks.duplicates --images 20000 --check
    python -m benchmarks.duplicates --images 10000000 --folder /dev/shm     on a GPU; 10 GB of memory, and 15 GB in the folder
    OPENBLAS_NUM_THREADS=1 python -m benchmarks.duplicates --images 1000000 --new 2048

--new: images that come later, when all others lead groups.
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import TEMPORARY, read_options, work_folder
from daemon.search import matrix
from daemon.search.covering import Cover, Leaders, Places, extend_cover, find_axes, shorten
from daemon.search.duplicates import BATCH
from daemon.search.grouping import Grouping, group_rows
from stages.contract.processes import count_cores

DIM, CLUSTER = 512, 500  # values; images of a cluster
CONE, CENTER, OWN = 0.45, 0.33, 0.22  # parts of an image's length: of all, of its cluster, and its own
NOISE, COPIES, MOST = 0.01, 0.1, 0.45  # shares of images; the length of the noise of a copy
CHUNK, BLOCK, ROUNDS = 50_000, 256, 8


def main() -> None:
    options = read_options(
        __doc__, images=200_000, near=0.95, threads=count_cores(), folder=TEMPORARY, check=False, new=0
    )
    if options.new:
        extend(options.images, options.near, options.new)
        return
    with work_folder(options.folder) as folder:
        exact = make_embeddings(options.images)
        for start in range(0, len(exact), CHUNK):
            numbers = range(start, min(start + CHUNK, len(exact)))
            matrix.append(folder / "matrix", start, numbers, exact[numbers.start : numbers.stop])
        order = np.random.default_rng(1).permutation(len(exact))
        asked = Grouping(
            str(folder / "matrix"), len(exact), DIM, order.tobytes(), options.near, options.threads
        )
        before, began = cpu_seconds(), time.monotonic()
        cover = group_rows(asked, lambda done: None)
        seconds, cpu = time.monotonic() - began, cpu_seconds() - before
    others = np.flatnonzero(cover.leaders != np.arange(len(order)))
    groups = len(np.unique(cover.leaders[others]))
    print(
        f"{len(order):,} images of {DIM} values, nearness {options.near}, {options.threads} threads: {seconds:.1f} s, "
        f"{cpu:.1f} s of CPU; {groups:,} groups, {len(others):,} images near a better one"
    )
    if options.check:
        differing = count_differing(cover, exact[order].astype(np.float64), options.near)
        print(f"images in another group than by a comparison of all pairs: {differing}")


def extend(images: int, near: float, new: int) -> None:
    """How long images take that come when there are leaders already."""
    exact = make_embeddings(images + new)
    rows = np.arange(images)
    axes = find_axes(exact, rows, near)
    leaders = Leaders(rows, shorten(exact, rows, axes), axes)
    for batch in (1, 64, BATCH):
        times, worked = [], []
        for start in range(images, images + new, batch)[:ROUNDS]:
            began, used = time.monotonic(), time.thread_time()
            extend_cover(exact, leaders, np.arange(start, start + batch), near)
            times.append(1000 * (time.monotonic() - began) / batch)
            worked.append(1000 * (time.thread_time() - used) / batch)
        print(
            f"{images:,} leaders, {axes.shape[1]} coordinates, {batch:3} images at once: median "
            f"{statistics.median(times):.2f} ms each, best {min(times):.2f} ms; of CPU {statistics.median(worked):.2f} ms"
        )


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make_embeddings(images: int) -> NDArray[np.float16]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chance = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, device=device)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, 1, generator=chance, device=device)

    def choose(count: int, many: int) -> Tensor:
        return torch.randint(many, (count,), generator=chance, device=device)

    spread = functional.normalize(torch.arange(1, DIM + 1, device=device) ** -0.5, dim=0)
    turn = torch.linalg.qr(normal(DIM, DIM))[0]
    middle = functional.normalize(normal(DIM), dim=0)
    centers = (normal(max(20, images // CLUSTER), DIM) * spread) @ turn
    found = np.empty((images, DIM), np.float16)
    for start in range(0, images, CHUNK):
        count = min(CHUNK, images - start)
        own = (normal(count, DIM) * spread) @ turn
        some = CONE**0.5 * middle + CENTER**0.5 * centers[choose(count, len(centers))] + OWN**0.5 * own
        some = functional.normalize(torch.where(uniform(count) < NOISE, normal(count, DIM), some))
        noisy = some[choose(count, count)] + normal(count, DIM) / DIM**0.5 * uniform(count) * MOST
        some = functional.normalize(torch.where(uniform(count) < COPIES, noisy, some))
        found[start : start + count] = some.half().cpu().numpy()
    return found


def count_differing(cover: Cover, embeddings: NDArray[np.float64], near: float) -> int:
    """How many images have another leader by a comparison of all pairs in float64, which is exact."""
    leaders: Places = np.full(len(embeddings), -1)
    for start in range(0, len(embeddings), BLOCK):
        cosines = embeddings[start : start + BLOCK] @ embeddings[start:].T
        for row, place in enumerate(range(start, min(start + BLOCK, len(embeddings)))):
            if leaders[place] < 0:
                leaders[place] = place
                near_ones = np.flatnonzero(cosines[row] >= near) + start
                leaders[near_ones[leaders[near_ones] < 0]] = place
    return int(np.count_nonzero(leaders != cover.leaders))


if __name__ == "__main__":
    main()
