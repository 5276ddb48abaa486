"""Draws docs/scaling.webp, the rates of several GPUs compared with one: python docs/scaling.py docs/scaling.webp

The figures are those of docs/performance.md, which has their commands and machines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure


class Series(NamedTuple):
    """The whole runs of one placement, by number of GPUs: how many times as fast as one GPU of the same host."""

    name: str
    times: dict[int, float]
    marker: str


SERIES = (
    Series("replicated", {1: 1.0, 2: 1.97, 4: 3.87}, "o"),
    Series("pipelined", {2: 1.79, 4: 3.51}, "s"),
    Series("one process for all GPUs", {1: 1.0, 2: 1.88, 4: 2.10, 8: 2.36}, "x"),
)


def draw(picture: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.plot([1, 8], [1, 8], ":", color="gray", label="in proportion")
    for series in SERIES:
        line = axes.plot(
            list(series.times), list(series.times.values()), f"{series.marker}-", label=series.name
        )
        gpus, times = max(series.times.items())
        axes.annotate(
            f"{times:.2f}", (gpus, times), (8, -4), textcoords="offset points", color=line[0].get_color()
        )
    axes.set(
        xlabel="GPUs of one host", ylabel="times one GPU, whole run", xticks=[1, 2, 4, 8], xlim=(0.7, 8.7)
    )
    axes.grid(alpha=0.2)
    axes.legend(loc="upper left")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
