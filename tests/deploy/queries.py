"""The dashboard's queries, taken from its JSON, and the names in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
SCRAPED_LABELS = {"instance", "job"}  # added by Prometheus

Samples = Mapping[str, list[dict[str, str]]]  # name → the labels of each of its samples


class Query(NamedTuple):
    panel: str
    legend: str
    text: str


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "visiond.json").read_text())
    return document


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["legendFormat"], target["expr"])


def problems(query: Query, samples: Samples) -> list[str]:
    """What a query and its legend use that the samples do not have: a metric, a label, or a label's value."""
    found = []
    grouped = {
        label for labels in re.findall(r"by \(([^)]*)\)", query.text) for label in re.split(r",\s*", labels)
    }
    shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    selectors = re.findall(r"(\w+)\{([^}]*)\}", query.text)
    for name, matchers in selectors:
        if name not in samples:
            found.append(f"there is no metric {name}")
            continue
        known = SCRAPED_LABELS.union(*samples[name])
        asked = {
            label: (how, value)
            for label, how, value in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers)
        }
        for label in sorted((asked.keys() | grouped | shown) - known):
            found.append(f"{name} has no label {label}")
        for label, (how, value) in asked.items():
            if how != "=~" and not any(labels.get(label) == value for labels in samples[name]):
                found.append(f'{name} never has {label}="{value}"')
    if grouped and not shown <= grouped:
        found.append(f"the legend shows {shown}, the query keeps {grouped}")
    return found if selectors else ["it asks for no metric"]
