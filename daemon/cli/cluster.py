"""`visiond ray run`: the stages over all machines of a Ray cluster, or on this one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from daemon.core.errors import InboxUnreadable
from daemon.core.hints import quantity
from daemon.core.jobs import JobStatus
from daemon.system.signals import INTERRUPTED
from daemon.terminal.display import console, count_ended, errors, printable
from daemon.terminal.options import ConfigOption, flag, option, read_config

if TYPE_CHECKING:
    from visiond.cluster import running

ray_app = typer.Typer(
    help="Process images on the machines of a Ray cluster, without a daemon.\n\n"
    "Examples:\n  visiond ray run photos results",
    no_args_is_help=True,
)


@ray_app.callback()
def ray() -> None:
    """Keeps `run` a command of its own: with one command Typer would drop its name."""


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Folder, pattern in quotes, s3:// gs:// az:// or http(s):// prefix, .tar, or a list: "
        ".parquet or .jsonl with URLs or bytes.",
    ),
]
OutputArgument = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="Folder or store prefix for the Parquet parts.")
]
ResumeOption = Annotated[bool, flag("--resume", "Go on with what an earlier run wrote into OUTPUT.")]
AddressOption = Annotated[
    str,
    option(
        "--address ADDR",
        "Ray cluster; auto: the one that runs on this machine. Default: Ray is started here for this run.",
        envvar="RAY_ADDRESS",
        show_default=False,
    ),
]
ChainsOption = Annotated[
    int,
    option(
        "--chains N",
        "Actors, each with all stages. Default: one for each GPU, or without GPUs for each machine.",
        min=0,
        show_default=False,
    ),
]
GpusOption = Annotated[float, option("--gpus-per-chain N", "GPUs of an actor. 0: use the CPU.", min=0)]
CpusOption = Annotated[float, option("--cpus-per-chain N", "CPUs that Ray keeps for an actor.", min=0)]
PartOption = Annotated[int, option("--part-images N", "Images in one Parquet part.", min=1)]
ColumnOption = Annotated[str, option("--column NAME", "Column of a list that has the URLs or the bytes.")]
KeepOption = Annotated[
    list[str] | None,
    option(
        "--keep NAME",
        "Further column of a list, or ending of texts in tars (txt), for the parts: NAME,NAME or NAME=OTHER.",
    ),
]
KeepAllOption = Annotated[bool, flag("--keep-all", "Keep all further columns, or all texts in tars.")]
ShardsOption = Annotated[
    Literal["sidecars", "images"] | None,
    option("--shards WHAT", "Also write WebDataset shards: sidecars, or images with their sidecars."),
]
Float16Option = Annotated[
    bool, flag("--float16", "Embeddings in half precision, as visiond keeps them: no value changes.")
]
AllowFailedOption = Annotated[bool, flag("--allow-failed", "Exit 0 even if some images failed.")]


@ray_app.command()
def run(
    source: SourceArgument,
    output: OutputArgument,
    config: ConfigOption = None,
    resume: ResumeOption = False,
    address: AddressOption = "local",
    chains: ChainsOption = 0,
    gpus: GpusOption = 1.0,
    cpus: CpusOption = 1.0,
    part_images: PartOption = 1000,
    column: ColumnOption = "",
    keep: KeepOption = None,
    keep_all: KeepAllOption = False,
    shards: ShardsOption = None,
    float16: Float16Option = False,
    allow_failed: AllowFailedOption = False,
) -> None:
    """Annotate all images of INPUT and write a row for each into OUTPUT.

    Rows have the columns of `visiond export` with status, reason and detail;
    an image that failed is a row too. Exits with 0 if all succeeded, 1 if
    some failed. Needs: pip install 'visiond\\[ray]'. docs/cluster.md shows how
    to use several machines.

    Examples:
      visiond ray run photos results
      visiond ray run s3://bucket/photos s3://bucket/rows --address auto
      visiond ray run 'shards/*.tar' results --shards images --keep txt
      visiond ray run list.parquet results --column URL --keep-all
    """
    from daemon.terminal.progress import Progress
    from visiond.cluster.job import ClusterJob, Shards
    from visiond.cluster.running import run as run_job
    from visiond.cluster.watching import DriverEnded, become_driver

    settings = read_config(config)
    job = ClusterJob(
        source,
        output,
        settings,
        resume=resume,
        address=address,
        chains=chains,
        gpus_per_chain=gpus,
        cpus_per_chain=cpus,
        part_images=part_images,
        column=column,
        keep=tuple(keep or ()),
        keep_all=keep_all,
        shards=Shards(shards or ""),
        float16=float16,
    )
    try:
        end = become_driver()
    except DriverEnded as ended:
        raise typer.Exit(ended.status) from None
    try:
        with Progress("images") as progress:
            result = run_job(job, progress.step, progress.load)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing
        errors.print("Stopped. The same command with --resume does the rest.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        end()
    _print_result(result, printable(output))
    if result.unread:
        raise InboxUnreadable(result.unread, result.outcomes)
    raise typer.Exit(1 if result.outcomes[JobStatus.FAILED] and not allow_failed else 0)


def _print_result(result: running.Result, output: str) -> None:
    rate = result.outcomes.total() / result.seconds if result.seconds else 0.0
    parts = quantity(result.parts, "part")
    console.print(
        f"{count_ended(result.outcomes)} in {result.seconds:.1f} s, {rate:,.1f} images/s; {parts} written to {output}"
    )
    if result.finished_before:
        console.print(f"{quantity(result.finished_before, 'input')} finished by an earlier run.")
    if result.duplicates:
        console.print(f"{quantity(result.duplicates, 'input')} listed twice and processed once.")
