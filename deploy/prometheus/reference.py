"""Writes the reference of metrics and alerts from the code and the rules, so that they always agree:

python deploy/prometheus/reference.py > docs/metrics.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from daemon.monitoring.metrics import Metrics

RULES = Path(__file__).parent / "rules" / "visiond.yml"

UNITS = {  # by the end of a name, without _total; the longest comes first
    "_timestamp_seconds": "Unix seconds",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_celsius": "degrees Celsius",
    "_joules": "joules",
    "_watts": "watts",
    "_ratio": "0 to 1",
}
LABELS = {
    "address": "of the page, as in `[page] listen`",
    "bin": "`A`, `B`, `C`, or `other` for bins of a custom rule",
    "cause": "`power` (its limit, or the supply's), `heat`, `hardware` (of another kind)",
    "device": "as in the configuration: `cpu`, `cuda:0`, or a group, `cuda:0+cuda:1`",
    "error": "`corrected`, `uncorrected`",
    "folder": "a folder that the daemon writes to, by its key in daemon.toml: `output.results`, `state.path`, …",
    "gpu": "the GPU's number in PCI order; of a MIG device `0:1`",
    "inbox": "the inbox's `name`; without one, its path",
    "kind": "of memory: `total`, `used`, or `peak`, the most since the start; of requests to the page: `page`, `live` (the "
    "line that open pages ask for every two seconds), `search` (/api/search, and the gallery with words or filters), "
    "`picture`, `file` (originals, downloads, and what a page needs besides), `upload`, `api` (the other addresses for "
    "programs), `other` (without the token, or no address of the page)",
    "look": "name of a `[[second_look]]` table",
    "name": "the GPU's name",
    "notice": "the kind of notice that a stage's weights have: `demonstration`, `random`, `other`",
    "outcome": "of images: `done`, `failed`, `skipped`, `gone`; of a reload: `done`, `refused`; of second "
    "looks: `done`, `failed`; of uploads: `accepted`, `repeated`, `refused`",
    "part": "[what limits](monitoring.md#what-limits-the-rate): `input`, `read`, `decode`, `gpu`, `workers`, `publish`",
    "preparation": "`plan`: a size of batches that was new to a thread, for which cuDNN plans its convolutions; "
    "`recording`: a CUDA graph; `compilation`: a kernel that was not in the folder of compiled ones",
    "reason": "of images: see [Why an image failed](inboxes.md#why-an-image-failed); of a worker's loss: `died`, `timeout`, "
    "`load` (before it was ready), `sharing` (a worker was lost that shared its GPU), `memory` (its GPU had too little), "
    "`wrong` (its answers to known images were wrong); "
    "of a refused upload, with [its status](http.md#an-upload-and-its-result): `request`, `cut` (400), `inbox` (403, 404), "
    "`changed` (409), `size` (413), `format` (415), `busy`, `waiting`, `disk` (429), `away`, `ledger` (503)",
    "segment": "its stages, joined by `+`",
    "sink": "`jsonl`, `webhook`, `store`, `captions`, `hocr`, `alto`, `xmp`, `xmp-adobe`, `label-studio`, `lance`, `yolo`",
    "stage": "`ocr`, `yolo`, `clip`, `blip`, another stage of yours, or the name of a second look",
    "state": "`loading`, `ready`, `silent` (no heartbeat), `waiting` (for a restart), `closed`",
    "status": "the class of an answer's status: `2xx`, `3xx`, `4xx`, `5xx`",
    "task": "of upkeep: `verify`, `backup`, `upload`, `forget`, `prune`, `vacuum`",
    "uuid": "the GPU's UUID",
    "version": "of visiond",
    "worker": "segment and number of its slot",
}


@dataclass(frozen=True)
class Described:
    name: str  # as exported
    kind: str
    labels: list[str]
    unit: str
    meaning: str


def list_metrics() -> Iterator[Described]:
    """Every metric of the daemon, in the order of the code. Labels without a value yet are only known to
    the library's own objects."""
    for collector in Metrics().registry._collector_to_names:
        for family in collector.collect():
            known: list[str] = [*getattr(collector, "_labelnames", ()), *getattr(family, "_labelnames", ())]
            shown = [label for sample in family.samples for label in sample.labels if label != "le"]
            end = {"counter": "_total", "info": "_info"}.get(family.type, "")
            unit = next((unit for suffix, unit in UNITS.items() if family.name.endswith(suffix)), "")
            yield Described(
                family.name + end, family.type, list(dict.fromkeys(known + shown)), unit, family.documentation
            )


def write_markdown() -> str:
    """docs/metrics.md."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    metrics = [
        [f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.unit, m.meaning]
        for m in list_metrics()
    ]
    alerts = [
        [
            f"[{rule['alert']}](alerts.md#{rule['alert'].lower()})",
            rule["labels"]["severity"],
            rule.get("for", "0m"),
            _code(rule["expr"]),
        ]
        for rule in rules
        if "alert" in rule
    ]
    records = [[f"`{rule['record']}`", _code(rule["expr"])] for rule in rules if "record" in rule]
    parts = [
        "# Metrics and alerts",
        "<!-- Generated by `python deploy/prometheus/reference.py > docs/metrics.md`; change "
        "daemon/monitoring/metrics.py and deploy/prometheus/rules/visiond.yml instead. -->",
        "`/metrics` serves these for Prometheus, at `[http] listen`. [Monitoring](monitoring.md#prometheus-and-grafana) "
        "explains how to set up Prometheus,\nGrafana and the alerts.",
        "## Metrics",
        "Counters begin at 0 at each start of the daemon, for every value of their labels that is known then. Histograms\n"
        "have the usual three series: `_bucket`, `_sum` and `_count`. Without a unit, a metric is a number of things.",
        _table(["metric", "type", "labels", "unit", "meaning"], metrics),
        "## Labels",
        "Values come from closed sets, never from the path of a file or the text of an error.",
        _table(["label", "values"], [[f"`{label}`", text] for label, text in LABELS.items()]),
        "## Alerts",
        "`deploy/prometheus/rules/visiond.yml` has the reason for each threshold. An alert fires when its expression has "
        "been true\nfor the time in the third column.",
        _table(["alert", "severity", "for", "expression"], alerts),
        "## Recording rules",
        "What the alerts use, computed at each evaluation.",
        _table(["name", "expression"], records),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell or '–' for cell in line)} |" for line in lines)


def _code(expression: Any) -> str:
    return f"`{' '.join(expression.split())}`".replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(write_markdown())
