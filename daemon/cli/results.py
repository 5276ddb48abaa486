"""The commands that show results: `visiond status`, `list`, `show` and `export`."""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.core.labels import no_labels
from daemon.core.notices import list_notices
from daemon.ledger.record import notices_of
from daemon.ledger.soundness import MOST
from daemon.terminal.display import (
    console,
    errors,
    print_cut,
    print_failed_hint,
    print_fields,
    print_json,
    print_listing,
    print_looks,
    print_notices,
    print_sentences,
    print_sinks,
    print_unread,
    print_upkeep,
    print_warning,
    print_workers,
    printable,
    show_labels,
    show_record,
)
from daemon.terminal.options import (
    IMAGE_HELP,
    BinOption,
    BomOption,
    ConfigOption,
    Float16Option,
    ForceOption,
    FormatOption,
    JsonOption,
    LabelsOption,
    LimitOption,
    ModelsOption,
    NearOption,
    OrderOption,
    RatioOption,
    SampleOption,
    SeedOption,
    UniqueOption,
    WhereOption,
    find_config,
    flag,
    option,
    parse_near,
    read_config,
    read_config_to_look,
)

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.exports.answered import Explain
    from daemon.exports.choice import FindFirst
    from daemon.ledger.records import Reader
    from daemon.monitoring.snapshot import Snapshot
    from daemon.terminal.progress import Progress

WATCH_PATIENCE_SECONDS = 3.0  # for an answer of the daemon, before `status --watch` says that there is none
LEAST_SECONDS = 0.1  # between two looks of `status --watch`
ListedState = Literal["pending", "done", "failed", "skipped", "gone"]


