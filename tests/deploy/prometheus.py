"""A real Prometheus that scrapes a real daemon, with the configuration and the rules of this project."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon_process import PATIENCE, free_port, wait_for
from tests.deploy import rules

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
CONFIG = FOLDER / "prometheus.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus") or "", shutil.which("promtool") or ""
MISSING = "Prometheus is not installed: make tools"

needs_prometheus = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason=MISSING)


class Prometheus:
    """A running Prometheus, queried over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE):
                return True
        except urllib.error.HTTPError as error:  # 503
            error.close()
        except urllib.error.URLError:  # it does not listen yet
            pass
        return False

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that answer a query. Raises AssertionError for an invalid query."""
        question = urllib.parse.urlencode({"query": query})
        try:
            samples: list[dict[str, Any]] = self._get(f"query?{question}")["result"]
            return samples
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that fire now, with their labels and annotations."""
        return [alert for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"]

    def value(self, query: str) -> float:
        """The sum of the answer's numbers; 0 when there is none."""
        return sum(float(sample["value"][1]) for sample in self.ask(query))

    def wait_for(self, query: str, least: float) -> None:
        wait_for(lambda: self.value(query) >= least, f"{query} ≥ {least:g}")

    def _get(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}", timeout=PATIENCE) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def started(
    folder: Path, port: int, *, interval_seconds: float = 1.0, factor: float = 1.0
) -> Iterator[Prometheus]:
    """Prometheus with the configuration of this project, except for the port and shorter intervals.
    factor: by which the durations in the rules are divided. It serves the files of the folder at /user/."""
    own_port, interval = free_port(), f"{interval_seconds * 1000:.0f}ms"
    document = yaml.safe_load(CONFIG.read_text())
    document["global"] = dict.fromkeys(document["global"], interval)
    assert document["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:9464"]}]
    document["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    for name in document["rule_files"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(rules.quicken((FOLDER / name).read_text(), factor))
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(document))
    options = {
        "config.file": config,
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": f"127.0.0.1:{own_port}",
        "web.external-url": f"http://127.0.0.1:{own_port}/",
        "web.user-assets": folder,
    }
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())], stdout=log, stderr=log
        )
        prometheus = Prometheus(own_port)
        try:
            wait_for(prometheus.is_ready, "Prometheus")
            yield prometheus
        finally:
            process.terminate()
            process.wait(PATIENCE)
