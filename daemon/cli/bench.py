"""The command `visiond bench`: its options, and what they choose to measure."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.files import written_into
from daemon.system.signals import INTERRUPTED
from daemon.terminal.display import errors, printable
from daemon.terminal.options import option

if TYPE_CHECKING:
    from daemon.measure.place import Place, Report


JOB, RUNS, OUTPUT = "Job", "Measurements", "Output"
MemoryOption = Annotated[
    float, option("--memory SECONDS", "Also feed the workers from memory for this long.", min=0, panel=RUNS)
]
PackOption = Annotated[
    str,
    option(
        "--pack PACK", "Name or path of a pack. Default: random weights of the published sizes.", panel=JOB
    ),
]
PipelineOption = Annotated[
    list[str] | None,
    option(
        "--pipeline LINE", 'A setting for the table pipeline, such as "mps = false". Repeatable.', panel=JOB
    ),
]

SecondLookOption = Annotated[
    Path | None,
    option(
        "--second-look FILE",
        "A TOML file with a \\[\\[second_look]] table, which is measured too.",
        panel=JOB,
    ),
]
GpusOption = Annotated[
    str,
    option("--gpus N,N", "Measure on these numbers of GPUs, such as 1,2,4,8, instead of on all.", panel=RUNS),
]
ModelsOption = Annotated[
    str,
    option(
        "--models NAME,NAME",
        "Measure each of these models alone instead; all: those that are here.",
        panel=JOB,
    ),
]
InputsOption = Annotated[
    str,
    option(
        "--inputs KIND,KIND",
        "Measure these kinds of files instead: standard, web, phone, screen, scan, mixed; or files of one format and size: "
        "phone-12, phone-48, screen-photo, screen-window, scan-jpeg, scan-tiff; or pages for OCR alone: letter, receipt.",
        panel=JOB,
    ),
]


def bench(
    folder: Annotated[
        Path, option("--folder FOLDER", "Folder to work in. Keeps images and weights for the next time.")
    ] = Path("bench"),
    count: Annotated[int, option("--count -n N", "Number of different images.", min=2, panel=JOB)] = 500,
    repeat: Annotated[
        int, option("--repeat N", "Names of each image, for a longer run.", min=1, panel=JOB)
    ] = 1,
    pack: PackOption = "",
    pipeline: PipelineOption = None,
    second_look: SecondLookOption = None,
    cold: Annotated[int, option("--cold N", "Runs without compiled kernels.", min=0, panel=RUNS)] = 1,
    warm: Annotated[int, option("--warm N", "Runs with compiled kernels.", min=0, panel=RUNS)] = 3,
    sample: Annotated[int, option("--sample N", "Images to process one at a time.", min=1, panel=RUNS)] = 20,
    single: Annotated[
        int, option("--single N", "Images to drop singly on an idle daemon.", min=2, panel=RUNS)
    ] = 100,
    memory: MemoryOption = 0,
    gpus: GpusOption = "",
    models: ModelsOption = "",
    inputs: InputsOption = "",
    json: Annotated[Path | None, option("--json FILE", "Write all figures to FILE.", panel=OUTPUT)] = None,
    plot: Annotated[
        Path | None, option("--plot FILE", "Draw rate, load and memory: a PNG.", panel=OUTPUT)
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
      visiond bench --inputs phone,screen,mixed --count 1000 --repeat 4
      visiond bench --inputs letter,receipt --pipeline 'stages = ["ocr"]'
    """
    from daemon.measure.place import Place
    from daemon.measure.report import show

    numbers, kinds = parse_numbers(gpus), parse_kinds(inputs)
    look = read_table(second_look, gpus=gpus, models=models, inputs=inputs)
    if not (kinds or models):
        refuse_too_few(count, sample, 0 if numbers else single, runs=cold + warm)
    refuse_lost_reports(json, plot)
    with written_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, pack, pipeline or (), look)
    runs = {"cold": cold, "warm": warm, "sample": sample}
    try:
        report = measure(place, count, repeat, models, kinds, numbers, runs, single, memory)
    except KeyboardInterrupt:
        errors.show_cursor()  # the daemon's progress has hidden it
        errors.print(
            f"\nStopped: nothing was reported. The next run uses what was made in {printable(folder)}."
        )
        raise typer.Exit(INTERRUPTED) from None
    show(report, folder, json, plot)


def measure(
    place: Place,
    count: int,
    repeat: int,
    models: str,
    kinds: list[str],
    numbers: list[int],
    runs: dict[str, int],
    single: int,
    memory: float,
) -> Report:
    """What the options choose: models alone, kinds of files, numbers of GPUs, or the job. runs: cold, warm and sample."""
    say = errors.print
    if models:
        from daemon.measure.models import measure_models

        listed = [name.strip() for name in models.split(",") if name.strip()]
        return measure_models(place, listed, Path("models").absolute(), progress=say)
    if kinds:
        from daemon.measure.inputs import measure_inputs

        warm = max(1, runs["warm"])
        return measure_inputs(
            place, kinds, count, repeat=repeat, runs=warm, memory_seconds=memory, progress=say
        )
    if numbers:
        from daemon.measure.scaling import measure_scaling

        return measure_scaling(place, numbers, count, repeat=repeat, **runs, progress=say)
    from daemon.measure.job import run_bench

    return run_bench(place, count, repeat=repeat, **runs, single=single, memory_seconds=memory, progress=say)


def parse_kinds(text: str) -> list[str]:
    """Kinds of files, in the order of the table. Raises BadParameter."""
    from daemon.measure.inputs import KINDS

    asked = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [kind for kind in asked if kind not in KINDS]:
        raise typer.BadParameter(
            f"--inputs does not know {', '.join(unknown)}; write some of {','.join(KINDS)}"
        )
    return [kind for kind in KINDS if kind in asked]


def parse_numbers(text: str) -> list[int]:
    """Numbers of GPUs, in rising order. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--gpus {text} is not a list of numbers; write for example --gpus 1,2,4,8")
    return sorted(set(map(int, parts)))


def read_table(file: Path | None, **others: str) -> str:
    """The text of a file that has one [[second_look]] table and nothing else. others: by name, options that
    measure without second looks. Raises BadParameter."""
    if file is None:
        return ""
    if other := next((f"--{name}" for name, given in others.items() if given), ""):
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
    from daemon.measure.job import WARM_UP

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
