"""`visiond warm`, which compiles GPU kernels ahead of the first start; here without a GPU."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from daemon.system.gpus import list_gpus

without_gpu = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")
FAKES = "".join(f'[stages.{name}]\nbackend = "fake"\n' for name in ("ocr", "yolo", "clip", "blip"))
OCR = '[models]\npack = "mini"\n[pipeline]\nstages = ["ocr"]\n[stages.ocr]\ndtype = "float32"\n'

YOLO = OCR.replace(
    "ocr", "yolo"
)  # In float32 it has two kernels, and its libraries are imported the fastest.


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Processes that start meanwhile see a single core: `visiond warm` starts a process that imports torch for each core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [random.choice([*cores])])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def warm(
    folder: Path, config: str, *options: str, changes: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    (folder / "daemon.toml").write_text(config)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with on_one_core():
        ended = subprocess.run(
            [sys.executable, "-m", "daemon", "warm", *options],
            cwd=folder,
            env={**environment, **(changes or {})},
            capture_output=True,
            text=True,
        )
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
    status, text, errors = warm(tmp_path, YOLO, "--gpu", "sm_90")
    assert status == 0, errors
    assert text.startswith("2 kernels for compute capability 9.0 compiled in ")
    assert f"in {tmp_path / 'state' / 'kernels'}" in text
    made = sorted((tmp_path / "state" / "kernels").glob("*/*.cubin"))
    assert len(made) == 2


def test_a_kernel_that_cannot_be_compiled_ends_with_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ptxas").write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n[ $# = 1 ]\n"
    )
    (tmp_path / "ptxas").chmod(0o755)
    compilers = dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(tmp_path / "ptxas"))
    status, text, errors = warm(tmp_path, YOLO, "--gpu", "9.0", changes=compilers)
    assert (status, text) == (os.EX_UNAVAILABLE, "")
    assert "visiond: 0 of 2 GPU kernels are compiled" in errors
    assert "apt install gcc python3-dev" in errors
