from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.core.sidecar import parse_sidecar

SOURCE = {"inbox": "/i", "path": "a.jpg", "bytes": 1, "seen_at": "2026-11-22T00:00:00.000Z"}
DONE = {
    "schema": "visiond/1",
    "id": 1,
    "source": SOURCE,
    "bin": {"name": "A", "criteria": {}},
    "finished_at": None,
}


def encode(**fields: Any) -> bytes:
    return json.dumps(
        {name: value for name, value in (DONE | fields).items() if value != "left out"}
    ).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"bin": "left out"},
        {"caption": {"text": "no model named"}},
        {"models": {"blip": "m"}, "caption": {"text": 1}},
    ],
)
def test_a_file_that_is_not_a_sidecar_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_sidecar(encode(**fields))


def test_the_result_of_a_stage_that_is_not_installed_is_kept_as_it_is() -> None:
    parts = parse_sidecar(encode(models={"quality": "m"}, quality={"sharpness": "whatever"}))
    assert json.loads(parts.results["quality"]) == {"sharpness": "whatever"}
    assert parts.criteria == b"{}"
