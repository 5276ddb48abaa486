"""The sub-commands of `visiond`.

A docstring is the text that --help prints. Its first paragraph is also the line in the list of commands.
Typer keeps the line breaks of the others, so these are short enough for a terminal of 80 columns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from daemon import __version__
from daemon.cli.bench import bench
from daemon.cli.cluster import ray_app
from daemon.cli.install import bundle, install, uninstall
from daemon.cli.labels import labels_app, score
from daemon.cli.looking import duplicates, follow, page, search
from daemon.cli.models import models_app, train_app
from daemon.cli.recovery import backup, prune, redo, repair, retry, verify
from daemon.cli.results import export, list_images, show, status
from daemon.cli.run import compare, run
from daemon.cli.setup import setup
from daemon.cli.tuning import plan, tune, warm
from daemon.core.errors import ConfigError, NotRunning, VisiondError, exit_status_of, explain_passing
from daemon.core.hints import quantity
from daemon.terminal.display import (
    Finding,
    forgive_standard_error,
    print_error,
    print_finding,
    print_json,
    print_rows,
    standard_output,
)
from daemon.terminal.options import (
    ConfigOption,
    JsonOption,
    find_config,
    flag,
    option,
    read_config,
    read_roughly,
)
from daemon.terminal.progress import Progress

GPUS_SECONDS = 2.0  # that `visiond gpus` waits for the daemon
UUID_SHOWN = 12  # characters, which are enough to choose a GPU by

app = typer.Typer(
    name="visiond",
    help="Watch folders for images and run OCR, YOLO, CLIP and BLIP on each, on all GPUs.\n\n"
    "visiond writes one result file for each image and sorts images into bins. Settings: daemon.toml. Documentation: docs/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class WithExample(TyperCommand):
    """A command that shows its first example if an argument is missing; an export that of its format."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            examples = (self.help or "").partition("Examples:\n")[2].splitlines()
            if not error.message and examples:  # other errors say what is wrong
                example = examples[0].strip()
                if format := ctx.params.get("format"):
                    example = f"visiond {ctx.info_name} --format {format} exported"
                error.message = f"For example: {example}"
            raise


def main() -> None:
    """Run a sub-command. A VisiondError is printed as one
    sentence and ends with an exit status of sysexits.h."""
    forgive_standard_error()
    try:
        with standard_output():
            command_tree()()
    except SystemExit as ending:
        sys.exit(os.EX_USAGE if ending.code == 2 else ending.code)
    except VisiondError as error:
        for line in str(error).splitlines():
            print_error(line)
        sys.exit(exit_status_of(error))
    except Exception as error:  # noqa: BLE001 - the top of the process
        if trouble := explain_passing(error):
            print_error(trouble)
            sys.exit(os.EX_IOERR)
        from daemon.system.log import is_json

        if is_json():
            import structlog

            structlog.get_logger().critical("visiond has a bug; please report it", exc_info=error)
        else:
            traceback.print_exception(error)
        sys.exit(os.EX_SOFTWARE)


@functools.cache
def command_tree() -> Callable[[], object]:
    """The sub-commands with their options, to be called with this process's arguments. Typer reads the signature of every
    function for it, which takes 20 ms; the tests do this once for all processes that they fork."""
    return typer.main.get_command(app)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, flag("--version", "Print the version and exit.")] = False) -> None:
    if show:
        print(f"visiond {__version__}")
        raise typer.Exit


