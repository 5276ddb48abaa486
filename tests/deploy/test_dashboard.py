from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from daemon.config.pipeline import PipelineSection
from daemon.config.sections import Http
from daemon.core.jobs import Admitted
from daemon.core.messages import Beat, Outcome, Reply, Setup, StageRun
from daemon.core.slab import Slab
from daemon.ledger.ledger import Ledger
from daemon.monitoring.disks import Disks
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import SinkState
from daemon.pipeline.executor import Executor
from daemon.server.status import Status
from daemon.system.gpus import Gpu, Sensors
from daemon.workers.batcher import Batcher
from daemon.workers.pool import Pool
from daemon.workers.slot import Slot
from daemon.workers.worker import Worker
from stages.contract.base import Limits, Reason, StageSpec
from tests.deploy.queries import FOLDER, Query, boards, panels, problems, queries
from tests.makers import done, failed, make_attempt, make_job, make_outputs, postponed

SENSORS = Sensors(40, 350.5, 1e6, 0, 0, frozenset({"power"}))
GPU = Gpu(0, "GPU-1", "H200", 8, 5, 3, "9.0", 0.5, (), sensors=SENSORS)
PROVISIONING = FOLDER / "provisioning"
PROMETHEUS = FOLDER.parent / "prometheus" / "prometheus.yml"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The samples of a daemon in which every event has happened once: name → the labels of each sample."""
    metrics = Metrics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daemon.monitoring.machine.list_gpus", lambda: [GPU])
        anyio.run(report_everything, metrics, tmp_path_factory.mktemp("samples") / "ledger.sqlite")
        text = generate_latest(metrics.registry).decode()
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return found


async def report_everything(metrics: Metrics, path: Path) -> None:
    """Each event of the pipeline, the pool and the watcher, and one refresh of the status."""
    metrics.admitted(Admitted(pending=3, skipped=1, replaced=1), 1)
    metrics.fed(make_attempt(outputs=make_outputs()))
    metrics.replied(
        "ocr", "cuda:0", Reply(1, [Outcome("JPEG", 8, 8, {})], [StageRun("ocr", 1, 0.1)], out_of_memory=1)
    )
    for ending in (done(make_job()), failed(make_job(), Reason.TRUNCATED), postponed(make_job(), 1.0)):
        metrics.finished([ending])
    metrics.begin_inboxes({1: "1"})
    metrics.scan_seconds.observe(0.1)
    metrics.reconcile_found.inc()
    metrics.watchdog_missed.inc()
    metrics.watch_overflows.inc()
    metrics.unread_folders.labels("1").set(1)
    slab, ledger = Slab(1 << 20), Ledger(path, metrics.commit_seconds.observe)
    try:
        await ledger.admit([])
        pool = pool_with_a_past(metrics)
        batcher = Batcher("ocr", ("ocr",), 1, pool)
        outbox = SimpleNamespace(
            deliveries=[SimpleNamespace(name="jsonl", state=lambda: SinkState(name="jsonl", behind=1))]
        )
        nobody: Any = None
        executor = Executor(slab, [batcher], nobody, {}, metrics)
        pipeline: Any = SimpleNamespace(
            ledger=ledger,
            metrics=metrics,
            looks=[],
            in_flight=0,
            blocked=list,
            watcher=SimpleNamespace(labels=lambda: {1: "1"}, away=set),
            schedule=SimpleNamespace(away=dict),
            executors=[executor],
            states=lambda: [executor.state()],
            outbox=outbox,
        )
        status = Status(pipeline, disks=Disks({"state.path": path}))
        await status.refresh()
    finally:
        ledger.close()
        slab.close()


def pool_with_a_past(metrics: Metrics) -> Pool:
    """A pool with a worker that was lost once and is ready again."""
    setup = Setup("ocr/0", "cuda:0", [StageSpec("ocr", "fake")], 1 << 20, 2, 1, Limits(), None)
    pool = Pool("ocr", [Slot(setup, "cuda:0", {})], -1, PipelineSection(), metrics)
    metrics.worker_restarts.labels("cuda:0", "died").inc()
    metrics.canary_failures.labels("cuda:0", "ocr").inc()
    metrics.model_load_seconds.labels("cuda:0", "ocr").set(1.0)
    worker = Worker(setup, "cuda:0", SimpleNamespace(returncode=None), SimpleNamespace())  # type: ignore[arg-type]
    worker.beat, worker.loaded, worker.looked_at = Beat(1, 2, 3), True, 1.0
    pool.slots[0].worker, pool.slots[0].state = worker, "ready"
    return pool


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.name)
def test_a_query_asks_only_for_what_the_daemon_exports(
    query: Query, samples: dict[str, list[dict[str, str]]]
) -> None:
    assert problems(query, samples) == []


@pytest.mark.parametrize(
    ("text", "legend", "complaint"),
    [
        ("visiond_image{}", "", "there is no metric visiond_image"),
        ("visiond_images_total", "", "it asks for no metric"),
        ("sum by (color) (visiond_images_total{})", "", "visiond_images_total has no label color"),
        ('visiond_images_total{outcome="lost"}', "", 'visiond_images_total never has outcome="lost"'),
        (
            "sum by (outcome) (visiond_images_total{})",
            "{{reason}}",
            "the legend shows {'reason'}, the query keeps {'outcome'}",
        ),
    ],
)
def test_the_check_of_queries_finds_mistakes(text: str, legend: str, complaint: str, samples: Any) -> None:
    assert problems(Query("", legend, text), samples) == [complaint]


@pytest.mark.parametrize("name", boards())
def test_the_json_is_what_its_generator_writes(name: str) -> None:
    made = subprocess.run(
        [sys.executable, FOLDER / "dashboard.py", name], check=True, capture_output=True, text=True
    )
    assert (FOLDER / f"{name}.json").read_text() == made.stdout, "run: make docs"


def test_every_panel_has_a_description_and_a_unit_of_grafana() -> None:
    """Grafana writes a unit that it does not know behind the number, as it is: `byte` for bytes, say."""
    known = re.compile("short|bytes|s|percentunit|celsius|watt|suffix: .+")
    assert [
        (board, panel["title"])
        for board, panel in panels()
        if not (panel["description"] and known.fullmatch(panel["fieldConfig"]["defaults"]["unit"]))
    ] == []


@pytest.mark.parametrize("board", boards().values(), ids=boards())
def test_panels_lie_side_by_side_within_the_grid(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{a} and {b} overlap"


@pytest.mark.parametrize("name", boards())
def test_a_board_can_be_provisioned_on_any_grafana(name: str) -> None:
    board = boards()[name]
    assert (board["uid"], board["editable"]) == (name, False)
    assert isinstance(board["schemaVersion"], int)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    sources = {
        target["datasource"]["uid"] for of, panel in panels() if of == name for target in panel["targets"]
    }
    assert sources == {"${DS_PROMETHEUS}"}


@pytest.mark.parametrize("name", boards())
def test_a_board_has_a_menu_for_each_variable_in_its_queries(name: str) -> None:
    used = {
        variable
        for query in queries()
        if query.board == name
        for variable in re.findall(r"\$([a-z]+)", query.text)
    }
    menus = [variable["name"] for variable in boards()[name]["templating"]["list"]]
    assert menus == ["DS_PROMETHEUS", "instance", *sorted(used - {"instance"})]


def test_boards_link_to_each_other() -> None:
    for board in boards().values():
        [links] = board["links"]
        assert (links["type"], links["tags"]) == ("dashboards", board["tags"])  # to all with this tag
    addresses = [
        link["url"] for _, panel in panels() for link in panel["fieldConfig"]["defaults"].get("links", [])
    ]
    assert {re.split(r"[/?]", address)[2] for address in addresses} == {"visiond-gpu", "visiond-inbox"}
    for address in addresses:
        board = boards()[re.split(r"[/?]", address)[2]]
        menus = {variable["name"] for variable in board["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", address)) <= menus


def test_prometheus_scrapes_the_default_address_at_the_interval_in_grafana() -> None:
    config = yaml.safe_load(PROMETHEUS.read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [Http().listen]}]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"] == "15s"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "visiond.yml").read_text())["providers"]
    assert provider["type"] == "file"
