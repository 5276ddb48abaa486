"""The command `visiond bench`, and its report as tables and as a picture."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from daemon.core.hints import quantity
from daemon.ledger.files import written_into
from daemon.terminal.display import console, errors, print_table, printable
from daemon.terminal.options import option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daemon.bench.job import Machine, Percentiles, Report, Run
    from daemon.bench.models import ModelsReport
    from daemon.bench.scaling import Scaling


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

SecondLookOption = Annotated[
    Path | None,
    option(
        "--second-look",
        metavar="FILE",
        help="A TOML file with a \\[\\[second_look]] table, which is measured too.",
        panel=JOB,
    ),
]
GpusOption = Annotated[
    str,
    option(
        "--gpus",
        metavar="N,N",
        help="Measure on these numbers of GPUs, such as 1,2,4,8, instead of on all.",
        panel=RUNS,
    ),
]
ModelsOption = Annotated[
    str,
    option(
        "--models",
        metavar="NAME,NAME",
        help="Measure each of these models alone instead; all: those that are here.",
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
    second_look: SecondLookOption = None,
    cold: Annotated[int, number("--cold", least=0, help="Runs without compiled kernels.")] = 1,
    warm: Annotated[int, number("--warm", least=0, help="Runs with compiled kernels.")] = 3,
    sample: Annotated[int, number("--sample", least=1, help="Images to process one at a time.")] = 20,
    single: Annotated[
        int, number("--single", least=2, help="Images to drop singly on an idle daemon.")
    ] = 100,
    memory: MemoryOption = 0,
    gpus: GpusOption = "",
    models: ModelsOption = "",
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
      visiond bench --gpus 1,2,4,8 --count 1000 --repeat 6 --plot gpus.png
      visiond bench --second-look look.toml
      visiond bench --models rf-detr-small,./my-clip
    """
    from daemon.bench.job import Place, run_bench

    numbers, look = parse_numbers(gpus), read_table(second_look, gpus, models)
    refuse_too_few(count, sample, 0 if numbers else single, runs=cold + warm)
    refuse_lost_reports(json, plot)
    with written_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if models:
        bench_models(folder, [name.strip() for name in models.split(",") if name.strip()], json)
        return
    if numbers:
        scale(folder, pack, pipeline or (), numbers, (count, repeat, cold, warm, sample), json, plot)
        return
    report = run_bench(
        Place(folder, pack, pipeline or (), look),
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
    write_report(folder, report, json, plot, lambda picture: draw_last_run(report, picture))


def bench_models(folder: Path, names: list[str], json: Path | None) -> None:
    from daemon.bench.job import Place
    from daemon.bench.models import measure_models

    report = measure_models(Place(folder), names, Path("models").absolute(), progress=errors.print)
    print_models(report)
    write_report(folder, report, json, None, lambda _: None)


def print_models(report: ModelsReport) -> None:
    console.print(f"{describe_machine(report.machine)}; each model alone on {report.device}")
    columns = ("model", "stage", "dtype", "batch", "images/s", "files MB", "memory MB", "loads in s")
    rows = []
    for model in report.models:
        best, found = model.measurement.best, model.measurement
        memory = f"{found.memory_bytes / 1e6:,.0f}" if best else "-"
        rate = (str(best.batch_size), f"{best.images_per_second:,.1f}") if best else ("-", "-")
        size = f"{model.file_bytes / 1e6:,.0f}"
        rows.append((model.name, model.stage, model.dtype, *rate, size, memory, f"{found.load_seconds:.1f}"))
    print_table(columns, rows)
    for model in report.models:
        if model.measurement.problem:
            errors.print(printable(f"{model.name}, {model.stage}: {model.measurement.problem}"))


def scale(
    folder: Path,
    pack: str,
    pipeline: Sequence[str],
    numbers: list[int],
    job: tuple[int, int, int, int, int],
    json: Path | None,
    plot: Path | None,
) -> None:
    """Measure on several numbers of GPUs. job: count, repeat, cold, warm and sample, as the options."""
    from daemon.bench.pictures import draw_scaling
    from daemon.bench.scaling import measure_scaling

    count, repeat, cold, warm, sample = job
    report = measure_scaling(
        folder,
        pack,
        pipeline,
        numbers,
        count,
        repeat=repeat,
        cold=cold,
        warm=warm,
        sample=sample,
        progress=errors.print,
    )
    print_scaling(report)
    write_report(folder, report, json, plot, lambda picture: draw_scaling(report, picture))


def write_report(
    folder: Path,
    report: Report | Scaling | ModelsReport,
    json: Path | None,
    plot: Path | None,
    draw: Callable[[Path], None],
) -> None:
    """Write the files that were asked for."""
    with written_into(folder):
        if json:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if plot:
            draw(plot)


def parse_numbers(text: str) -> list[int]:
    """Numbers of GPUs, in rising order. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--gpus {text} is not a list of numbers; write for example --gpus 1,2,4,8")
    return sorted(set(map(int, parts)))


def print_scaling(report: Scaling) -> None:
    console.print(describe_machine(report.machine))
    columns = (
        "GPUs",
        "placement",
        "images",
        "images/s",
        "spread",
        "middle half",
        "times",
        "busy",
        "one at a time",
    )
    print_table(
        columns,
        (
            (
                point.gpus or "CPU",
                point.placement,
                point.images,
                f"{point.whole:.1f}",
                f"{point.least:.1f} to {point.most:.1f}",
                f"{point.middle:.1f}",
                f"{point.times:.2f}",
                "-" if point.busy is None else f"{point.busy:.0%}",
                f"{point.one_at_a_time:.2f}",
            )
            for point in report.points
        ),
    )
    for point in report.points[1:]:
        counts = ", ".join(f"{name} {count}" for name, count in point.agreement.different.items())
        console.print(
            f"{point.gpus} GPUs, {point.placement}: number of {point.agreement.images:,} images whose answers differ from "
            f"those of the first line: {counts}"
        )


def draw_last_run(report: Report, picture: Path) -> None:
    from daemon.bench.pictures import draw_run

    draw_run(report.runs[-1], picture)


def read_table(file: Path | None, gpus: str = "", models: str = "") -> str:
    """The text of a file that has one [[second_look]] table and nothing else. gpus, models: as the options, which
    measure without second looks. Raises BadParameter."""
    if file is None:
        return ""
    if gpus or models:
        other = "--gpus" if gpus else "--models"
        raise typer.BadParameter(
            f"--second-look cannot be used together with {other}: run visiond bench once with each of them"
        )
    try:
        text = file.read_text("utf-8-sig")
        found = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--second-look {file} cannot be read: {error}") from error
    tables = found.get("second_look")
    if list(found) != ["second_look"] or not (isinstance(tables, list) and tables):
        raise typer.BadParameter(f"--second-look {file} must have a [[second_look]] table and nothing else")
    if len(tables) > 1:  # only the time of an image's last second look is known
        raise typer.BadParameter(
            f"--second-look {file} has {len(tables)} [[second_look]] tables: measure each one with a file and a run of its own"
        )
    return text


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


def describe_machine(machine: Machine) -> str:
    devices = ", ".join(machine.gpus) or "no GPU"
    return f"{printable(devices)}, {quantity(machine.cores, 'core')}, torch {machine.torch}"


def print_report(report: Report) -> None:
    from daemon.bench.job import representative

    console.print(f"{quantity(report.images, 'image')}, {describe_machine(report.machine)}")
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
    for look in report.runs[-1].second_looks:
        failed = f", {look.failed} failed" if look.failed else ""
        what = f"second look {look.name}: {quantity(look.images, 'image')}{failed}, last run"
        rows.append((what, f"{look.images_per_second:.1f}", "", ""))
    return [*rows, ("one image at a time, float32", f"{report.one_at_a_time.images_per_second:.2f}", "", "")]


def list_stages(report: Report) -> list[tuple[object, ...]]:
    seconds, slow = report.runs[-1].stage_seconds, report.one_at_a_time
    rows: list[tuple[object, ...]] = [
        (
            stage,
            f"{1000 * spent:.2f}",
            f"{spent / sum(seconds.values()):.0%}",
            f"{1000 * slow.stage_seconds[stage] / slow.images:.1f}",
        )
        for stage, spent in seconds.items()
    ]
    for look in report.runs[-1].second_looks:
        rows.append((f"second look {look.name}, {look.stage}", f"{1000 * look.stage_seconds:.2f}", "", ""))
    return rows


def list_latencies(run: Run, single: Percentiles) -> list[tuple[object, ...]]:
    named = {
        "last run: from seen (or models loaded) to sidecar": run.latency,
        "single image: from arrival to sidecar": single,
    }
    return [(name, *(f"{x:.3f}" for x in (p.p50, p.p95, p.p99))) for name, p in named.items()]
