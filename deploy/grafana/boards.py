"""The boards: their rows of panels, and what each panel asks Prometheus for.

`M` in a query is replaced by a selector for what is chosen in the board's menus.
"""

from __future__ import annotations

from panels import Board, Panel, Variable, figure, increase, mean, per_image, quantiles, rate

IMAGES_PER_SECOND = "suffix: images/s"
# A click on a series opens the board of its GPU or inbox, for the same time.
OF_SERIES = "var-instance=${__field.labels.instance}&${__url_time_range}"
ONE_GPU = {"This GPU": f"/d/visiond-gpu?var-gpu=${{__field.labels.gpu}}&{OF_SERIES}"}
ONE_INBOX = {"This inbox": f"/d/visiond-inbox?var-inbox=${{__field.labels.inbox}}&{OF_SERIES}"}
# The devices that a GPU is in: itself, and groups of GPUs.
ON_GPU = 'device=~"(.+[+])?cuda:$gpu([+].+)?"'
OF_ITS_WORKERS = f"and on (instance, worker) visiond_worker_info{{M, {ON_GPU}}}"

# fmt: off
OVERVIEW: dict[str, list[Panel]] = {
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
        Panel("What limits the rate", "Machines by the part that limits them; an idle one has none. input: the workers lack"
              " files; workers: their threads are occupied, neither GPUs nor cores are. docs/monitoring.md says what to do.",
              "short", {"{{part}}": "sum by (part) (visiond_limited_by{M})"}, width=24, stacked=True),
    ],
    "Inboxes and devices": [
        Panel("Images by inbox", "Images that became DONE, by the inbox that they came from.", IMAGES_PER_SECOND,
              {"{{instance}} {{inbox}}":
               'sum by (instance, inbox) (rate(visiond_inbox_images_total{M, outcome="done"}[$__rate_interval]))'},
              width=8, links=ONE_INBOX),
        Panel("Pending by inbox", "Images in the ledger that are not finished.", "short",
              {"{{instance}} {{inbox}}": "visiond_inbox_pending{M}"}, width=8, links=ONE_INBOX),
        Panel("Images by device", "Images in the batches that the workers of a device have answered. With stages on several"
              " devices, each of them counts an image.", IMAGES_PER_SECOND,
              {"{{instance}} {{device}}": rate("visiond_device_batch_images_total", "instance, device")}, width=8),
    ],
    "Page and uploads": [
        Panel("Requests to the page", "By what they ask for. live: the line that open pages ask for every two seconds; other:"
              " without the token, or no address of the page.", "suffix: requests/s",
              {"{{kind}}": rate("visiond_page_requests_total", "kind")}, width=8, stacked=True),
        Panel("Time until the page answers", "95th percentile of the time from a request to the beginning of its answer.", "s",
              {"{{kind}}": "histogram_quantile(0.95, sum by (le, kind) "
                           "(rate(visiond_page_request_duration_seconds_bucket{M}[$__rate_interval])))"}, width=8),
        Panel("Requests that the page refused", "4xx: no token, no such image, or a mistake of the program that asks; 5xx: the"
              " page could not answer, and its log says why.", "short",
              {"{{kind}} {{status}}": increase("visiond_page_requests_total", "kind, status", 'status=~"4xx|5xx"')}, width=8),
        Panel("Uploads", "Requests to POST /api/images by what became of them; of those that were refused, by the reason."
              " repeated: all of their files had come before.", "suffix: requests/s",
              {"{{outcome}} {{reason}}":
               "sum by (outcome, reason) (rate(visiond_uploads_total{M}[$__rate_interval]))"}, stacked=True),
        Panel("Uploaded bytes a second", "Bytes of the files that were uploaded.", "bytes",
              {"{{instance}}": rate("visiond_upload_bytes_total", "instance")}),
    ],
    "Latency": [
        Panel("Image duration", "Time from reading an image to its durable result.", "s",
              quantiles("visiond_image_duration_seconds"), width=8),
        Panel("Stage time for each image", "A stage's time for its batches, divided by their images.", "s",
              {"{{stage}}": per_image("visiond_stage_duration_seconds_sum", "visiond_stage_images_total")}, width=8),
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
        Panel("Slab", "Bytes of images in flight, and the budget for them. Full: files are read faster than they"
              " are done.", "bytes",
              {"used {{instance}}": "visiond_slab_used_bytes{M}", "size {{instance}}": "visiond_slab_size_bytes{M}"}),
    ],
    "Batches": [
        Panel("Batch size", "Average number of images in a batch; grows with the load.", "short",
              {"{{segment}}": mean("visiond_batch_images", "segment")}),
        Panel("Batches halved", "Batches halved because the GPU's memory was full.", "short",
              {"{{device}}": increase("visiond_out_of_memory_total", "device")}),
    ],
    "GPUs": [
        Panel("GPU memory", "Memory of all processes on the GPU, from the driver. Peak: since the daemon started.", "bytes",
              {f"{{{{instance}}}} cuda:{{{{gpu}}}} {kind}": f"visiond_gpu_memory_{kind}_bytes{{M}}"
               for kind in ("total", "used", "peak")}, width=8, links=ONE_GPU),
        Panel("GPU utilization", "Share of time in which the GPU was busy.", "percentunit",
              {"{{instance}} cuda:{{gpu}}": "visiond_gpu_utilization_ratio{M}"}, width=8, links=ONE_GPU),
        Panel("GPU memory by worker", "Memory of PyTorch in each worker, without the CUDA context.", "bytes",
              {"{{instance}} {{worker}} {{kind}}": "visiond_worker_gpu_bytes{M}"}, width=8),
    ],
    "Workers": [
        Panel("Workers by state", "silent: no heartbeat; waiting: for a restart; closed: not restarted any more.", "short",
              {"{{segment}} {{state}}": "sum by (segment, state) (visiond_workers{M})"}, stacked=True, width=6),
        Panel("Workers lost", "By reason: died, timeout, load (before it was ready), sharing (another worker was lost"
              " that shared its GPU), memory (its GPU had too little), or wrong (its answers to known images).", "short",
              {"{{device}} {{reason}}": increase("visiond_worker_restarts_total", "device, reason")}, width=6),
        Panel("Wrong answers", "Times that a worker found its answers to known images wrong.", "short",
              {"{{device}} {{stage}}": increase("visiond_canary_failures_total", "device, stage")}, width=6),
        Panel("Last good look", "Time since a worker found its answers to known images right. A slow or idle one looks"
              " seldom.", "s",
              {"{{instance}} {{worker}}": "time() - visiond_canary_last_success_timestamp_seconds{M}"}, width=6),
        Panel("Workers short of memory", "They wait until other programs free memory of their GPU.", "short",
              {"{{instance}} {{segment}}": "visiond_workers_short_of_memory{M}"}, width=6),
        Panel("Workers that share a GPU", "By MPS. The first lost worker ends the sharing until the next start.",
              "short", {"{{segment}}": "sum by (segment) (visiond_workers_sharing{M})"}, width=6),
        Panel("Model load", "Time that a stage's model last took to load.", "s",
              {"{{device}} {{stage}}": "max by (device, stage) (visiond_model_load_seconds{M})"}, width=6),
        Panel("Reloads", "By how they ended; refused now: 1 while the daemon works with other"
              " settings than the last reload asked for.", "short",
              {"{{outcome}}": increase("visiond_reloads_total", "outcome"),
               "refused now {{instance}}": "visiond_configuration_refused{M}"}, width=6),
    ],
    "Ledger and folders": [
        Panel("Commits", "Transactions of the ledger; under load each has many images.", "suffix: commits/s",
              {"{{instance}}": "rate(visiond_ledger_commit_seconds_count{M}[$__rate_interval])"}, width=6),
        Panel("Commit time", "Duration of a transaction of the ledger, including its fsync.", "s",
              quantiles("visiond_ledger_commit_seconds"), width=6),
        Panel("Scan time", "Average duration of a scan of an inbox.", "s",
              {"{{instance}}": mean("visiond_scan_duration_seconds", "instance")}, width=6),
        Panel("Files that events missed", "Files found only by a later scan: shows whether events are reliable here.", "short",
              {"found {{instance}}": increase("visiond_reconcile_found_total", "instance"),
               "overflows {{instance}}": increase("visiond_watch_overflows_total", "instance")}, width=6),
        Panel("Folders that cannot be read", "They are skipped with all files in them; `visiond status` lists them.", "short",
              {"{{instance}} {{inbox}}": "visiond_unread_folders{M}"}, width=6, links=ONE_INBOX),
        Panel("Inboxes away", "1: the inbox cannot be read or does not answer; its images wait, and no other ones.", "short",
              {"{{instance}} {{inbox}}": "visiond_inbox_away{M}"}, width=6, links=ONE_INBOX),
        Panel("Disk space left", "Share of the disk that is free, for each folder that the daemon writes to.", "percentunit",
              {"{{instance}} {{folder}}": "visiond_disk_free_bytes{M} / visiond_disk_size_bytes{M}"}, width=6),
        Panel("Watchdog not fed", "Times that images were in flight, and none came through.", "short",
              {"{{instance}}": increase("visiond_watchdog_missed_total", "instance")}, width=6),
    ],
    "Processes": [
        Panel("Memory", "Resident memory of the daemon and of each worker.", "bytes",
              {"{{instance}} daemon": "process_resident_memory_bytes{M}",
               "{{instance}} {{worker}}": "visiond_worker_resident_bytes{M}"}, width=24),
    ],
    "Failures": [
        Panel("Failed by reason", "Images that FAILED.", "short",
              {"{{reason}}": increase("visiond_images_total", "reason", 'outcome="failed"')}, width=6, stacked=True),
        Panel("Skipped by reason", "Files that are no images, are empty or too large, or were unpacked.", "short",
              {"{{reason}}": increase("visiond_images_total", "reason", 'outcome="skipped"')}, width=6, stacked=True),
        Panel("Attempts repeated", "Attempts that failed with a temporary error.", "short",
              {"{{reason}}": increase("visiond_retries_total", "reason")}, width=6, stacked=True),
        Panel("Upkeep failed", "Tasks whose last run failed; `visiond status` shows why.", "short",
              {"{{task}}": "sum by (task) (visiond_upkeep_failed{M})"}, width=6, stacked=True),
        Panel("FAILED now", "Images in the ledger that are FAILED: `visiond retry` tries them again.", "short",
              {"{{instance}}": "visiond_images_failed{M}"}, width=12),
        Panel("Results of earlier models", "Images DONE by other models than the present ones: `visiond redo --stale`.",
              "short", {"{{instance}}": "visiond_images_outdated{M}"}, width=12),
        Panel("Sinks behind", "Published records that a sink does not have yet; `visiond status` shows why.", "short",
              {"{{instance}} {{sink}}": "visiond_sink_records_behind{M}"}, width=12),
        Panel("Last success of each sink", "Seconds since it last took records; 0: never.", "s",
              {"{{instance}} {{sink}}": "(time() - visiond_sink_last_success_timestamp_seconds{M}) * "
                                        "(visiond_sink_last_success_timestamp_seconds{M} > bool 0)"}, width=12),
    ],
}

