"""What the commands print on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Column, Table

from daemon.core.errors import NotPrinted, ReaderGone
from daemon.core.hints import command, quantity
from daemon.core.jobs import JobStatus
from daemon.core.labels import Kind, Label, Value
from daemon.core.notices import list_notices
from daemon.system.log import escape, is_json
from stages.contract.binning import describe
from stages.registry.registry import BUILT_IN, list_variants, sort_stages

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from daemon.config.loading import Config
    from daemon.ledger.record import Record
    from daemon.monitoring.snapshot import Snapshot, UpkeepRun
    from daemon.terminal.progress import Progress

MOST_OF_A_VALUE = 100  # characters
GONE = "it was deleted or replaced before it was read; a new version follows once it no longer changes"
ENDLESS = 10_000  # columns: a program that reads from a pipe wants whole lines


class StandardOutput(io.FileIO):
    """Standard output. A failed write raises a VisiondError, whoever prints; later writes are discarded."""

    lost = False

    def write(self, data: ReadableBuffer) -> int:
        """Raises ReaderGone, NotPrinted."""
        if self.lost:  # Python flushes again at exit
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.lost = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            raise NotPrinted(f"standard output cannot be written: {error.strerror}.") from error


class StandardError(io.FileIO):
    """Standard error. A closed terminal or a full disk must not end the work that is reported there."""

    def write(self, data: ReadableBuffer) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or memoryview(data).nbytes  # None: it is full; do not wait for it
        return memoryview(data).nbytes


def forgive_standard_error() -> None:
    """From now on, what cannot be written to standard error is dropped without an error."""
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY)
    buffer = io.BufferedWriter(StandardError(fd, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """A context at whose end all that was printed has been written. Raises ReaderGone, NotPrinted."""
    if sys.stdout is None:
        raise NotPrinted("standard output is closed; redirect it, for example with >/dev/null.")
    buffer = io.BufferedWriter(StandardOutput(sys.stdout.fileno(), "w", closefd=False))
    sys.stdout = io.TextIOWrapper(
        buffer, sys.stdout.encoding, sys.stdout.errors, line_buffering=sys.stdout.isatty()
    )
    try:
        yield
    finally:
        sys.stdout.flush()


console = Console(
    soft_wrap=True, highlight=False, width=None if sys.stdout and sys.stdout.isatty() else ENDLESS
)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def printable(text: object) -> str:
    """Text for the terminal: on one line, with control characters and markup escaped."""
    return escape_markup(escape(str(text)))


def print_error(sentence: str) -> None:
    """Print the error that ended the command on standard error."""
    if not is_json():
        errors.print(f"[red]visiond:[/red] {printable(sentence)}")
        return
    import structlog

    structlog.get_logger().error(sentence)


def print_warning(text: str) -> None:
    """Print a sentence in yellow on standard error, unless it is empty."""
    if text:
        errors.print(f"[yellow]{printable(text)}[/yellow]")


def print_sentences(*texts: str) -> None:
    """Print those that are not empty, each on a line."""
    for text in filter(None, texts):
        console.print(printable(text))


def print_cut(
    noun: str, limit: int, which: str = "first", shown: tuple[str, str] = ("shown", "shows")
) -> None:
    """Print that there are more than the `limit` ones that are shown."""
    are = f"{noun} is" if limit == 1 else f"{limit:,} {noun}s are"
    errors.print(f"Only the {which} {are} {shown[0]}; --limit N {shown[1]} more.")


@dataclass(frozen=True, slots=True)
class Finding:
    grade: str  # "ok", "warning" or "error"
    text: str


def graded(grade: str, texts: Iterable[str]) -> Iterator[Finding]:
    return (Finding(grade, text) for text in texts)


def print_finding(finding: Finding) -> None:
    """Print a finding of a check."""
    color = {"ok": "green", "warning": "yellow", "error": "red"}[finding.grade]
    console.print(f"[{color}]{finding.grade:8}[/{color}]{printable(finding.text)}")


def print_json(content: object) -> None:
    print(msgspec.json.encode(content).decode())


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    console.print(make_table(columns, rows, title))


def print_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """A table of rows that name their columns. There is a row."""
    print_table(rows[0], (row.values() for row in rows))


def print_listing(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """On a terminal: a table of its width with long cells folded. When piped: one line per row,
    separated by tabs."""
    if sys.stdout.isatty():
        console.print(make_table(columns, rows), soft_wrap=False)
        return
    for row in rows:
        print(*(escape(str(cell)) for cell in row), sep="\t")


def make_table(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """A table without lines, whose cells show control characters and markup as text."""
    headers = (Column(name, overflow="fold") for name in columns)
    table = Table(*headers, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table


def print_found(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    """Print a table, unless it has no rows."""
    if found := list(rows):
        print_table(columns, found, title)


def print_upkeep(runs: Iterable[UpkeepRun]) -> None:
    """Print when each upkeep task last ran."""
    columns = ("upkeep", "last success", "last run", "seconds", "outcome", "detail")
    print_found(columns, (_describe_run(run) for run in runs if run.tried_at))


def _describe_run(run: UpkeepRun) -> tuple[object, ...]:
    when = _moment(run.succeeded_at), _moment(run.tried_at)
    return run.task, *when, run.seconds, run.outcome or "-", run.detail


def print_workers(snapshot: Snapshot) -> None:
    """Print what each worker does, and its last problem."""
    print_found(
        ("worker", "device", "state", "batches", "host MiB", "GPU peak MiB", "last problem"),
        (
            (
                w.name,
                w.device + ", shared" * w.shared,
                w.progress,
                w.batches,
                w.memory_bytes >> 20 or "-",
                w.gpu_peak_bytes >> 20 or "-",
                w.problem,
            )
            for w in snapshot.workers
        ),
    )


def print_sinks(snapshot: Snapshot) -> None:
    """Print how far each sink has come; without a running daemon also who delivers the rest."""
    rows = (
        (
            sink.name + " (no longer configured)" * (not sink.configured),
            sink.behind,
            _moment(sink.succeeded_at),
        )
        for sink in snapshot.sinks
    )
    print_found(("sink", "records behind", "last success"), rows)
    print_sentences(snapshot.new_sinks_sentence())
    if not snapshot.running and any(sink.behind for sink in snapshot.sinks if sink.configured):
        print_sentences(f"The next `{command('run')}` delivers the missing records, or logs why it cannot.")


def print_looks(snapshot: Snapshot) -> None:
    """Print how many images wait for each second look, and how many have had it."""
    print_found(
        ("second look", "stage", "model", "waiting", "done", "failed"),
        (
            (look.name, look.stage or "-", look.model or "-", look.waiting, look.done, look.failed)
            for look in snapshot.second_looks
        ),
    )


def _moment(at: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "never"
    except (OverflowError, ValueError, OSError):  # a damaged file or ledger may have any number
        return f"{at:g}"


def show_record(record: Record) -> None:
    """Print everything known about one image."""
    console.print(f"[bold]{printable(os.fsdecode(record.path))}[/bold]  {record.status.name}  id {record.id}")
    console.print(
        f"file  {printable(os.fsdecode(record.location))}, {quantity(record.version.size, 'byte')}"
        + (f", {record.width}×{record.height} {record.format}" if record.width else "")
        + (f", one of {record.pages:,} pages or frames" if record.pages > 1 else "")
    )
    console.print(f"inbox  {printable(os.fsdecode(record.inbox_path))}")
    for line in list_notices(record.notices()):
        console.print(f"[yellow]{printable(line)}[/yellow]")
    if record.status is not JobStatus.DONE:
        reason = ": ".join(filter(None, (record.reason, record.detail)))
        console.print(f"reason  {printable(reason or (GONE if record.status is JobStatus.GONE else '-'))}")
        console.print(f"attempts  {record.attempts}")
    else:
        show_result(record)


def show_result(record: Record) -> None:
    """Print the answers for an image that is DONE, and what they were made with."""
    document: dict[str, Any] = msgspec.json.decode(record.sidecar)
    show_answers(document)
    print_table(
        ("bin", "criterion", "passed"), describe(document["bin"]), title=f"bin {document['bin']['name']}"
    )
    models, known = document["models"], record.provenance()
    timings = (
        (stage, f"{seconds:.4f}", known[models[stage]].describe(), models[stage])
        for stage, seconds in document["timings"].items()
    )
    print_table(("stage", "seconds (average of its batch)", "model", "fingerprint"), timings)
    for name, look in document.get("second_looks", {}).items():
        about = f"second look {name}: {look['stage']} by {known[look['model']].describe()} {look['model']}"
        print_fields("", look.get("result") or {key: look[key] for key in ("reason", "detail")}, about)


def show_answers(document: Mapping[str, Any]) -> None:
    """Print what the stages found."""
    console.print(f"caption  {printable(document.get('caption', {}).get('text', '-'))}")
    others = document["models"].keys() - {stage.name for stage in BUILT_IN}
    captioners = list_variants("blip", others)
    for stage in captioners:
        console.print(f"{stage}  {printable(document[stage]['text'])}")
    tags = ", ".join(tag["label"] for tag in document.get("clip", {}).get("tags", []))
    console.print(f"tags  {printable(tags or '-')}")
    show_text(document.get("ocr", {}))
    objects = document.get("objects", {}).get("detections", ())
    boxes = ((found["label"], found["score"], [round(x) for x in found["box"]]) for found in objects)
    print_found(("object", "score", "box"), boxes)
    for stage in sort_stages(others - {*captioners}):
        print_fields(stage, document[stage])


def show_text(ocr: Mapping[str, Any]) -> None:
    lines = (
        (line["text"], line["score"], "guessed" * line.get("guessed", False)) for line in ocr.get("lines", ())
    )
    print_found(("text", "score", ""), lines)
    text = ([line] for line in (ocr.get("text") or "").splitlines() if line.strip())  # by a page reader
    print_found(("text",), text, title="cut at max_new_tokens" if ocr.get("cut") else None)


def show_labels(labels: Mapping[Kind, Label]) -> None:
    """Print what people say about an image."""
    for kind, label in sorted(labels.items()):
        text = printable(_in_words(label.value) or "nothing")
        console.print(f"{kind} by people ({printable(label.origin)})  {text}")


def _in_words(value: Value) -> str:
    if isinstance(value, str):
        return " / ".join(value.splitlines())
    if isinstance(value, dict):
        return ", ".join(f"{classifier}: {label}" for classifier, label in value.items())
    return ", ".join(each if isinstance(each, str) else each.label for each in value)


def print_fields(name: str, fields: Mapping[str, object], title: str | None = None) -> None:
    rows = ((key, shorten(value)) for key, value in fields.items())
    print_table((name, ""), rows, title=printable(title) if title else None)


def shorten(value: object) -> str:
    """A value of a plug-in's result, cut to the size of a cell."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MOST_OF_A_VALUE else f"{text[:MOST_OF_A_VALUE]}…"


