"""What `visiond tune` measures."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import Config, parse
from daemon.measure import tuner
from daemon.system.gpus import Gpu
from tests.daemon_process import Place

GIB = 1 << 30


class Opened(Exception):
    """The first trial would begin now."""


def test_trials_have_the_dtypes_of_all_named_gpus_also_where_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the dtypes of the daemon's next start, so that the profile fits it."""
    gpus = [
        Gpu(number, f"GPU-{number}", "card", 80 * GIB, free * GIB, 0, capability, None, ())
        for number, (free, capability) in enumerate([(70, "9.0"), (5, "7.5")])
    ]
    tried: list[Config] = []

    def open_bench(config: Config, *_: Any) -> None:
        tried.append(config)
        raise Opened

    monkeypatch.setattr(tuner, "list_gpus", lambda: gpus)
    monkeypatch.setattr(tuner, "Bench", open_bench)
    monkeypatch.setattr(tuner, "make_sample", lambda *_: [])
    place = Place(tmp_path, {"pipeline": {"min_free_gpu_bytes": "20GB"}})
    order = tuner.TuningPlan(None, 1, 1.0)
    with pytest.raises(Opened):
        tuner.tune(
            parse(place.settings, tmp_path),
            order,
            keep=False,
            force=False,
            say=print,
            reporting=contextlib.nullcontext(lambda *_: None),
        )
    assert tried[0].pipeline.devices == ["cuda:0"]
    assert {getattr(tried[0].stages, name).dtype for name in tried[0].stage_names} == {"float16"}
