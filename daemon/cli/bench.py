"""The command `visiond bench`, and its report as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from daemon.cli.display import console, errors, print_table, printable
from daemon.cli.options import option
from daemon.hints import quantity
from daemon.ledger.files import written_into

if TYPE_CHECKING:
    from daemon.bench.job import Percentiles, Report, Run


JOB, RUNS, OUTPUT = "Job", "Measurements", "Output"
MemoryOption = Annotated[
    float,
    option(
        "--memory",
        metavar="SECONDS",
        min=0,
        help="Also feed the workers from memory for this long.",
        panel=RUNS,
    ),
]
PackOption = Annotated[
    str,
    option(
        "--pack",
        metavar="PACK",
        help="Name or path of a pack. Default: random weights of the published sizes.",
        panel=JOB,
    ),
]
PipelineOption = Annotated[
    list[str] | None,
    option(
        "--pipeline",
        metavar="LINE",
        help='A setting for the table pipeline, such as "mps = false". Repeatable.',
        panel=JOB,
    ),
]


def number(*names: str, least: int, help: str, panel: str = RUNS) -> Any:
    return option(*names, metavar="N", min=least, help=help, panel=panel)


def bench(
    folder: Annotated[
        Path,
        option(
            "--folder",
            metavar="FOLDER",
            help="Folder to work in. Keeps images and weights for the next time.",
        ),
    ] = Path("bench"),
    count: Annotated[
        int, number("--count", "-n", least=2, help="Number of different images.", panel=JOB)
    ] = 500,
    repeat: Annotated[
        int, number("--repeat", least=1, help="Names of each image, for a longer run.", panel=JOB)
    ] = 1,
    pack: PackOption = "",
    pipeline: PipelineOption = None,
    cold: Annotated[int, number("--cold", least=0, help="Runs without compiled kernels.")] = 1,
    warm: Annotated[int, number("--warm", least=0, help="Runs with compiled kernels.")] = 3,
    sample: Annotated[int, number("--sample", least=1, help="Images to process one at a time.")] = 20,
    single: Annotated[
        int, number("--single", least=2, help="Images to drop singly on an idle daemon.")
    ] = 100,
    memory: MemoryOption = 0,
    json: Annotated[
        Path | None, option("--json", metavar="FILE", help="Write all figures to FILE.", panel=OUTPUT)
    ] = None,
    plot: Annotated[
        Path | None, option("--plot", metavar="FILE", help="Draw rate, load and memory: a PNG.", panel=OUTPUT)
    ] = None,
) -> None:
    """Measure images per second of the daemon, and of the same images one at a time.

    The standard job: JPEGs of 1280×960 with twelve lines of text through
    PP-OCRv6 small, YOLOv8n, CLIP ViT-B/32 and BLIP-base with twelve new
    tokens. The daemon's figure is from files to durable results.

    Examples:
      visiond bench --count 2000 --memory 10 --json bench.json --plot bench.png
      visiond bench --pack mini --count 20 --sample 2 --single 10
    """
    from daemon.bench.job import Place, run_bench

    refuse_too_few(count, sample, single, runs=cold + warm)
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
        progress=errors.print,
    )
    print_report(report)
    with written_into(folder):
        if json:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if plot:
            draw_run(report.runs[-1], plot)


def refuse_too_few(count: int, sample: int, single: int, *, runs: int) -> None:
    """Refuse counts that leave nothing to measure."""
    from daemon.bench.job import WARM_UP

    if runs == 0:
        raise typer.BadParameter(
            "--cold and --warm are both 0, so there is nothing to run; set one of them to 1 or more"
        )
    if count < (least := max(1 + sample, WARM_UP + single)):
        raise typer.BadParameter(
            f"--sample and --single use images of the job, so --count must be at least {least}; "
            "or lower them, for example --sample 2 --single 10"
        )


def refuse_lost_reports(*paths: Path | None) -> None:
    """Raise BadParameter before hours of work, not after them."""
    for path in paths:
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            problem = (
                "it is a folder" if path.is_dir() else f"the folder {path.absolute().parent} does not exist"
            )
            raise typer.BadParameter(f"cannot write {path}: {problem}")


def print_report(report: Report) -> None:
    from daemon.bench.job import representative

    machine = report.machine
    devices = ", ".join(machine.gpus) or "no GPU"
    console.print(
        f"{quantity(report.images, 'image')}, {printable(devices)}, {quantity(machine.cores, 'core')}, torch {machine.torch}"
    )
    print_table(("measured", "images/s", "load seconds", "total seconds"), list_ways(report))
    print_table(("stage", "ms per image", "share", "ms one at a time"), list_stages(report))
    last, rates = report.runs[-1], [run.images_per_second for run in representative(report.runs)]
    print_table(("seconds", "p50", "p95", "p99"), list_latencies(last, report.single_image))
    on_gpus = max((sum(sample.gpu_used_bytes) for sample in last.samples), default=0)
    of_workers = max((sample.workers_bytes for sample in last.samples), default=0)
    print(f"peak memory: {on_gpus >> 20} MiB on GPUs, {of_workers >> 20} MiB of the host for workers")
    spread = f"{min(rates):.1f} to {max(rates):.1f}"
    print(
        f"{report.images_per_second:.1f} images/s ({spread}), {report.ratio:.1f} times as fast as one image at a time"
    )


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
        reached = (
            f"workers fed from memory; the daemon reaches {report.images_per_second / ceiling:.0%} of it"
        )
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
    named = {
        "last run: from seen (or models loaded) to sidecar": run.latency,
        "single image: from arrival to sidecar": single,
    }
    return [(name, *(f"{x:.3f}" for x in (p.p50, p.p95, p.p99))) for name, p in named.items()]


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
