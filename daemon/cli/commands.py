"""The sub-commands of `visiond`. Each explains itself with an example; --json gives what programs can read."""

from __future__ import annotations

import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from daemon import __version__
from daemon.cli.bench import bench
from daemon.cli.display import (
    console,
    errors,
    forgive_standard_error,
    print_chores,
    print_error,
    print_json,
    print_listing,
    print_notices,
    print_older_settings,
    print_put_back,
    print_sinks,
    print_table,
    print_unread,
    say,
    show_record,
    standard_output,
    tell_why_failed,
)
from daemon.cli.models import models_app, train_app
from daemon.cli.options import ConfigOption, ForceOption, JsonOption, find_config, read_config
from daemon.cli.prune import prune
from daemon.cli.recovery import backup, repair, verify
from daemon.cli.run import run
from daemon.errors import ConfigError, VisiondError
from daemon.hints import quantity
from daemon.jobs import JobStatus
from daemon.ledger.soundness import MOST
from daemon.monitoring.notices import list_notices
from daemon.system.log import is_json

app = typer.Typer(
    name="visiond",
    help="Takes every image of a drop folder through OCR, YOLO, CLIP and BLIP on all the GPUs, and loses none.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models_app, name="models")
app.add_typer(train_app, name="train")


class Format(StrEnum):
    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"


class State(StrEnum):
    pending = "pending"
    done = "done"
    failed = "failed"
    skipped = "skipped"
    gone = "gone"


def main() -> None:
    """Run a sub-command. An error of ours is a sentence, and an exit status as in sysexits.h."""
    forgive_standard_error()
    try:
        with standard_output():
            app()
    except SystemExit as ending:
        sys.exit(os.EX_USAGE if ending.code == 2 else ending.code)
    except VisiondError as error:
        for line in str(error).splitlines():
            print_error(line)
        sys.exit(error.exit_status)
    except Exception as error:  # noqa: BLE001 - the top of the process
        if is_json():
            import structlog

            structlog.get_logger().critical("visiond has a bug; please report it", exc_info=error)
        else:
            traceback.print_exception(error)
        sys.exit(os.EX_SOFTWARE)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"visiond {__version__}")
        raise typer.Exit


app.command()(run)


@app.command()
def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show counts by state, rate, time to go and workers: from the running daemon or, if none runs, from the ledger.

    Example: visiond status
    """
    from daemon import control

    snapshot = control.find_status(read_config(config))
    if as_json:
        print_json(snapshot)
        return
    console.print(snapshot.sentence())
    if snapshot.failed:
        tell_why_failed()
    if snapshot.unread:
        print_unread(snapshot)
    for line in list_notices(snapshot.notices.items()):
        console.print(f"[yellow]{say(line)}[/yellow]")
    if snapshot.workers:
        print_table(
            ("worker", "device", "state", "batches", "last trouble"),
            ((w.name, w.device + ", shared" * w.shared, w.progress, w.batches, w.cause) for w in snapshot.workers),
        )
    if snapshot.sinks:
        print_sinks(snapshot.sinks)
    if tried := [chore for chore in snapshot.upkeep if chore.tried_at]:
        print_chores(tried)


@app.command("list")
def list_images(
    status: Annotated[
        State | None, typer.Option("--status", "-s", case_sensitive=False, help="Only files in this state.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MOST, help="How many, newest first.")] = 50,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List files by the state of their newest version, newest first, with the reason if they have no result. When piped: one
    tab-separated line per file, with number, state, file, and bin or reason.

    Example: visiond list --status failed
    """
    from daemon import control

    with control.open_reader(read_config(config)) as reader:
        records = list(reader.newest(JobStatus[status.upper()] if status else None, limit))
    if as_json:
        print_json([record.document() | {"location": record.location.decode(errors="replace")} for record in records])
        return
    print_listing(
        ("id", "state", "file", "bin or reason"),
        ((r.id, r.status.name, os.fsdecode(r.location), r.summary) for r in records),
    )
    print_notices((model.stage, model.notice) for record in records for model in record.models)
    if len(records) == limit:
        errors.print(f"These are the newest {limit}; --limit shows more.")


