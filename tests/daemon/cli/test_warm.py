"""`visiond warm`, which compiles GPU kernels ahead of the first start; here without a GPU."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from daemon.cli.tuning import compile_missing
from daemon.core.errors import KernelsMissing
from daemon.system.gpus import list_gpus
from daemon.workers import kernels
from daemon.workers.compiler import CompileProgress
from tests.daemon_process import PATIENCE
from tests.forked import run_forked

without_gpu = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")
FAKES = "".join(f'[stages.{name}]\nbackend = "fake"\n' for name in ("ocr", "yolo", "clip", "blip"))
OCR = '[models]\npack = "mini"\n[pipeline]\nstages = ["ocr"]\n[stages.ocr]\ndtype = "float32"\n'

YOLO = OCR.replace(
    "ocr", "yolo"
)  # In float32 it has two kernels, and its libraries are imported the fastest.


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def warm(folder: Path, config: str, *options: str) -> tuple[int, str, str]:
    (folder / "daemon.toml").write_text(config)
    ended = run_forked(["warm", *options], folder, os.environ, folder / "told", 2 * PATIENCE)
    return ended.returncode, ended.stdout, ended.stderr


@without_gpu
def test_without_a_gpu_there_is_nothing_to_compile(tmp_path: Path) -> None:
    status, text, _ = warm(tmp_path, OCR)
    assert status == 0
    assert text.startswith(
        "Nothing to compile: with this configuration no stage runs on a GPU of this machine."
    )
    assert "visiond warm --gpu 9.0" in text
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("config", "gpu", "why"),
    [
        (FAKES, "9.0", "all stages are fake"),
        (OCR, "7.5", "compute capability 8.0 or later"),
        (OCR.replace("stages =", 'devices = ["cpu"]\nstages ='), "9.0", "no stage runs on a GPU"),
    ],
)
def test_it_says_why_there_is_nothing_to_compile(config: str, gpu: str, why: str, tmp_path: Path) -> None:
    config = (
        config.replace('[pipeline]\nstages = ["ocr"]\n', "", 1) if config.count("[pipeline]") > 1 else config
    )
    status, text, _ = warm(tmp_path, config, "--gpu", gpu)
    assert (status, text.startswith("Nothing to compile: "), why in text) == (0, True, True)


def test_a_gpu_that_is_no_compute_capability_is_refused(tmp_path: Path) -> None:
    status, _, errors = warm(tmp_path, OCR, "--gpu", "H200")
    assert status == os.EX_USAGE
    assert "--gpu 9.0" in errors


def test_kernels_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "daemon.toml").write_text(YOLO)
    core = random.choice([*os.sched_getaffinity(0)])  # on each, a process would import torch
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "daemon", "warm", "--gpu", "sm_90"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 kernels for compute capability 9.0 compiled in ")
    assert f"in {tmp_path / 'state' / 'kernels'}" in done.stdout
    made = sorted((tmp_path / "state" / "kernels").glob("*/*.cubin"))
    assert len(made) == 2


def test_a_kernel_that_cannot_be_compiled_ends_with_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def compiling(*_: object, **__: object) -> AsyncIterator[AsyncIterator[CompileProgress]]:
        async def steps() -> AsyncIterator[CompileProgress]:
            yield CompileProgress(0, 2, "ptxas failed")

        yield steps()

    monkeypatch.setattr(kernels, "compiling", compiling)
    with pytest.raises(KernelsMissing) as error:
        anyio.run(compile_missing, tmp_path / "kernels", [])
    assert error.value.exit_status == os.EX_UNAVAILABLE
    assert str(error.value).startswith("0 of 2 GPU kernels are compiled. The first problem: ptxas failed")
    assert "apt install gcc python3-dev" in str(error.value)
