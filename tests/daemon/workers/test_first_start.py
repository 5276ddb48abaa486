"""The first start on a real GPU: everything is compiled before the first image."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.state import KERNELS
from stages.images.devices import has_kernels
from tests.daemon_process import STAGES, Daemon, Place
from tests.inputs import jpeg, picture

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(600),
]

LOADED_SECONDS = 300.0
SIZES = [(640, 480), (1280, 960), (90, 2000), (33, 57)]


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_compiled_during_work(workers: int, tmp_path: Path) -> None:
    if not has_kernels(torch.device("cuda")):
        pytest.skip("needs kernels")
    pipeline = {"devices": ["cuda:0"], "workers_per_device": workers}
    place = Place(tmp_path, {"stages": {name: {"backend": ""} for name in STAGES}, "pipeline": pipeline})
    folder = place.folder / "state" / KERNELS

    def compiled() -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*.cubin")}

    with Daemon(place, ready=False) as daemon:
        daemon.wait_ready(LOADED_SECONDS)
        daemon.wait_event("kernels compiled")
        before = compiled()
        for number in range(40):
            place.drop(f"{number}.jpg", jpeg(picture(*SIZES[number % len(SIZES)])))
        daemon.wait_idle(40, LOADED_SECONDS)
        assert daemon.stop() == 0
    assert len(before) > 50
    assert compiled() == before