def status(
    watch: Annotated[bool, flag("--watch -w", "Show them again and again in place, until Ctrl-C.")] = False,
    every: Annotated[
        float | None,
        option(
            "--every SECONDS",
            "With --watch: time between two looks. Default: 1; 10 if the output is no terminal.",
            min=LEAST_SECONDS,
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show counts, rate, remaining time and workers.

    A file that changes is a new version. Done, skipped and gone count
    versions, so they may be more than `visiond list` lists; failed counts
    files. An archive that was unpacked is skipped.

    The figures come from the running daemon or, if none is running, from
    the ledger. --watch also shows queues, stages and GPUs, and waits for a
    daemon that is gone; when piped, it prints a line for each look.

    Examples:
      visiond status
      visiond status --watch
      visiond status --json
    """
    from daemon.server import control

    if every and not watch:
        raise typer.BadParameter("--every can only be used with --watch")
    settings = read_config_to_look(config)
    if watch:
        from daemon.terminal import watching

        ask = partial(control.ask_status, settings, WATCH_PATIENCE_SECONDS)
        read = partial(control.read_status, settings)
        watching.watch(watching.StatusPoller(ask, read), every=every, as_json=as_json)
        return
    snapshot = control.find_status(settings)
    if as_json:
        print_json(snapshot)
    else:
        print_status(snapshot)


def print_status(snapshot: Snapshot) -> None:
    print_sentences(snapshot.sentence(), snapshot.limit.sentence())
    if snapshot.failed:
        print_failed_hint()
    print_sentences(snapshot.outdated_sentence())
    if snapshot.unread:
        print_unread(snapshot)
    for line in list_notices(snapshot.notices.items()):
        console.print(f"[yellow]{printable(line)}[/yellow]")
    print_workers(snapshot)
    print_sinks(snapshot)
    print_looks(snapshot)
    print_upkeep(snapshot.upkeep)


def print_unwritten(reader: Reader, image: int = 0) -> None:
    """Print that results in the ledger are not in sidecars yet. image: only of this one."""
    from daemon.ledger.publications import count_unwritten

    with reader.lend() as connection:
        count = count_unwritten(connection, image)
    if count:
        have = "1 image that is DONE has" if count == 1 else f"{count:,} images that are DONE have"
        errors.print(f"{have} no sidecar yet: `{printable(command('status'))}` shows why.")


def list_images(
    status: Annotated[
        ListedState | None,
        typer.Option(
            "--status", "--state", "-s", case_sensitive=False, help="List only files in this state."
        ),
    ] = None,
    limit: Annotated[int, option("--limit -n N", "List at most N files.", min=1, max=MOST)] = 50,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List files with their state, and their bin or the reason for a failure.

    The newest files come first. The state is that of a file's newest
    version. When the output is piped: one line per file with number, state,
    file, and bin or reason, separated by tabs.

    Examples:
      visiond list --status failed
      visiond list --limit 1000 --json
    """
    from daemon.ledger.records import open_reader

    with open_reader(read_config_to_look(config)) as reader:
        state = JobStatus[status.upper()] if status else None
        records = list(reader.newest(state, limit))
        print_unwritten(reader)
        if as_json:
            print_json([r.document() | {"location": r.location.decode(errors="replace")} for r in records])
            return
        print_listing(
            ("id", "state", "file", "bin or reason"),
            ((r.id, r.status.name, os.fsdecode(r.location), r.summary) for r in records),
        )
        print_notices(notices_of(records))
        if len(records) == limit:
            print_cut("file", limit, "newest", ("listed", "lists"))
        # The newest version of a file may have another state.
        elif state is not None and (older := reader.counts()[state] - len(records)) > 0:
            are = f"{quantity(older, 'older version')} of files {'is' if older == 1 else 'are'} {state.name} too"
            errors.print(f"{are}: `{printable(command('status'))}` counts versions, and this list has files.")


def show(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help=f"{IMAGE_HELP} Or a model's fingerprint.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything known about one image, or what a fingerprint stands for.

    That is: texts, objects, tags and caption, the criteria of its bin, and
    the time of each stage; for a failed image the reason. --json prints the
    sidecar.

    Examples:
      visiond show inbox/a.jpg
      visiond show 17 --json
      visiond show sha256:0d8b9a1c
    """
    from daemon.labels.store import LabelStore
    from daemon.ledger.records import open_reader
    from daemon.server import control

    settings = read_config_to_look(config)
    with open_reader(settings) as reader:
        if control.FINGERPRINT.fullmatch(image):
            about = control.describe_model(reader, image)
            known = {name: value for name, value in about.items() if value not in ("", {}, [])}
            print_json(about) if as_json else print_fields("", known)
            return
        record = control.find_whole(reader, image)
        print_unwritten(reader, record.id)
    if as_json:
        sys.stdout.buffer.write(record.sidecar)
        return
    show_record(record)
    with LabelStore(settings.state.path).lookup() as lookup:
        show_labels(lookup(record.digest))


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File or folder to write, or - for standard output.")
    ],
    format: FormatOption = None,
    bin: BinOption = None,
    ratio: RatioOption = "",
    where: WhereOption = None,
    sample: SampleOption = None,
    seed: SeedOption = 0,
    unique: UniqueOption = False,
    near: NearOption = "",
    order: OrderOption = "",
    limit: LimitOption = None,
    bom: BomOption = False,
    models: ModelsOption = False,
    float16: Float16Option = False,
    labels: LabelsOption = False,
    force: ForceOption = False,
    config: ConfigOption = None,
) -> None:
    """Write all results to one file, one row per image, or to a folder.

    csv has counts, texts, labels, captions and bins; parquet and lance (a
    folder) also have boxes, scores and embeddings; jsonl has the complete
    sidecars. The other formats are folders for other programs: coco, yolo,
    label-studio, cvat, huggingface and webdataset are data sets, captions,
    hocr, alto and xmp have a file for each image. A file has one row, that of
    its newest version, if that is DONE. docs/results.md describes columns and
    formats.

    Examples:
      visiond export results.parquet
      visiond export --models results.csv
      visiond export --format jsonl -
      visiond export --ratio A=0.4,B=0.4,C=0.2 results.parquet
      visiond export results.lance
      visiond export --format yolo --where "object_score('dog') > 0.8" dogs
      visiond export --unique --near 0.95 results.csv
      visiond export -f label-studio --order disagreement --limit 500 tasks
    """
    from daemon.exports.choice import ExportChoice, parse_ratio
    from daemon.exports.columns import ExportColumns
    from daemon.exports.datasets import check_target
    from daemon.exports.export import export_records, format_of
    from daemon.labels.store import LabelStore
    from daemon.ledger.records import open_reader
    from daemon.terminal.progress import Progress

    chosen = format or format_of(file)
    settings = read_config(config, needs_stages=False)
    check_target(settings, file, find_config(config))
    known = LabelStore(settings.state.path).lookup() if labels else contextlib.nullcontext(no_labels)
    with open_reader(settings) as reader, known as said, Progress("rows") as progress:
        find = partial(_find_near, settings, reader, *parse_near(near), progress) if near else None
        first = _choose_first(settings, reader, order, limit, progress)
        choice = ExportChoice(
            bin or (), parse_ratio(ratio), where or (), sample or 0, seed, unique, find, first
        )
        written = export_records(
            reader,
            file,
            chosen,
            choice,
            ExportColumns(settings.stage_names, models=models, labels=said),
            progress.step,
            inboxes={inbox.root: inbox.name for inbox in settings.inbox},
            force=force,
            mark=bom,
            half=float16,
            warn=print_warning,
        )
        print_unwritten(reader)
        left_out = sum(reader.bin_counts().values()) - written if ratio else 0
    _print_written(file, written, left_out, is_mixed=bool(ratio))


def _print_written(file: Path, written: int, left_out: int, *, is_mixed: bool) -> None:
    if str(file) != "-":
        print(f"{quantity(written, 'image')} in {file}")
    if is_mixed:
        errors.print(f"{quantity(left_out, 'image')} left out to keep the shares.")


def _choose_first(
    config: Config, reader: Reader, order: str, limit: int | None, progress: Progress
) -> FindFirst | None:
    from daemon.search.evidence import list_orders, parse_order

    if order and not parse_order(order):
        raise typer.BadParameter(f"it is one of {', '.join(list_orders())}.", param_hint="--order")
    if limit and not order:
        raise typer.BadParameter("it is for --order; --sample N takes N at random.", param_hint="--limit")
    return partial(_find_first, config, reader, order, limit, progress) if order else None


def _find_first(
    config: Config,
    reader: Reader,
    order: str,
    limit: int | None,
    progress: Progress,
    bins: Sequence[str],
    among: Collection[int] | None,
) -> tuple[Sequence[int], Explain]:
    """The images of these bins, or among these, in which something disagrees, what disagrees most first; and what says what
    that is."""
    from daemon.search.opening import make_searcher
    from daemon.search.query import Query

    progress.begin("images")
    with contextlib.closing(make_searcher(config, reader, by_meaning=False)) as searcher:
        searcher.catch_up(progress.step)
        images, ranking = searcher.all_disagreeing(Query().narrowed(bin=bins), order)
        wanted = (each for each in images if among is None or each[0] in among)
        found = array("q", chain.from_iterable(islice(wanted, limit)))
    progress.begin("rows")
    print_warning(searcher.index.trouble)
    ids, last = found[::2], 0

    def explain_next(image: int) -> Mapping[str, Any]:
        nonlocal last
        last = ids.index(image, last)
        return ranking.evidence_at(found[2 * last + 1])._asdict()

    return ids, explain_next


def _find_near(
    config: Config, reader: Reader, stage: str, near: float, progress: Progress, images: Sequence[int]
) -> Mapping[int, tuple[int, float]]:
    """Of these images, those that are near a better one of them: with its number, and how near."""
    import numpy as np

    from daemon.search.duplicates import find_duplicates
    from daemon.search.opening import open_index

    progress.begin("images")
    with open_index(config, reader, progress.step) as index:
        progress.begin("images compared")
        among = np.array(images, np.int64)
        found = find_duplicates(reader, index, near, by=stage, among=among, note=progress.step)
    progress.begin("rows")
    if found.without:
        count = quantity(len(found.without), "image")
        print_warning(
            f"{count} could not be compared, without a result of stage {stage}: `{command('duplicates')}` says more."
        )
    return found.better()