def count_ended(outcomes: Counter[JobStatus]) -> str:
    """ "3 done, 1 failed, 0 skipped"."""
    ended = (JobStatus.DONE, JobStatus.FAILED, JobStatus.SKIPPED)
    return ", ".join(f"{outcomes[status]:,} {status.name.lower()}" for status in ended)


def print_outcomes(outcomes: Counter[JobStatus], progress: Progress, config: Config) -> None:
    """Print what a finished run did."""
    seconds = progress.seconds
    rate = (outcomes[JobStatus.DONE] + outcomes[JobStatus.FAILED]) / seconds
    console.print(
        f"{count_ended(outcomes)} in {seconds:.1f} s, {rate:,.1f} images/s; results are in {printable(config.output.results)}"
    )
    print_notices(progress.notices.items())
    print_sentences(progress.outdated)
    if outcomes[JobStatus.FAILED]:
        print_failed_hint()


def print_trial(left: int, limit: int) -> None:
    """Print what a run with --limit left for the next one."""
    if left:
        go_on = printable(command("run", "--once"))
        waits = "1 image is" if left == 1 else f"{left:,} images are"
        console.print(f"{waits} still pending because of --limit {limit}; `{go_on}` continues with them.")


def print_notices(pairs: Iterable[tuple[str, str]]) -> None:
    """Print notices on stderr, so that piped output stays as it is. pairs: of stage and notice."""
    for line in list_notices(pairs):
        print_warning(f"Note: {line}.")


def print_put_back(images: int, asked: int, *, is_running: bool) -> None:
    """Print how many of the images that were asked for are pending again. is_running: whether a daemon processes them."""
    print(f"{quantity(images, 'image')} pending again")
    if images < asked:
        errors.print(f"{quantity(asked - images, 'image')} not queued: a newer version of the file is there.")
    if images and not is_running:
        errors.print(f"No daemon is running: `{printable(command('run'))}` processes what is pending.")


def print_older_settings() -> None:
    """Print that `redo --stale` has no effect yet."""
    errors.print(
        "The running daemon has other models, thresholds or rules than this configuration has now, so these images will be as "
        f"stale as before: restart it, then run `{printable(command('redo', '--stale'))}` again."
    )


def print_unread(snapshot: Snapshot) -> None:
    """Print the folders in inboxes that cannot be read."""
    print_sentences(*(f"cannot be read: {line}" for line in snapshot.unread))
    if more := snapshot.unread_folders - len(snapshot.unread):
        console.print(f"and {more:,} more")


def print_failed_hint() -> None:
    """Print the command that lists failed images with their reasons."""
    print_sentences(f"`{command('list', '--status', 'failed')}` lists the failed images with their reasons.")
