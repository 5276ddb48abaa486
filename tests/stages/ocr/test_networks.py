from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from stages.contract.base import DeviceLost, OutOfMemory, StageSpec
from stages.ocr.networks import NetworkLoader, Networks
from stages.ocr.onnxfile import weight_files
from tests.daemon_process import PATIENCE, wait_for

FILES = {role: str(path) for role, path in weight_files().items()}


class Loader(NetworkLoader):
    """Compiles until `compiled` is set; then makes other plain networks, as there is no GPU,
    or raises its errors one by one."""

    def __init__(self, *errors: Exception) -> None:
        self.compiled, self.errors = threading.Event(), list(errors)
        super().__init__(StageSpec("ocr", "ppocr"), FILES, "cpu", lambda networks: networks.detector)
        self.load()
        self.plain = self._networks

    def _can_fuse(self) -> bool:
        return True

    def _is_compiled(self) -> bool:
        return self.compiled.is_set()

    def _load_fused(self) -> Networks:
        assert self.compiled.wait(PATIENCE)
        if self.errors:
            raise self.errors.pop()
        return self._load_plain()


@pytest.mark.parametrize("errors", [[], [OutOfMemory("for now")]], ids=["at once", "when there is room"])
def test_plain_networks_read_until_the_kernels_are_compiled(
    errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.ocr.networks.RETRY_SECONDS", 0.0)
    loader = Loader(*errors)
    assert loader.latest() is loader.latest() is loader.plain
    loader.compiled.set()
    wait_for(lambda: loader.latest() is not loader.plain, "the others")
    assert loader.latest() is loader.latest()


def test_nothing_is_compiled_before_the_first_images_come() -> None:
    threads = threading.active_count()
    loader = Loader()
    assert threading.active_count() == threads
    loader.latest()
    assert threading.active_count() == threads + 1
    loader.compiled.set()


def test_if_kernels_cannot_be_compiled_the_plain_networks_run_with_a_warning() -> None:
    loader = Loader(RuntimeError("ptxas died of signal 11"))
    loader.compiled.set()
    with pytest.warns(RuntimeWarning, match="GPU kernels cannot be compiled.*signal 11"):
        wait_for(lambda: loader.latest() and not loader.errors and loader._fusing is None, "their end")
    assert loader.latest() is loader.plain


def test_if_compiled_kernels_do_not_run_any_more_the_plain_networks_run() -> None:
    loader = Loader(RuntimeError("device kernel image is invalid"))
    loader.compiled.set()
    with pytest.warns(RuntimeWarning, match="GPU kernels cannot be compiled.*invalid"):
        loader.load()
    assert loader.latest() is loader.latest()


def test_a_device_that_is_lost_while_compiling_is_reported() -> None:
    loader = Loader(DeviceLost("an illegal memory access"))
    loader.compiled.set()
    with pytest.raises(DeviceLost):
        wait_for(lambda: loader.latest() is not loader.plain, "the error")


PROGRAM = """
import time
from stages.contract.base import StageSpec
from stages.ocr.fused import FusedDetector
from stages.ocr.stage import OcrStage
from tests.stages.ocr.test_stage import read, to_cuda
from tests.stages.ocr.textpages import draw_page

page, stage = to_cuda(draw_page(0)), OcrStage(StageSpec("ocr", "ppocr", dtype="float16"), "cuda")
stage.load()
fused = [isinstance(stage.networks._networks.detector, FusedDetector)]
texts = [line.text for line in read(stage, page)[0].lines]
deadline = time.monotonic() + 300
while not isinstance(stage.networks.latest().detector, FusedDetector):
    assert time.monotonic() < deadline
    assert [line.text for line in read(stage, page)[0].lines] == texts
assert [line.text for line in read(stage, page)[0].lines] == texts
print(fused, len(texts) > 4)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_reads_while_its_kernels_are_compiled_and_the_next_start_has_them(tmp_path: Path) -> None:
    command, environment = (
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert outputs == ["[False] True\n", "[True] True\n"]
