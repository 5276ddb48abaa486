"""`visiond bench`: the command, and its report as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from daemon.cli.display import console, errors, print_table, say
from daemon.hints import quantity
from daemon.ledger.files import written_into

if TYPE_CHECKING:
    from daemon.bench.job import Percentiles, Report, Run


def bench(
    folder: Annotated[Path, typer.Option("--folder", help="Where to work; images and weights stay for the next time.")] = Path(
        "bench"
    ),
    count: Annotated[int, typer.Option("--count", "-n", min=2, help="Images of the job.")] = 500,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Under how many names each image lies there.")] = 1,
    pack: Annotated[
        str, typer.Option("--pack", help="Weights, as models.pack names them; by default random ones of the published sizes.")
    ] = "",
    cold: Annotated[int, typer.Option("--cold", min=0, help="Runs without compiled kernels at hand.")] = 1,
    warm: Annotated[int, typer.Option("--warm", min=0, help="Runs with them.")] = 3,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Images that are taken one at a time.")] = 20,
    single: Annotated[int, typer.Option("--single", min=2, help="Images dropped singly on an idle daemon.")] = 100,
    memory: Annotated[
        float, typer.Option("--memory", min=0, help="Feed the same workers from memory, for so many seconds.")
    ] = 0,
    pipeline: Annotated[
        list[str] | None, typer.Option("--pipeline", help='A line for the pipeline table, e.g. "workers_per_device = 2".')
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw rate, load and memory over time: a PNG.")] = None,
) -> None:
    """The standard job on this machine: files to durable results, beside the same images taken one at a time.

    JPEGs of 1280×960 with twelve lines of text through PP-OCRv6 small, YOLOv8n, CLIP ViT-B/32 and BLIP-base with twelve new
    tokens.

    Example: visiond bench --count 2000 --memory 10 --json bench.json --plot bench.png
    """
    from daemon.bench.job import WARM_UP, Place, run_bench

    if cold + warm == 0:
        raise typer.BadParameter("there is nothing to run: give --cold or --warm")
    if count < (least := max(1 + sample, WARM_UP + single)):
        raise typer.BadParameter(
            f"--sample and --single take their images from the job's: --count must be {least} or more, or those less "
            "(--sample 2 --single 10)"
        )
    refuse_lost_reports(json, plot)
    with written_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, pack, pipeline or ())
    report = run_bench(
        place,
        count,
        repeat=repeat,
        cold=cold,
        warm=warm,
        sample=sample,
        single=single,
        memory_seconds=memory,
        tell=errors.print,
    )
    print_report(report)
    with written_into(folder):
        if json:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if plot:
            draw_run(report.runs[-1], plot)


def refuse_lost_reports(*paths: Path | None) -> None:
    """Before hours of work, not after them."""
    for path in paths:
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise typer.BadParameter(f"{path} cannot be written: give a file in a folder that there is")


def print_report(report: Report) -> None:
    from daemon.bench.job import representative

    machine = report.machine
    devices = ", ".join(machine.gpus) or "no GPU"
    console.print(
        f"{quantity(report.images, 'image')}, {say(devices)}, {quantity(machine.cores, 'core')}, torch {machine.torch}"
    )
    print_table(("way", "images/s", "seconds to load", "seconds in all"), list_ways(report))
    print_table(("stage", "ms an image", "share", "ms one at a time"), list_stages(report))
    last, rates = report.runs[-1], [run.images_per_second for run in representative(report.runs)]
    print_table(("seconds", "p50", "p95", "p99"), list_latencies(last, report.single_image))
    on_gpus = max((sum(sample.gpu_used_bytes) for sample in last.samples), default=0)
    of_workers = max((sample.workers_bytes for sample in last.samples), default=0)
    print(f"at most {on_gpus >> 20} MiB on GPUs, {of_workers >> 20} MiB of workers on the host")
    spread = f"{min(rates):.1f} to {max(rates):.1f}"
    print(f"{report.images_per_second:.1f} images/s ({spread}), {report.ratio:.1f} times one image at a time")


def list_ways(report: Report) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (
            "daemon, cold" if run.cold else "daemon, warm",
            f"{run.images_per_second:.1f}",
            f"{run.load_seconds:.1f}",
            f"{run.wall_seconds:.1f}",
        )
        for run in report.runs
    ]
    if ceiling := report.memory_images_per_second:
        reached = f"workers from memory, of which the daemon reaches {report.images_per_second / ceiling:.0%}"
        rows.append((reached, f"{ceiling:.1f}", "", ""))
    return [*rows, ("one image at a time, float32", f"{report.one_at_a_time.images_per_second:.2f}", "", "")]


def list_stages(report: Report) -> list[tuple[object, ...]]:
    seconds, slow = report.runs[-1].stage_seconds, report.one_at_a_time
    return [
        (
            stage,
            f"{1000 * spent:.2f}",
            f"{spent / sum(seconds.values()):.0%}",
            f"{1000 * slow.stage_seconds[stage] / slow.images:.1f}",
        )
        for stage, spent in seconds.items()
    ]


def list_latencies(run: Run, single: Percentiles) -> list[tuple[object, ...]]:
    named = {"from seen, or loaded, to sidecar in the last run": run.latency, "an image alone, from arrival to sidecar": single}
    return [(name, *(f"{x:.3f}" for x in (p.p50, p.p95, p.p99))) for name, p in named.items()]


def draw_run(run: Run, picture: Path) -> None:
    """Rate, GPUs' load and memory over the seconds of a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="tight")
    rate, load, memory = figure.subplots(3, 1, sharex=True)
    rate.hist(run.published_at, bins=[float(second) for second in range(int(run.wall_seconds) + 2)], histtype="step")
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