GPU: dict[str, list[Panel]] = {
    "Now": [
        figure("Images", "Images in the batches that its workers have answered.", IMAGES_PER_SECOND,
               f"sum(rate(visiond_device_batch_images_total{{M, {ON_GPU}}}[$__rate_interval]))"),
        figure("Busy", "Share of time in which the GPU was busy.", "percentunit",
               'max(visiond_gpu_utilization_ratio{M, gpu="$gpu"})'),
        figure("Memory used", "Memory of all processes on the GPU, from the driver.", "bytes",
               'max(visiond_gpu_memory_used_bytes{M, gpu="$gpu"})'),
        figure("Memory", "Memory that the GPU has.", "bytes", 'max(visiond_gpu_memory_total_bytes{M, gpu="$gpu"})'),
        figure("Workers ready", "Workers that take batches.", "short",
               f'sum(visiond_device_workers{{M, {ON_GPU}, state="ready"}})'),
        figure("Workers not ready", "Loading, silent, waiting for a restart, or closed.", "short",
               f'sum(visiond_device_workers{{M, {ON_GPU}, state!="ready"}})'),
    ],
    "Work": [
        Panel("Images by stage", "Images processed by each stage on this GPU.", IMAGES_PER_SECOND,
              {"{{stage}}": rate("visiond_device_stage_images_total", "stage", ON_GPU)}, width=8),
        Panel("Stage time for each image", "A stage's time for its batches on this GPU, divided by their images.", "s",
              {"{{stage}}": per_image("visiond_device_stage_seconds_total", "visiond_device_stage_images_total", ON_GPU)},
              width=8),
        Panel("Stages busy", "Time of each stage in a second. Several workers and threads share the GPU, so the sum may be"
              " more than 1.", "s", {"{{stage}}": rate("visiond_device_stage_seconds_total", "stage", ON_GPU)},
              width=8, stacked=True),
        Panel("Batches", "Batches that its workers have answered.", "suffix: batches/s",
              {"{{device}}": rate("visiond_device_batches_total", "device", ON_GPU)}),
        Panel("Batch size", "Average number of images in a batch; grows with the load.", "short",
              {"{{device}}": per_image("visiond_device_batch_images_total", "visiond_device_batches_total", ON_GPU,
                                       by="device")}),
        Panel("Preparations", "Plans, recordings and kernels of each worker since it started. Images wait for each.",
              "short", {"{{worker}} {{preparation}}": f"visiond_worker_preparations{{M}} {OF_ITS_WORKERS}"}),
    ],
    "Memory": [
        Panel("GPU memory", "Memory of all processes on the GPU, from the driver. Peak: since the daemon started.", "bytes",
              {kind: f'visiond_gpu_memory_{kind}_bytes{{M, gpu="$gpu"}}' for kind in ("total", "used", "peak")}, width=8),
        Panel("GPU memory by worker", "Memory of PyTorch in each worker, without the CUDA context.", "bytes",
              {"{{worker}} {{kind}}": f"visiond_worker_gpu_bytes{{M}} {OF_ITS_WORKERS}"}, width=8),
        Panel("Host memory by worker", "Resident memory of each worker of this GPU.", "bytes",
              {"{{worker}}": f"visiond_worker_resident_bytes{{M}} {OF_ITS_WORKERS}"}, width=8, stacked=True),
    ],
    "Health": [
        Panel("GPU utilization", "Share of time in which the GPU was busy.", "percentunit",
              {"{{name}}": 'visiond_gpu_utilization_ratio{M, gpu="$gpu"}'}, width=8),
        Panel("Workers by state", "silent: no heartbeat; waiting: for a restart; closed: not restarted any more.", "short",
              {"{{state}}": f"sum by (state) (visiond_device_workers{{M, {ON_GPU}}})"}, width=8, stacked=True),
        Panel("Workers lost", "Workers that were replaced, by reason.", "short",
              {"{{reason}}": increase("visiond_worker_restarts_total", "reason", ON_GPU)}, width=8),
        Panel("Temperature", "Temperature of the GPU.", "celsius",
              {"{{name}}": 'visiond_gpu_temperature_celsius{M, gpu="$gpu"}'}, width=6),
        Panel("Power", "Power that the GPU draws.", "watt", {"{{name}}": 'visiond_gpu_power_watts{M, gpu="$gpu"}'}, width=6),
        Panel("Slowed by", "1: the GPU runs below its clocks, because of its power limit, heat, or its hardware.", "short",
              {"{{cause}}": 'visiond_gpu_slowed{M, gpu="$gpu"}'}, width=6),
        Panel("Memory errors", "Errors of the GPU's memory (ECC). Programs do not survive those that are uncorrected.", "short",
              {"{{error}}": increase("visiond_gpu_memory_errors_total", "error", 'gpu="$gpu"')}, width=6),
        Panel("Batches halved", "Batches halved because the GPU's memory was full.", "short",
              {"{{device}}": increase("visiond_out_of_memory_total", "device", ON_GPU)}),
        Panel("Model load", "Time that a stage's model last took to load.", "s",
              {"{{stage}}": f"max by (stage) (visiond_model_load_seconds{{M, {ON_GPU}}})"}),
    ],
}

