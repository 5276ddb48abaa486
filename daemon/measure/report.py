"""What `visiond bench` and `visiond tune` print, draw and write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from daemon.core.files import written_into
from daemon.core.hints import quantity
from daemon.measure.inputs import InputsReport, MeasuredInput
from daemon.measure.job import JobReport, Percentiles, Run, representative
from daemon.measure.models import ModelsReport
from daemon.measure.place import MachineInfo, Report
from daemon.measure.scaling import Scaling
from daemon.measure.steady import Steady
from daemon.terminal.display import console, errors, print_rows, print_table, printable


def show(report: Report, folder: Path, json: Path | None = None, plot: Path | None = None) -> None:
    """Print it, and write the files that were asked for."""
    draw: Callable[[Path], None] | None = None
    match report:
        case ModelsReport():
            print_models(report)
        case InputsReport():
            print_inputs(report)
            draw = partial(draw_inputs, report)
        case Scaling():
            print_scaling(report)
            draw = partial(draw_scaling, report)
        case JobReport():
            print_job(report)
            draw = partial(draw_run, report.runs[-1])
    with written_into(folder):
        if json:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if plot and draw:
            draw(plot)


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


def print_scaling(report: Scaling) -> None:
    console.print(describe_machine(report.machine))
    rows = [
        {
            "GPUs": point.gpus or "CPU",
            "placement": point.placement,
            "images": point.images,
            "images/s": f"{point.whole:.1f}",
            "spread": f"{point.least:.1f} to {point.most:.1f}",
            "middle 70 %": f"{point.middle:.1f}",
            "times": f"{point.times:.2f}",
            "busy": describe_share(point.busy),
            "one at a time": f"{point.one_at_a_time:.2f}",
        }
        for point in report.points
    ]
    print_rows(rows)
    for point in report.points[1:]:
        counts = ", ".join(f"{name} {count}" for name, count in point.agreement.different.items())
        console.print(
            f"{point.gpus} GPUs, {point.placement}: number of {point.agreement.images:,} images whose answers differ from "
            f"those of the first line: {counts}"
        )


def describe_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def print_inputs(report: InputsReport) -> None:
    console.print(describe_machine(report.machine))
    rows = [
        {
            "input": each.name,
            "images": f"{each.images:,}",
            "MB": f"{each.megabytes:.2f}",
            "images/s": f"{steady.images_per_second:,.1f}",
            "spread": f"{steady.slowest:,.1f} to {steady.fastest:,.1f}",
            "GPU": describe_share(steady.gpu_busy) if report.machine.gpus else "no GPU",
            "cores": describe_share(steady.cores_busy),
            "CPU ms": "-" if steady.cpu_milliseconds is None else f"{steady.cpu_milliseconds:,.1f}",
            "from memory": f"{each.memory_images_per_second:,.1f}" if each.memory_images_per_second else "-",
            "limit": steady.limited_by or "-",
        }
        for each, steady in ((each, each.steady) for each in report.inputs)
    ]
    print_rows(rows)
    for each in report.inputs:
        console.print(f"{each.name}: {describe_limit(each.steady)}")
        console.print(f"{each.name}: {describe_use(each)}")
        if each.failed:
            console.print(f"{each.name}: {quantity(each.failed, 'image')} failed")
        if each.expected_images_per_second:
            console.print(
                f"{each.name}: {each.steady.images_per_second / each.expected_images_per_second:.2f} of the rate that its "
                f"parts give by their shares, {each.expected_images_per_second:,.1f} images/s"
            )


def describe_use(each: MeasuredInput) -> str:
    spent = (f"{kind} {ms:,.1f}" for kind, ms in each.steady.cpu_milliseconds_by_kind.items())
    return f"CPU ms an image: {', '.join(spent) or 'not known'}; at most {each.host_bytes >> 20:,} MiB of the host's memory"


def print_quarters(run: Run) -> None:
    """Whether rate or memory drift: the rate of each quarter of the images, and the most memory in its time."""
    rows = [row for row in map(partial(describe_quarter, run), range(4)) if row]
    if rows:
        print_table(("quarter", "images/s", "GPU MiB", "workers MiB", "daemon MiB"), rows)


def describe_quarter(run: Run, part: int) -> tuple[object, ...] | None:
    """None if it took no time, or was not looked at."""
    times = run.published_at
    first, last = ((len(times) - 1) * end // 4 for end in (part, part + 1))
    inside = [sample for sample in run.samples if times[first] <= sample.at <= times[last]]
    if times[last] <= times[first] or not inside:
        return None
    peaks = (
        max(sum(sample.gpu_used_bytes) for sample in inside),
        max(sample.workers_bytes for sample in inside),
        max(sample.daemon_bytes for sample in inside),
    )
    rate = (last - first) / (times[last] - times[first])
    return part + 1, f"{rate:,.1f}", *(f"{peak >> 20:,}" for peak in peaks)


def describe_limit(steady: Steady) -> str:
    if not steady.limited_by:
        return "what limits is not known: the run was too short; use a larger --count or --repeat"
    shares = ", ".join(f"{part} {share:.0%}" for part, share in steady.shares.items())
    return f"limited by {steady.limited_by}: {steady.why} ({shares})"


def describe_machine(machine: MachineInfo) -> str:
    devices = ", ".join(machine.gpus) or "no GPU"
    return f"{printable(devices)}, {quantity(machine.cores, 'core')}, torch {machine.torch}"


def print_job(report: JobReport) -> None:
    console.print(f"{quantity(report.images, 'image')}, {describe_machine(report.machine)}")
    print_table(("measured", "images/s", "load seconds", "total seconds"), list_ways(report))
    print_table(("stage", "ms per image", "share", "ms one at a time"), list_stages(report))
    last, rates = report.runs[-1], [run.images_per_second for run in representative(report.runs)]
    print_table(("seconds", "p50", "p95", "p99"), list_latencies(last, report.single_image))
    print_quarters(last)
    on_gpus = max((sum(sample.gpu_used_bytes) for sample in last.samples), default=0)
    of_workers = max((sample.workers_bytes for sample in last.samples), default=0)
    print(f"peak memory: {on_gpus >> 20} MiB on GPUs, {of_workers >> 20} MiB of the host for workers")
    spread = f"{min(rates):.1f} to {max(rates):.1f}"
    console.print(f"last run, steady part: {describe_limit(last.steady)}")
    print(
        f"{report.images_per_second:.1f} images/s ({spread}), {report.ratio:.1f} times as fast as one image at a time"
    )


def list_ways(report: JobReport) -> list[tuple[object, ...]]:
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


def list_stages(report: JobReport) -> list[tuple[object, ...]]:
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
    axes.set(xlabel="GPUs", ylabel="images/s, middle 70 %", xticks=[point.gpus for point in report.points])
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


def draw_inputs(report: InputsReport, picture: Path) -> None:
    """Draw the rate of each kind of files beside that of the workers fed from memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes, places = figure.subplots(), range(len(report.inputs))
    fed = [each.memory_images_per_second or 0.0 for each in report.inputs]
    axes.bar([place - 0.2 for place in places], fed, 0.4, color="lightgray", label="workers fed from memory")
    rates = [each.steady.images_per_second for each in report.inputs]
    axes.bar([place + 0.2 for place in places], rates, 0.4, label="from files to results")
    axes.set_xticks(list(places), [f"{each.name}\n{each.steady.limited_by}" for each in report.inputs])
    axes.set(ylabel="images/s, middle 70 %")
    axes.legend()
    figure.savefig(picture)
