from __future__ import annotations

import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from stages.contract.base import DeviceLost, Image, OutOfMemory, StageSpec
from stages.images import devices
from stages.images.devices import dtype_of, has_kernels, hold_device, pixels_of, split_batches
from stages.kernels import launch


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            OutOfMemory,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), DeviceLost),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_device_errors_are_translated(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as caught, hold_device(threading.Lock()):
        raise raised
    assert type(caught.value) is expected


def test_the_lock_is_free_again_after_an_error() -> None:
    lock = threading.Lock()
    with hold_device(lock):
        assert lock.locked()
        assert torch.is_inference_mode_enabled()
    with pytest.raises(OutOfMemory), hold_device(lock):
        raise torch.OutOfMemoryError
    assert not lock.locked()


def test_the_refusal_of_an_unknown_dtype_lists_all_dtypes() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, float16, int8, float8, int4"):
        dtype_of(StageSpec(name="clip", backend="transformers", dtype="int3"))


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="not decoded"):
        pixels_of([Image(memoryview(b""), 1, 1)])


def test_a_gpu_sees_batches_of_few_sizes_which_are_at_most_half_empty() -> None:
    sizes = [devices.padded_size(count) for count in range(1, 129)]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128]
    assert all(count <= size < 2 * count for count, size in enumerate(sizes, 1))


def test_each_size_that_is_new_to_a_thread_and_each_kernel_that_is_compiled_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "PREPARED", prepared := Counter[str]())

    def work() -> None:
        for network, count in (("clip", 16), ("clip", 32), ("blip", 16), ("clip", 16), ("clip", 32)):
            devices.note_plan(network, (count, 3, 224, 224))

    for thread in [threading.Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    for cache_hit in (True, False, True):
        devices.note_compilation(src=None, times=None, cache_hit=cache_hit)
    assert prepared == {"plan": 6, "compilation": 1}


def test_batches_are_as_full_as_allowed() -> None:
    assert list(split_batches(range(5), 2)) == [range(0, 2), range(2, 4), range(4, 5)]


# Kernels: by Triton's interpreter where there is no GPU (conftest.py)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def break_kernels(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(device: torch.device) -> None:
        raise error

    has_kernels.cache_clear()
    monkeypatch.setattr(launch, "try_pointwise_linear", fail)


def test_kernels_are_used_if_one_has_run() -> None:
    has_kernels.cache_clear()
    assert has_kernels(DEVICE)


def test_a_worker_waits_for_the_process_that_compiles_before_it_tries_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    order: list[str] = []
    monkeypatch.setattr(devices, "wait_for_compiler", order.append)
    monkeypatch.setattr(launch, "try_pointwise_linear", lambda device: order.append("a kernel"))
    has_kernels.cache_clear()
    assert has_kernels(DEVICE)
    assert order == [str(tmp_path), "a kernel"]
    has_kernels.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, ["gcc"], stderr=b"fatal error: Python.h: No such file or directory"),
        PermissionError(13, "Permission denied", "kernels"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    ],
)
def test_if_kernels_cannot_be_compiled_there_is_a_warning_and_stages_run_without(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    break_kernels(monkeypatch, error)
    with pytest.warns(RuntimeWarning, match="GPU kernels cannot be compiled"):
        assert not has_kernels(DEVICE)
    has_kernels.cache_clear()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    ],
)
def test_a_full_or_lost_device_does_not_mean_that_kernels_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception]
) -> None:
    break_kernels(monkeypatch, error)
    with pytest.raises(expected):
        has_kernels(DEVICE)
