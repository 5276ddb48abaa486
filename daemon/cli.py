"""The command `visiond`. Every sub-command explains itself with an example; --json gives what programs can read."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from daemon import __version__, control, recovery
from daemon.config import Config, load
from daemon.display import console, errors, print_json, print_table, say, show_findings, show_record
from daemon.errors import NothingFound, VisiondError
from daemon.jobs import JobStatus
from daemon.log import set_up as set_up_log
from daemon.progress import Progress
from daemon.records import Reader

app = typer.Typer(
    name="visiond",
    help="Takes every image of a drop folder through OCR, YOLO, CLIP and BLIP on all the GPUs, and loses none.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Packs of weights: list them, pull the standard one, verify digests.", no_args_is_help=True)
app.add_typer(models_app, name="models")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The configuration; by default ./daemon.toml if there is one.", envvar="VISIOND_CONFIG"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Format(StrEnum):
    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"


def main() -> None:
    """Entry of the command. An error of ours is a sentence, and an exit status as in sysexits.h."""
    try:
        app()
    except SystemExit as ending:
        sys.exit(os.EX_USAGE if ending.code == 2 else ending.code)
    except VisiondError as error:
        for line in str(error).splitlines():
            errors.print(f"[red]visiond:[/red] {say(line)}")
        sys.exit(error.exit_status)


def read_config(path: Path | None) -> Config:
    default = Path("daemon.toml")
    return load(path or (default if default.is_file() else None))


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"visiond {__version__}")
        raise typer.Exit


@app.command()
def run(
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="Work off what is there and exit: 0 all done, 1 some failed.")] = False,
) -> None:
    """Run the daemon. SIGTERM and Ctrl-C let what is in hand finish first.

    Example: visiond run --config /etc/visiond/daemon.toml
    """
    import anyio

    from daemon.service import run_service

    settings = read_config(config)
    set_up_log(settings.log.level, settings.log.format)
    with Progress("images", shown=once) as progress:
        show = progress.show if once else None
        all_done = anyio.run(lambda: run_service(settings, once=once, show=show), backend_options={"use_uvloop": True})
    raise typer.Exit(0 if all_done or not once else 1)


@app.command()
def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Counts by state, rate, time to go and workers: from the running daemon, else from the ledger.

    Example: visiond status
    """
    settings = read_config(config)
    snapshot = control.find_status(settings)
    if as_json:
        print_json(snapshot)
        return
    console.print(snapshot.sentence())
    if snapshot.workers:
        print_table(
            ("worker", "device", "state", "batches", "last trouble"),
            ((w.name, w.device, w.state, w.batches, w.cause) for w in snapshot.workers),
        )


