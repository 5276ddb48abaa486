"""The queries of Grafana's boards, taken from their JSON, and the names in them."""

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
    board: str = "visiond"

    @property
    def name(self) -> str:
        return f"{self.board}, {self.panel}: {self.legend}"


def boards() -> dict[str, dict[str, Any]]:
    """Each board by the name of its file."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """The panels of all boards, each with the board's name."""
    for name, board in boards().items():
        yield from ((name, panel) for panel in board["panels"] if panel["type"] != "row")


def queries() -> Iterator[Query]:
    """Those of the panels, and of the lines that mark events in all panels."""
    for name, board in boards().items():
        for line in board["annotations"]["list"]:
            yield Query(line["name"], line["textFormat"], line["expr"], name)
    for name, panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["legendFormat"], target["expr"], name)


def problems(query: Query, samples: Samples) -> list[str]:
    """What a query and its legend use that the samples do not have: a metric, a label, or a label's value."""
    found = []
    grouped = {
        label for labels in re.findall(r"by \(([^)]*)\)", query.text) for label in re.split(r",\s*", labels)
    }
    shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    selectors = re.findall(r"(\w+)\{([^}]*)\}", query.text)
    # What follows `and on` only chooses among the series before it.
    choosing = re.findall(r"and on \([^)]*\) (\w+)", query.text)
    for name, matchers in selectors:
        if name not in samples:
            found.append(f"there is no metric {name}")
            continue
        known = SCRAPED_LABELS.union(*samples[name])
        asked = {
            label: (how, value)
            for label, how, value in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers)
        }
        for label in sorted((asked.keys() | (set() if name in choosing else grouped | shown)) - known):
            found.append(f"{name} has no label {label}")
        for label, (how, value) in asked.items():
            is_chosen = value.startswith("$")  # in a menu
            if (
                how != "=~"
                and not is_chosen
                and not any(labels.get(label) == value for labels in samples[name])
            ):
                found.append(f'{name} never has {label}="{value}"')
    if grouped and not shown <= grouped:
        found.append(f"the legend shows {shown}, the query keeps {grouped}")
    return found if selectors else ["it asks for no metric"]
