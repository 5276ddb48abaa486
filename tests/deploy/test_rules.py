"""The alerts and recording rules of Prometheus, tried by promtool with made-up series.
tests/faults/alerts.py drives each alert by its real fault."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from daemon.core.errors import Loss, Refusal
from daemon.monitoring.metrics import Metrics
from daemon.monitoring.snapshot import SinkState
from daemon.results.sinks import SINKS
from stages.contract.base import Reason
from tests.daemon_process import Daemon, Place
from tests.deploy.prometheus import CONFIG, PROMTOOL, needs_prometheus
from tests.deploy.rules import RULES, Rule, alerts, quicken, rules
from tests.test_documents import ROOT, anchors_of

CASES = Path(__file__).parent / "alerts.yml"
SEVERITIES = {"warning", "critical"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [PROMTOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_prometheus
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    checked = promtool("check", "config", CONFIG)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(list(rules()))} rules found" in checked.stdout


@needs_prometheus
def test_each_alert_fires_when_it_should_and_none_in_a_clean_hour() -> None:
    tested = promtool("test", "rules", CASES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_prometheus
@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_that_never_fires_is_noticed(alert: Rule, tmp_path: Path) -> None:
    """And so is one that fires for a daemon that only comes close. Only this alert's own case is run."""
    cases = yaml.safe_load(CASES.read_text())
    cases |= {
        "rule_files": ["visiond.yml"],
        "tests": [case for case in cases["tests"] if case["name"] == alert.name],
    }
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(cases))
    for expression in (f"({alert.expression.strip()}) > 1e12", spoil(alert)):
        document = yaml.safe_load(RULES.read_text())
        (rule,) = [r for group in document["groups"] for r in group["rules"] if r.get("alert") == alert.name]
        rule["expr"] = expression
        (tmp_path / "visiond.yml").write_text(yaml.safe_dump(document))
        tested = promtool("test", "rules", tmp_path / "alerts.yml")
        assert tested.returncode != 0
        assert alert.name in tested.stdout + tested.stderr


def spoil(alert: Rule) -> str:
    """The alert without its threshold: it fires for every daemon that has its first series."""
    return f"{alert.selectors[0] if alert.selectors else 'visiond_images_total'} > -1"


def test_each_alert_has_a_case_in_which_it_fires_and_another_daemon_in_which_it_does_not() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    for alert in alerts():
        case = next(case for case in cases if case["name"] == alert.name)
        instances = set(re.findall(r'instance="(\w+)"', str(case["input_series"])))
        assert {"bad", "near"} <= instances
        first, last = case["promql_expr_test"]
        assert first["exp_samples"] == [], "it does not fire before its time"
        fired = str(last["exp_samples"])
        assert f'alertname="{alert.name}", instance="bad"' in fired
        assert "near" not in fired
    assert cases[-1]["name"] == "clean hour"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_says_what_is_wrong_what_to_type_and_where_to_read_more(alert: Rule) -> None:
    assert alert.name.startswith("Visiond")
    assert alert.document["labels"]["severity"] in SEVERITIES
    annotations = alert.document["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "{{ $labels.instance }}" in annotations["summary"]
    assert "On its machine type:" in annotations["description"].replace("on its", "On its")
    page, _, anchor = annotations["runbook_url"].partition("#")
    assert page == "{{ externalURL }}/user/alerts.html"
    assert anchor == alert.name.lower()
    assert anchor in anchors_of(ROOT / "docs" / "alerts.md")


def test_recording_rules_are_used_and_named_by_level_metric_and_operation() -> None:
    expressions = " ".join(rule.expression for rule in rules())
    for rule in rules():
        if "record" in rule.document:
            assert re.fullmatch(r"instance:visiond_[a-z_]+:[a-z]+\d+[mh]", rule.name)
            assert rule.name in expressions


def test_all_durations_are_shortened_and_nothing_else() -> None:
    text = "groups: [{rules: [{alert: a, for: 2h, expr: 'rate(b:rate5m[10m]) > 1.1 * (c offset 30m)'}]}]"
    (rule,) = yaml.safe_load(quicken(text, 120))["groups"][0]["rules"]
    assert rule == {
        "alert": "a",
        "for": "60000ms",
        "expr": "rate(b:rate5m[5000ms]) > 1.1 * (c offset 15000ms)",
    }


def reference() -> dict[str, Any]:
    """The program that writes docs/metrics.md."""
    return runpy.run_path(str(RULES.parent.parent / "reference.py"))


def test_the_list_of_metrics_and_alerts_is_current() -> None:
    made = reference()["write_markdown"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == made, "run: make docs"


def test_every_metric_and_label_is_described_and_no_other() -> None:
    metrics = list(reference()["list_metrics"]())
    assert len(metrics) > 40
    assert [metric.name for metric in metrics if not metric.meaning] == []
    assert {label for metric in metrics for label in metric.labels} == reference()["LABELS"].keys()


def test_the_list_has_every_value_of_a_label_and_no_other() -> None:
    metrics = Metrics()
    metrics.begin_segment("ocr", ["ocr"], ["cpu"])
    for sink in SINKS:
        metrics.follow_sink(sink, lambda: SinkState(name="", behind=0))
    known = defaultdict[str, set[str]](set)
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                known[label].add(value)
    known["reason"] = {each.value for each in (*Loss, *Refusal)}  # those of images are in another list
    described = {
        label: set(re.findall(r"`([a-zA-Z-]+)`", text)) for label, text in reference()["LABELS"].items()
    }
    known["kind"] |= {"total", "used", "peak"}  # of memory: no GPU is here
    for label in ("bin", "kind", "notice", "outcome", "reason", "sink", "stage", "state", "task"):
        assert described[label] == known[label], label
    table = (ROOT / "docs" / "inboxes.md").read_text()
    assert [reason for reason in Reason if f"`{reason}`" not in table] == []


def test_a_scrape_has_no_metric_that_the_list_lacks_and_no_other_label(tmp_path: Path) -> None:
    listed = {metric.name: {*metric.labels} for metric in reference()["list_metrics"]()}
    place = Place(tmp_path, {"output": {"sinks": ["jsonl"]}})
    with Daemon(place) as daemon:
        place.drop_many(range(3))
        daemon.wait_idle(3)
        families = list(text_string_to_metric_families(daemon.fetch("/metrics")[1].decode()))
    for family in families:
        end = {"counter": "_total", "info": "_info"}.get(family.type, "")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == listed[family.name + end]
