"""The rules of Prometheus, taken from their file, and the names in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules" / "visiond.yml"
SECONDS = {"s": 1, "m": 60, "h": 3600}
SELECTOR = re.compile(r"(?<![\w:])(?:visiond_\w+|up\b)(?:\{[^}]*\})?")
GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")


class Rule(NamedTuple):
    name: str
    expression: str
    document: dict[str, Any]

    @property
    def selectors(self) -> list[str]:
        """Each series of the daemon that it asks for, with its matchers."""
        return list(dict.fromkeys(SELECTOR.findall(self.expression)))

    @property
    def grouped(self) -> set[str]:
        """The labels by which it groups and joins."""
        return {label.strip() for labels in GROUPING.findall(self.expression) for label in labels.split(",")}


def rules() -> Iterator[Rule]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield Rule(rule.get("alert") or rule["record"], rule["expr"], rule)


def alerts() -> list[Rule]:
    return [rule for rule in rules() if "alert" in rule.document]


def quicken(text: str, factor: float) -> str:
    """The same rules with all durations divided by the factor: `for`, ranges and offsets. An hour becomes half a
    minute with a factor of 120. Numbers of events and shares stay as they are."""
    document = yaml.safe_load(text)
    for group in document["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = _shorten(rule["for"], factor)
            rule["expr"] = re.sub(
                r"(?<=\[)\w+(?=\])|(?<=offset )\w+",
                lambda found: _shorten(found.group(), factor),
                rule["expr"],
            )
    shortened: str = yaml.safe_dump(document)
    return shortened


def _shorten(duration: str, factor: float) -> str:
    return f"{int(duration[:-1]) * SECONDS[duration[-1]] * 1000 / factor:.0f}ms"