@app.command()
def show(
    image: Annotated[str, typer.Argument(help="Path of the image, absolute or in its inbox, or its number.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """All that is known of one image: results, every criterion of its bin, every stage's time.

    Example: visiond show inbox/a.jpg
    """
    with control.open_reader(read_config(config)) as reader:
        record = reader.find(image)
    if record is None:
        raise NothingFound(f"The ledger knows no image {image}. Give its path, or its number as in a sidecar's id.")
    if as_json:
        sys.stdout.buffer.write(record.encode())
    else:
        show_record(record)


@app.command()
def retry(
    images: Annotated[list[str] | None, typer.Argument(help="Paths or numbers of failed images.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every failed image.")] = False,
    config: ConfigOption = None,
) -> None:
    """Failed images back to pending, with all their tries.

    Example: visiond retry --all
    """
    settings = read_config(config)
    with control.open_reader(settings) as reader:
        ids = reader.failed_ids() if every else [_failed(reader, name) for name in images or []]
    if not ids and not every:
        raise typer.BadParameter("name images, or give --all")
    print(f"{control.retry(settings, ids)} images are pending again")


def _failed(reader: Reader, name: str) -> int:
    record = reader.find(name)
    if record is None or record.status is not JobStatus.FAILED:
        raise NothingFound(f"{name} is no failed image; `visiond show {name}` tells what it is.")
    return record.id


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[Format | None, typer.Option("--format", "-f", help="How; by default as the file's name ends.")] = None,
    bin: Annotated[str, typer.Option("--bin", help="Only images of this bin.")] = "",
    ratio: Annotated[
        str, typer.Option("--ratio", help="A mix of bins, e.g. A=0.4,B=0.4,C=0.2: as many images as it allows.")
    ] = "",
    config: ConfigOption = None,
) -> None:
    """All results merged into one file, a row for each image.

    Example: visiond export --format parquet --ratio A=0.4,B=0.4,C=0.2 results.parquet
    """
    from daemon.export import export_records, parse_ratio

    suffix = file.suffix.removeprefix(".")
    chosen = format.value if format else suffix if suffix in list(Format) else Format.csv.value
    with control.open_reader(read_config(config)) as reader, Progress("rows") as progress:
        count = export_records(reader, file, chosen, bin, parse_ratio(ratio), progress.step)
    print(f"{count} images in {file}")


@app.command()
def verify(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Hold the ledger against itself and every sidecar against the ledger, while no daemon runs. Exits 1 when one is
    missing, edited, or of no image in the ledger.

    Example: visiond verify
    """
    counts = show_findings(recovery.verify(read_config(config)), as_json=as_json)
    raise typer.Exit(1 if counts.keys() - {"whole"} else 0)


@app.command()
def repair(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Write missing and edited sidecars again from the ledger; if the ledger is lost or damaged, make it anew from the
    sidecars and keep the old one beside it. No model runs, and no daemon may.

    Example: visiond repair
    """
    show_findings(recovery.repair(read_config(config)), as_json=as_json)


@app.command()
def backup(file: Annotated[Path, typer.Argument(help="The file to write.")], config: ConfigOption = None) -> None:
    """Copy the ledger, which holds every result, also while the daemon runs.

    Example: visiond backup /backup/ledger.sqlite
    """
    recovery.back_up(read_config(config), file)
    print(f"the ledger as of now is in {file}")


@app.command()
def gpus(as_json: JsonOption = False) -> None:
    """The GPUs that are there: memory, compute capability, load, processes.

    Example: visiond gpus --json
    """
    from daemon.gpus import list_gpus

    found = list_gpus()
    if as_json:
        print_json([gpu.as_dict() for gpu in found])
    elif not found:
        print("No NVIDIA GPU is visible; stages run on the CPU.")
    else:
        print_table(
            ("device", "name", "total MiB", "used MiB", "free MiB", "capability", "busy", "processes"),
            (
                (
                    f"cuda:{gpu.index}",
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
    """The placement of stages on devices that `run` would take, and why.

    Example: visiond plan
    """
    from daemon.service import plan_placement

    placement = plan_placement(read_config(config))
    if as_json:
        print_json({"segments": [{"stages": s.stages, "devices": s.devices} for s in placement.segments], "why": placement.why})
        return
    print_table(("stages", "devices"), ((" → ".join(s.stages), ", ".join(s.devices)) for s in placement.segments))
    print(placement.why)


@app.command()
def check(config: ConfigOption = None) -> None:
    """Look at configuration and machine, and tell each problem with its mend. Exits 78 when `run` would not work.

    Example: visiond check --config /etc/visiond/daemon.toml
    """
    from daemon.check import examine

    findings = examine(read_config(config))
    for finding in findings:
        colour = {"ok": "green", "warning": "yellow", "error": "red"}[finding.grade]
        console.print(f"[{colour}]{finding.grade:8}[/{colour}]{say(finding.text)}")
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
    """Write synthetic images, with what is on them in truth.jsonl.

    Example: visiond samples inbox --count 100 --seed 1
    """
    from stages.training import scenes

    with Progress("images", total=count) as progress:
        write = scenes.standard_job if standard else scenes.write_samples
        write(folder, count, seed, progress.step)
    print(f"{count} images in {folder}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where to work; what is there stays.")] = Path("demo"),
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many sample images.")] = 24,
) -> None:
    """Sample images and two photographs through the daemon with the mini pack, and a table of what came out.

    Example: visiond demo
    """
    from daemon.demo import run_demo

    run_demo(folder, count, console)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def train(context: typer.Context, recipe: Annotated[str, typer.Argument(help="mini")] = "") -> None:
    """Train a pack of models: `mini` is the one inside the package. Options: visiond train mini --help

    Example: visiond train mini --out my-pack
    """
    from stages.training.recipe import Options, TrainingFailed, parse_options, train_mini

    if recipe != "mini":
        raise typer.BadParameter('the recipe there is is "mini": visiond train mini --out my-pack')
    options: Options = parse_options(context.args)
    try:
        train_mini(options, say=print)
    except TrainingFailed as error:
        raise VisiondError(str(error)) from error


@models_app.command("list")
def list_models(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The packs that are there, with what they hold.

    Example: visiond models list
    """
    from stages import packs

    settings = read_config(config)
    found = [packs.open_pack(name, settings.models.folder) for name in packs.list_packs(settings.models.folder)]
    if as_json:
        keys = ("name", "folder", "bytes", "stages", "notice")
        rows = ((p.name, str(p.folder), p.size_bytes, list(p.manifest.stages), p.notice) for p in found)
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(
            ("pack", "folder", "MiB", "stages", "note"),
            ((p.name, p.folder, p.size_bytes >> 20, ", ".join(p.manifest.stages), p.notice) for p in found),
        )


@models_app.command("pull")
def pull_models(config: ConfigOption = None) -> None:
    """Fetch the standard pack from the model hub, and record revisions and digests that every later start verifies.

    Example: visiond models pull
    """
    from daemon.check import as_model_errors
    from stages import packs

    settings = read_config(config)
    with as_model_errors():
        pack = packs.pull_standard(settings.models.folder, lambda line: print(line))
    print(f"standard pack in {pack.folder}")


@models_app.command("verify")
def verify_models(config: ConfigOption = None) -> None:
    """Hold the configured pack's files against their digests. Exits 78 and names the file when one is altered.

    Example: visiond models verify
    """
    from daemon.check import as_model_errors
    from stages import packs

    settings = read_config(config)
    with as_model_errors():
        pack = packs.open_pack(settings.models.pack, settings.models.folder)
        packs.verify(pack)
    print(f"{pack.name}: {len(pack.manifest.digests)} files are as recorded")