def reload(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Let the running daemon read its configuration again.

    Some settings change at once. Others, such as those of models, are listed
    and wait for a restart. A configuration with problems changes nothing, and
    the command exits with 78. `systemctl reload visiond` does the same.

    Examples:
      visiond reload
      visiond reload --config /etc/visiond/daemon.toml
    """
    from daemon.server import control

    settings, problem = read_roughly(config)  # the daemon reads the file itself, and logs why it refuses it
    try:
        done = control.reload(settings)
    except NotRunning:
        if problem:
            raise problem from None
        raise
    if done.problems:
        raise ConfigError(done.problems)
    if as_json:
        print_json(done)
    else:
        print(f"Changed: {', '.join(done.changed) or 'nothing'}.")
        if done.waiting:
            print(f"Restart the daemon for these: {', '.join(done.waiting)}.")


def gpus(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the GPUs with memory, compute capability, load, processes and UUID.

    \\[pipeline] devices in daemon.toml takes the device, the UUID or part of the
    name. Of a GPU that is divided by MIG, its MIG devices are listed. --json
    also has sensors, multiprocessors, the limits of a block of threads, and
    what the workers of a running daemon have allocated and cached.

    Examples:
      visiond gpus
      visiond gpus --json
    """
    import msgspec

    from daemon.server.control import ask_status
    from daemon.system.gpus import list_gpus, read_attributes

    found = list_gpus()
    if as_json:
        attributes, snapshot = read_attributes(), None
        with contextlib.suppress(VisiondError, msgspec.ValidationError):  # of a daemon of another version
            snapshot = ask_status(read_roughly(config)[0], GPUS_SECONDS)
        documents = []
        for gpu in found:
            allocated, cached = snapshot.memory_on(gpu.uuid) if snapshot else (None, None)
            document = msgspec.to_builtins(gpu) | attributes.get(gpu.uuid.partition("-")[2], {})
            documents.append(document | {"allocated_bytes": allocated, "cached_bytes": cached})
        print_json(documents)
    elif not found:
        print("No NVIDIA GPU is visible; stages run on the CPU.")
    else:
        rows = [
            {
                "device": gpu.device,
                "name": gpu.name,
                "total MiB": gpu.total_bytes >> 20,
                "used MiB": gpu.used_bytes >> 20,
                "free MiB": gpu.free_bytes >> 20,
                "capability": gpu.compute_capability,
                "busy": "-" if gpu.utilisation is None else f"{gpu.utilisation:.0%}",
                "processes": ", ".join(map(str, gpu.processes)) or "-",
                "UUID starts with": gpu.uuid[:UUID_SHOWN],
            }
            for gpu in found
        ]
        print_rows(rows)


def check(
    config: ConfigOption = None,
    quick: Annotated[bool, flag("--quick", "Check only files and folders; do not build the stages.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that the configuration works on this machine, and list problems with their fixes.

    Reads the configuration, looks at folders, ledger, ports and GPUs, builds
    each stage and tries it on two test images. Exits with 78 if `visiond run`
    would not work.

    Examples:
      visiond check
      visiond check --config /etc/visiond/daemon.toml --quick
    """
    from daemon.cli.check import examine

    findings: list[Finding] = []
    try:
        for finding in examine(read_config(config), find_config(config), quick=quick):
            findings.append(finding)
            if not as_json:
                print_finding(finding)
    except ConfigError as error:
        if not as_json:
            raise
        findings += [Finding("error", line) for line in str(error).splitlines()]
    if as_json:
        print_json(findings)
    raise typer.Exit(os.EX_CONFIG if any(finding.grade == "error" for finding in findings) else 0)


def health(
    config: ConfigOption = None,
    ready: Annotated[bool, flag("--ready", "Ask whether images get through now, as /readyz says.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the running daemon whether it can process images.

    Exits with 0 if it can, with 1 and the reasons if not, and with 69 if no
    daemon answers. It needs no token and no address: for health checks of
    containers and of Kubernetes. A daemon that waits for room on a disk is
    healthy, and not ready: a restart would not help.

    Examples:
      visiond health
      visiond health --ready
    """
    from daemon.server import control

    answer = control.ask_health(read_roughly(config)[0], ready=ready)
    if as_json:
        print_json(answer)
    else:
        print("\n".join([answer.state, *answer.problems]))
    raise typer.Exit(answer.state in ("dead", "not ready"))


def samples(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to.")],
    count: Annotated[int, option("--count -n N", "Number of images.", min=1)] = 24,
    seed: Annotated[int, option("--seed -s N", "The same seed makes the same images.")] = 0,
) -> None:
    """Write synthetic images to try visiond on.

    What each image shows is in FOLDER/.truth.jsonl, a hidden file that an
    inbox ignores. Its boxes are left, top, right and bottom, in pixels of the
    upright image. `visiond labels import FOLDER/.truth.jsonl` takes it for
    labels of people, to try scores and trainings.

    Examples:
      visiond samples inbox
      visiond samples inbox --count 100 --seed 1
    """
    from daemon.core.files import written_into
    from stages.scenes.generator import write_samples

    with written_into(folder), Progress("images", total=count) as progress:
        write_samples(folder, count, seed, progress.step)
    print(f"{quantity(count, 'image')} in {folder}")


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to work in; existing files stay.")
    ] = Path("demo"),
    count: Annotated[int, option("--count -n N", "Number of sample images.", min=1)] = 24,
    models: Annotated[str, option("--models SET", "First run `visiond setup SET --yes` for it.")] = "",
    keep: Annotated[bool, flag("--keep", "Then serve the page with the results, until Ctrl-C.")] = False,
) -> None:
    """Process sample images and two photographs, and print a table of the results.

    Uses the mini pack, the small models inside the package, or with --models
    those of a set.

    Examples:
      visiond demo --keep
      visiond demo /tmp/demo --count 6
    """
    from daemon.cli.demo import run_demo

    run_demo(folder, count, models=models, keep=keep)


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Process images": (run, reload, check, compare, retry, redo),
    "Look at results": (status, health, list_images, search, duplicates, page, follow, show, export, score),
    "Maintain the ledger": (backup, verify, repair, prune),
    "Models and GPUs": (setup, gpus, plan, tune, warm),
    "Try it out": (demo, samples, bench),
    "Install it as a service": (install, uninstall, bundle),
}
for panel, commands in PANELS.items():
    for function in commands:
        app.command("list" if function is list_images else None, rich_help_panel=panel)(function)
app.add_typer(ray_app, name="ray", rich_help_panel="Process images")
app.add_typer(labels_app, name="labels", rich_help_panel="Look at results")
app.add_typer(models_app, name="models", rich_help_panel="Models and GPUs")
app.add_typer(train_app, name="train", rich_help_panel="Models and GPUs")
for group in (app, ray_app, labels_app, models_app, train_app):
    for each in group.registered_commands:
        each.cls = WithExample