INBOX: dict[str, list[Panel]] = {
    "Now": [
        figure("Done", "Images that became DONE.", IMAGES_PER_SECOND,
               'sum(rate(visiond_inbox_images_total{M, inbox="$inbox", outcome="done"}[$__rate_interval]))'),
        figure("Pending", "Images in the ledger that are not finished.", "short",
               'sum(visiond_inbox_pending{M, inbox="$inbox"})'),
        figure("Oldest pending", "Age of the image that has waited longest.", "s",
               'max(visiond_inbox_oldest_pending_seconds{M, inbox="$inbox"})'),
        figure("Time to go", "Pending images divided by the rate of the last ten minutes.", "s",
               'sum(visiond_inbox_pending{M, inbox="$inbox"}) / '
               '(sum(rate(visiond_inbox_images_total{M, inbox="$inbox"}[10m])) > 0)'),
        figure("Failed", "Images that FAILED in the time that is shown.", "short",
               'sum(increase(visiond_inbox_images_total{M, inbox="$inbox", outcome="failed"}[$__range]))'),
        figure("Away", "1: the inbox cannot be read or does not answer; its images wait.", "short",
               'max(visiond_inbox_away{M, inbox="$inbox"})'),
    ],
    "Images": [
        Panel("Images by outcome", "Finished images. gone: deleted or replaced before they were read.", IMAGES_PER_SECOND,
              {"{{outcome}}": rate("visiond_inbox_images_total", "outcome", 'inbox="$inbox"')}, stacked=True),
        Panel("Images by bin", "A: text, B: objects, C: everything else, other: bins of a custom rule.", IMAGES_PER_SECOND,
              {"{{bin}}": rate("visiond_inbox_bins_total", "bin", 'inbox="$inbox"')}, stacked=True),
        Panel("Pending", "Images in the ledger that are not finished.", "short",
              {"pending": 'sum(visiond_inbox_pending{M, inbox="$inbox"})'}),
        Panel("Oldest pending", "Age of the image that has waited longest.", "s",
              {"age": 'max(visiond_inbox_oldest_pending_seconds{M, inbox="$inbox"})'}),
    ],
    "Latency": [
        Panel("Image duration", "Average time from reading an image to its durable result.", "s",
              {"average": 'sum(rate(visiond_inbox_image_seconds_total{M, inbox="$inbox"}[$__rate_interval])) / '
                          'sum(rate(visiond_inbox_images_total{M, inbox="$inbox", outcome="done"}[$__rate_interval]))'}),
        Panel("Wait before reading", "Average time from seeing an image to reading it: the backlog. Without images that were"
              " processed again.", "s",
              {"average": 'sum(rate(visiond_inbox_wait_seconds_total{M, inbox="$inbox"}[$__rate_interval])) / '
                          'sum(rate(visiond_inbox_first_results_total{M, inbox="$inbox"}[$__rate_interval]))'}),
    ],
    "The folder": [
        Panel("Scan time", "Duration of the last scan, which compares the inbox with the ledger.", "s",
              {"seconds": 'visiond_inbox_scan_seconds{M, inbox="$inbox"}'}, width=6),
        Panel("Since the last scan", "Grows while the inbox is scanned, or cannot be.", "s",
              {"seconds": 'time() - (visiond_inbox_last_scan_timestamp_seconds{M, inbox="$inbox"} > 0)'}, width=6),
        Panel("Files that events missed", "Files found only by a later scan: shows whether events are reliable here.", "short",
              {"files": increase("visiond_inbox_missed_total", "inbox", 'inbox="$inbox"')}, width=6),
        Panel("Folders that cannot be read", "They are skipped with all files in them; `visiond status` lists them.", "short",
              {"folders": 'visiond_unread_folders{M, inbox="$inbox"}'}, width=6),
    ],
}
# fmt: on

BOARDS = {  # by the name of the file, which is also its address in Grafana
    "visiond": Board("visiond", OVERVIEW, machines=True),
    "visiond-gpu": Board(
        "visiond: one GPU", GPU, variables=(Variable("gpu", "GPU", "visiond_gpu_memory_total_bytes"),)
    ),
    "visiond-inbox": Board(
        "visiond: one inbox", INBOX, variables=(Variable("inbox", "Inbox", "visiond_inbox_pending"),)
    ),
}