@app.command()
def show(
    image: Annotated[str, typer.Argument(help="The image's path, as it is or within its inbox, its name, or its number.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything known about one image: results, every criterion of its bin, each stage's time.

    Example: visiond show inbox/a.jpg
    """
    from daemon import control

    with control.open_reader(read_config(config)) as reader:
        record = control.find_whole(reader, image)
    if as_json:
        sys.stdout.buffer.write(record.sidecar)
    else:
        show_record(record)


@app.command()
def retry(
    images: Annotated[list[str] | None, typer.Argument(help="Failed images, named as for `show`.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every failed image.")] = False,
    config: ConfigOption = None,
) -> None:
    """Queue failed images again, with a fresh set of attempts.

    Example: visiond retry --all
    """
    from daemon import control

    settings = read_config(config)
    if bool(images) == every:
        raise typer.BadParameter("name images or give --all, but not both")
    with control.open_reader(settings) as reader:
        ids = reader.failed_ids() if every else [control.find_ended(reader, n, JobStatus.FAILED).id for n in images or []]
    print_put_back(control.put_back(settings, JobStatus.FAILED, ids), len(set(ids)))


@app.command()
def redo(
    images: Annotated[list[str] | None, typer.Argument(help="Images that are done, named as for `show`.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every image that is done.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Images whose models, bin or criteria would differ now.")] = False,
    config: ConfigOption = None,
) -> None:
    """Annotate finished images again with the current configuration. Answers of models that have not changed are used again,
    and each image keeps its result until it has a new one.

    Example: visiond redo --stale
    """
    from daemon import control
    from daemon.recovery.redo import choose, choose_stale

    settings = read_config(config)
    if bool(images) + every + stale != 1:
        raise typer.BadParameter("give exactly one of these: images, --all, --stale")
    with control.open_reader(settings) as reader:
        if images:
            choice = choose((control.find_ended(reader, name, JobStatus.DONE) for name in images), settings)
        elif stale:
            choice = choose_stale(reader, settings)
        else:
            choice = choose(reader.newest_done(with_results=False), settings)
    print_put_back(control.put_back(settings, JobStatus.DONE, choice.ids), len(set(choice.ids)))
    for why, count in choice.left.items():
        errors.print(f"{quantity(count, 'image')} left as before: {why}.")
    daemon = control.find_snapshot(settings) if stale and choice.ids else None
    if daemon and daemon.settings_digest not in ("", choice.settings_digest):
        print_older_settings()


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write; - for standard output.")],
    format: Annotated[
        Format | None, typer.Option("--format", "-f", help="By default the format of the file's suffix; csv for -.")
    ] = None,
    bin: Annotated[str, typer.Option("--bin", help="Only images of this bin.")] = "",
    ratio: Annotated[
        str, typer.Option("--ratio", help="A mix of bins, e.g. A=0.4,B=0.4,C=0.2: as many images as it allows.")
    ] = "",
    force: ForceOption = False,
    config: ConfigOption = None,
) -> None:
    """Write all results to one file, with a row for each image: counts, texts, labels, captions and bins; parquet also has
    boxes, scores and embeddings; jsonl has everything. If a file changed in its inbox, its row is the newest version's, if that
    is DONE. The columns text_boxes and text_area_ratio are the values for bin A, without doubtful lines and single signs; text
    has every line.

    Example: visiond export --format parquet --ratio A=0.4,B=0.4,C=0.2 results.parquet
    """
    from daemon import control
    from daemon.cli.progress import Progress
    from daemon.ledger.files import STDOUT
    from daemon.results.export import export_records, format_of, parse_ratio

    chosen = format.value if format else format_of(file)
    with control.open_reader(read_config(config)) as reader, Progress("rows") as progress:
        written = export_records(
            reader, file, chosen, bin, parse_ratio(ratio), progress.step, force=force, warn=lambda text: errors.print(say(text))
        )
        left_out = sum(reader.bin_counts().values()) - written if ratio else 0
    if file != STDOUT:
        print(f"{quantity(written, 'image')} in {file}")
    if ratio:
        errors.print(f"{quantity(left_out, 'image')} left out to keep the mix.")


for command in (backup, verify, repair, prune):
    app.command()(command)


@app.command()
def gpus(as_json: JsonOption = False) -> None:
    """List the GPUs: memory, compute capability, load, processes.

    Example: visiond gpus --json
    """
    from daemon.system.gpus import list_gpus

    found = list_gpus()
    if as_json:
        print_json(found)
    elif not found:
        print("No NVIDIA GPU is visible; stages run on the CPU.")
    else:
        print_table(
            ("device", "name", "total MiB", "used MiB", "free MiB", "capability", "busy", "processes"),
            (
                (
                    gpu.device,
                    gpu.name,
                    gpu.total_bytes >> 20,
                    gpu.used_bytes >> 20,
                    gpu.free_bytes >> 20,
                    gpu.compute_capability,
                    "-" if gpu.utilisation is None else f"{gpu.utilisation:.0%}",
                    ", ".join(map(str, gpu.processes)) or "-",
                )
                for gpu in found
            ),
        )


@app.command()
def plan(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show which devices `run` would place the stages on, and why.

    Example: visiond plan
    """
    from daemon.layout import Layout

    placement = Layout.of(read_config(config)).placement
    if as_json:
        print_json(placement)
        return
    print_table(("stages", "devices"), ((" → ".join(s.stages), ", ".join(s.devices)) for s in placement.segments))
    print(placement.why)


@app.command()
def check(
    config: ConfigOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check files and folders only; do not build the stages.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the configuration and the machine, build each stage and try it on one page, and report each problem with its fix.
    Exits 78 if `run` would not work.

    Example: visiond check --config /etc/visiond/daemon.toml
    """
    from daemon.cli.check import Finding, examine

    findings: list[Finding] = []
    try:
        for finding in examine(read_config(config), find_config(config), quick=quick):
            findings.append(finding)
            if not as_json:
                colour = {"ok": "green", "warning": "yellow", "error": "red"}[finding.grade]
                console.print(f"[{colour}]{finding.grade:8}[/{colour}]{say(finding.text)}")
    except ConfigError as error:
        if not as_json:
            raise
        findings += [Finding("error", line) for line in str(error).splitlines()]
    if as_json:
        print_json(findings)
    raise typer.Exit(os.EX_CONFIG if any(finding.grade == "error" for finding in findings) else 0)


@app.command()
def samples(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 24,
    seed: Annotated[int, typer.Option("--seed", "-s", help="The same seed gives the same images.")] = 0,
    standard: Annotated[
        bool, typer.Option("--standard-job", help="The benchmark's images: 1280×960, 12 lines of text.")
    ] = False,
) -> None:
    """Write synthetic images, and list what is on them in .truth.jsonl, a hidden file that an inbox ignores.

    Example: visiond samples inbox --count 100 --seed 1
    """
    from daemon.cli.progress import Progress
    from daemon.ledger.files import written_into
    from stages.training import scenes

    with written_into(folder), Progress("images", total=count) as progress:
        write = scenes.standard_job if standard else scenes.write_samples
        write(folder, count, seed, progress.step)
    print(f"{quantity(count, 'image')} in {folder}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where to work; existing files stay.")] = Path("demo"),
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sample images.")] = 24,
) -> None:
    """Run sample images and two photographs through the daemon with the mini pack, and print a table of the results.

    Example: visiond demo
    """
    from daemon.cli.demo import run_demo

    run_demo(folder, count)


app.command()(bench)
