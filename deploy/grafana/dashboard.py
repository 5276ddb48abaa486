"""Generates the Grafana dashboard, as classic JSON (Grafana 10 and later):

    python deploy/grafana/dashboard.py > deploy/grafana/visiond.json

`M` in a query is replaced by a selector for the machines that are chosen in the menu "instance".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

UID = "visiond"
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
MACHINES = 'instance=~"$instance"'
COLUMNS = 24  # of Grafana's grid
IMAGES_PER_SECOND = "suffix: images/s"


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    unit: str
    queries: dict[str, str]  # legend → PromQL
    width: int = 12
    kind: str = "timeseries"
    stacked: bool = False


def quantiles(histogram: str) -> dict[str, str]:
    """Queries for the 50th, 95th and 99th percentile of a histogram."""
    rates = f"sum by (le) (rate({histogram}_bucket{{M}}[$__rate_interval]))"
    return {f"p{share}": f"histogram_quantile(0.{share}, {rates})" for share in (50, 95, 99)}


def mean(histogram: str, by: str) -> str:
    return (
        f"sum by ({by}) (rate({histogram}_sum{{M}}[$__rate_interval]))"
        f" / sum by ({by}) (rate({histogram}_count{{M}}[$__rate_interval]))"
    )


def figure(title: str, description: str, unit: str, query: str) -> Panel:
    return Panel(title, description, unit, {title: query}, width=4, kind="stat")


# fmt: off
ROWS: dict[str, list[Panel]] = {
    "Now": [
        figure("Done", "Images that became DONE.", IMAGES_PER_SECOND,
               'sum(rate(visiond_images_total{M, outcome="done"}[$__rate_interval]))'),
        figure("Pending", "Images in the ledger that are not finished.", "short", "sum(visiond_images_pending{M})"),
        figure("Oldest pending", "Age of the image that has waited longest.", "s",
               "max(visiond_oldest_pending_seconds{M})"),
        figure("Since last success", "Grows while no image becomes DONE. Normal if nothing is pending.", "s",
               "time() - max(visiond_last_success_timestamp_seconds{M} > 0)"),
        figure("Workers not ready", "Loading, silent, waiting for a restart, or closed.", "short",
               'sum(visiond_workers{M, state!="ready"})'),
        figure("Paused", "Daemons that wait because ledger or results cannot be written; /readyz shows why.", "short",
               "sum(visiond_paused{M})"),
    ],
    "Throughput": [
        Panel("Images by outcome", "Finished images. gone: deleted or replaced before they were read.",
              IMAGES_PER_SECOND, {"{{outcome}}": "sum by (outcome) (rate(visiond_images_total{M}[$__rate_interval]))"},
              stacked=True),
        Panel("Images by bin", "A: text, B: objects, C: everything else, other: bins of a custom rule.", IMAGES_PER_SECOND,
              {"{{bin}}": "sum by (bin) (rate(visiond_bins_total{M}[$__rate_interval]))"}, stacked=True),
        Panel("Images by stage", "Images processed by each stage.", IMAGES_PER_SECOND,
              {"{{stage}}": "sum by (stage) (rate(visiond_stage_images_total{M}[$__rate_interval]))"}),
        Panel("Results reused", "Results of a stage taken from the ledger: the same bytes and the same model.",
              "suffix: results/s",
              {"{{stage}}": "sum by (stage) (rate(visiond_reused_results_total{M}[$__rate_interval]))"}),
    ],
    "Latency": [
        Panel("Image duration", "Time from reading an image to its durable result.", "s",
              quantiles("visiond_image_duration_seconds"), width=8),
        Panel("Stage time for each image", "A stage's time for its batches, divided by their images.", "s",
              {"{{stage}}": "sum by (stage) (rate(visiond_stage_duration_seconds_sum{M}[$__rate_interval]))"
                            " / sum by (stage) (rate(visiond_stage_images_total{M}[$__rate_interval]))"}, width=8),
        Panel("Wait before reading", "Time from seeing an image to reading it: the backlog.", "s",
              quantiles("visiond_image_wait_seconds"), width=8),
    ],
    "Queues": [
        Panel("Pending and in flight", "In flight: read and not finished. Pending includes them.", "short",
              {"pending": "sum(visiond_images_pending{M})", "in flight": "sum(visiond_images_in_flight{M})"}),
        Panel("Oldest pending", "Age of the image that has waited longest.", "s",
              {"{{instance}}": "visiond_oldest_pending_seconds{M}"}),
        Panel("Queue depth", "Images waiting for a worker of each segment.", "short",
              {"{{segment}}": "sum by (segment) (visiond_queue_depth{M})"}),
        Panel("Slab", "Bytes of images in flight, and the budget for them. Full: the GPUs are the limit.", "bytes",
              {"used {{instance}}": "visiond_slab_used_bytes{M}", "size {{instance}}": "visiond_slab_size_bytes{M}"}),
    ],
    "Batches": [
        Panel("Batch size", "Average number of images in a batch; grows with the load.", "short",
              {"{{segment}}": mean("visiond_batch_images", "segment")}),
        Panel("Batches halved", "Batches halved because the GPU's memory was full, since the daemon started.", "short",
              {"{{device}}": "sum by (device) (visiond_out_of_memory_total{M})"}),
    ],
    "GPUs": [
        Panel("GPU memory", "Memory of all processes on the GPU, from the driver. Peak: since the daemon started.", "bytes",
              {"{{instance}} cuda:{{gpu}} {{kind}}": "visiond_gpu_memory_bytes{M}"}, width=8),
        Panel("GPU utilization", "Share of time in which the GPU was busy.", "percentunit",
              {"{{instance}} cuda:{{gpu}}": "visiond_gpu_utilization_ratio{M}"}, width=8),
        Panel("GPU memory by worker", "Memory of PyTorch in each worker, without the CUDA context.", "bytes",
              {"{{instance}} {{worker}} {{kind}}": "visiond_worker_gpu_bytes{M}"}, width=8),
    ],
    "Workers": [
        Panel("Workers by state", "silent: no heartbeat; waiting: for a restart; closed: not restarted any more.", "short",
              {"{{segment}} {{state}}": "sum by (segment, state) (visiond_workers{M})"}, stacked=True, width=6),
        Panel("Workers lost", "Since the daemon started, by reason: died, timeout, load (before it was ready), or sharing"
              " (another worker was lost that shared its GPU).", "short",
              {"{{device}} {{reason}}": "sum by (device, reason) (visiond_worker_restarts_total{M})"}, width=6),
        Panel("Workers short of memory", "They wait until other programs free memory of their GPU.", "short",
              {"{{instance}} {{segment}}": "visiond_workers_short_of_memory{M}"}, width=6),
        Panel("Workers that share a GPU", "By MPS. The first lost worker ends the sharing until the next start.",
              "short", {"{{segment}}": "sum by (segment) (visiond_workers_sharing{M})"}, width=6),
        Panel("Model load", "Time that a stage's model last took to load.", "s",
              {"{{device}} {{stage}}": "max by (device, stage) (visiond_model_load_seconds{M})"}, width=6),
    ],
    "Ledger and folders": [
        Panel("Commits", "Transactions of the ledger; under load each has many images.", "suffix: commits/s",
              {"{{instance}}": "rate(visiond_ledger_commit_seconds_count{M}[$__rate_interval])"}, width=6),
        Panel("Commit time", "Duration of a transaction of the ledger, including its fsync.", "s",
              quantiles("visiond_ledger_commit_seconds"), width=6),
        Panel("Scan time", "Average duration of a scan of an inbox.", "s",
              {"{{instance}}": mean("visiond_scan_duration_seconds", "instance")}, width=6),
        Panel("Files that events missed", "Files found only by a later scan: shows whether events are reliable here.", "short",
              {"found {{instance}}": "visiond_reconcile_found_total{M}",
               "overflows {{instance}}": "visiond_watch_overflows_total{M}"}, width=6),
        Panel("Folders that cannot be read", "They are skipped with all files in them; `visiond status` lists them.", "short",
              {"{{instance}} {{inbox}}": "visiond_unread_folders{M}"}, width=6),
        Panel("Inboxes away", "1: the inbox cannot be read or does not answer; its images wait, and no other ones.", "short",
              {"{{instance}} {{inbox}}": "visiond_inbox_away{M}"}, width=6),
        Panel("Disk space left", "Share of the disk that is free, for each folder that the daemon writes to.", "percentunit",
              {"{{instance}} {{folder}}": "visiond_disk_free_bytes{M} / visiond_disk_size_bytes{M}"}, width=6),
        Panel("Watchdog not fed", "Times since the daemon started: images were in flight, and none came through.", "short",
              {"{{instance}}": "visiond_watchdog_missed_total{M}"}, width=6),
    ],
    "Processes": [
        Panel("Memory", "Resident memory of the daemon and of each worker.", "bytes",
              {"{{instance}} daemon": "process_resident_memory_bytes{M}",
               "{{instance}} {{worker}}": "visiond_worker_resident_bytes{M}"}, width=24),
    ],
    "Failures": [
        Panel("Failed by reason", "Images that FAILED since the daemon started.", "short",
              {"{{reason}}": 'sum by (reason) (visiond_images_total{M, outcome="failed"})'}, width=6, stacked=True),
        Panel("Skipped by reason", "Files that are not images, since the daemon started.", "short",
              {"{{reason}}": 'sum by (reason) (visiond_images_total{M, outcome="skipped"})'}, width=6, stacked=True),
        Panel("Attempts repeated", "Attempts that failed with a temporary error, since the daemon started.", "short",
              {"{{reason}}": "sum by (reason) (visiond_retries_total{M})"}, width=6, stacked=True),
        Panel("Upkeep failed", "Tasks that failed since the daemon started; `visiond status` shows why.", "short",
              {"{{task}}": "sum by (task) (visiond_upkeep_failures_total{M})"}, width=6, stacked=True),
        Panel("Sinks behind", "Published records that a sink does not have yet; `visiond status` shows why.", "short",
              {"{{instance}} {{sink}}": "visiond_sink_records_behind{M}"}, width=12),
        Panel("Last success of each sink", "Seconds since it last took records; 0: never.", "s",
              {"{{instance}} {{sink}}": "(time() - visiond_sink_last_success_timestamp_seconds{M}) * "
                                        "(visiond_sink_last_success_timestamp_seconds{M} > bool 0)"}, width=12),
    ],
}
# fmt: on


def build() -> dict[str, Any]:
    """The dashboard in Grafana's classic model."""
    return {
        "uid": UID,
        "title": "visiond",
        "description": "Generated by deploy/grafana/dashboard.py.",
        "tags": ["visiond"],
        "schemaVersion": 38,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": [{"id": number, **panel} for number, panel in enumerate(_place(ROWS), 1)],
    }


def _variables() -> list[dict[str, Any]]:
    """Two menus: the data source, and the machines in it."""
    query = "label_values(visiond_build_info, instance)"
    return [
        {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Machine",
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "instance"},
            "refresh": 2,  # whenever the time range changes
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _place(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """Rows and their panels from left to right, with their places in the grid."""
    y = 0
    for title, panels in rows.items():
        yield {"type": "row", "title": title, "collapsed": False, "panels": []} | _at(0, y, COLUMNS, 1)
        x, y = 0, y + 1
        for panel in panels:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            yield _panel(panel) | _at(x, y, panel.width, height)
            x += panel.width
        y += height


def _at(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "colorMode": "none",
        "graphMode": "area",
    }
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 25 if panel.stacked else 5
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": fill,
            "showPoints": "never",
            "stacking": stacking,
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": SOURCE,
                "legendFormat": legend,
                "expr": _expression(query),
            }
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _expression(query: str) -> str:
    return query.replace("{M", "{" + MACHINES)


if __name__ == "__main__":
    json.dump(build(), sys.stdout, indent=2, ensure_ascii=False)
    print()
