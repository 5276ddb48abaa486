"""The reports of `visiond bench` as pictures."""

from __future__ import annotations

from pathlib import Path

from daemon.bench.job import Run
from daemon.bench.scaling import Scaling


def draw_scaling(report: Scaling, picture: Path) -> None:
    """Draw the rate over the number of GPUs, and a line for a rate that is in proportion to their number."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="tight")
    axes = figure.subplots()
    for placement in dict.fromkeys(point.placement for point in report.points):
        points = [point for point in report.points if point.placement == placement]
        axes.plot([point.gpus for point in points], [point.middle for point in points], "o-", label=placement)
    first, last = report.points[0], report.points[-1]
    if first.gpus:
        ideal = first.middle / first.gpus * last.gpus
        axes.plot([first.gpus, last.gpus], [first.middle, ideal], ":", color="gray", label="in proportion")
    axes.set(xlabel="GPUs", ylabel="images/s, middle half", xticks=[point.gpus for point in report.points])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(picture)


def draw_run(run: Run, picture: Path) -> None:
    """Draw rate, GPU load and memory over the seconds of a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="tight")
    rate, load, memory = figure.subplots(3, 1, sharex=True)
    rate.hist(
        run.published_at, bins=[float(second) for second in range(int(run.wall_seconds) + 2)], histtype="step"
    )
    rate.set(ylabel="images/s")
    at = [sample.at for sample in run.samples]
    for gpu in range(len(run.samples[0].gpu_used_bytes) if run.samples else 0):
        load.plot(at, [sample.gpu_utilisation[gpu] for sample in run.samples], label=f"GPU {gpu}")
        memory.plot(at, [sample.gpu_used_bytes[gpu] / 2**30 for sample in run.samples], label=f"GPU {gpu}")
    load.set(ylabel="GPU busy", ylim=(0, 1.05))
    memory.plot(at, [sample.workers_bytes / 2**30 for sample in run.samples], label="workers, host")
    memory.plot(at, [sample.daemon_bytes / 2**30 for sample in run.samples], label="daemon, host")
    memory.set(ylabel="GiB", xlabel="seconds")
    memory.legend()
    figure.savefig(picture)
