"""What the commands print on a terminal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from daemon.jobs import JobStatus
from daemon.log import escape
from daemon.progress import Progress
from daemon.records import Record
from daemon.recovery import Finding

console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def say(text: object) -> str:
    """Text for the terminal: on one line, without control characters or markup of its own."""
    return escape_markup(escape(str(text)))


def print_json(content: object) -> None:
    print(msgspec.json.encode(content).decode())


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(say(cell) for cell in row))
    console.print(table)


def show_record(record: Record) -> None:
    """All that is known of one image."""
    document: dict[str, Any] = msgspec.json.decode(record.encode())
    console.print(f"[bold]{say(os.fsdecode(record.path))}[/bold]  {record.status.name}  id {record.id}")
    console.print(
        f"file  {say(os.fsdecode(record.location))}, {record.version.size} bytes, "
        f"{record.width}×{record.height} {record.format}"
    )
    if notice := document.get("notice"):
        console.print(f"[yellow]{say(notice)}[/yellow]")
    if record.status is not JobStatus.DONE:
        console.print(f"reason  {say(record.reason or '-')}: {say(record.detail or '-')} ({record.attempts} tries)")
        return
    console.print(f"caption  {say(document.get('caption', {}).get('text', '-'))}")
    console.print(f"tags  {say(', '.join(tag['label'] for tag in document.get('clip', {}).get('tags', [])) or '-')}")
    print_table(("text", "score"), ((line["text"], line["score"]) for line in document.get("ocr", {}).get("lines", [])))
    print_table(
        ("object", "score", "box"),
        ((d["label"], d["score"], [round(x) for x in d["box"]]) for d in document.get("objects", {}).get("detections", [])),
    )
    print_table(
        ("bin", "criterion", "value", "threshold", "passed"),
        (
            (name, criterion, _figure(figures["value"]), _figure(figures["threshold"]), figures["passed"])
            for name, criteria in document["bin"]["criteria"].items()
            for criterion, figures in criteria.items()
        ),
        title=f"bin {document['bin']['name']}",
    )
    print_table(
        ("stage", "seconds", "model"),
        ((stage, f"{seconds:.4f}", document["models"][stage]) for stage, seconds in document["timings"].items()),
    )


def show_findings(findings: Iterable[Finding], *, as_json: bool = False) -> Counter[str]:
    """How many sidecars are of each kind, and the names of all that are not as they should be; returns the counts."""
    counts: Counter[str] = Counter()
    amiss: list[Finding] = []
    with Progress("sidecars") as progress:
        for done, finding in enumerate(findings, 1):
            counts[finding.kind] += 1
            amiss += [finding] if finding.kind not in ("whole", "restored") else []
            progress.step(done)
    rows = [(finding.kind, finding.file.decode(errors="replace"), finding.detail) for finding in amiss]
    if as_json:
        print_json({"counts": counts, "amiss": [dict(zip(("kind", "file", "detail"), row, strict=True)) for row in rows]})
        return counts
    for kind, file, detail in rows:
        console.print(f"{kind:10}{say(file)}  {say(detail)}".rstrip())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()) or "there are no sidecars")
    return counts


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
