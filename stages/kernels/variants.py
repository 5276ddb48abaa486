"""Variants of kernels: which ones a stage launches, and how one is compiled without a GPU.

Triton compiles a kernel again for each combination of constants, types and options of a launch: that is a
variant. To find a stage's variants, its `launch_kernels` launches each kernel once on tiny tensors on the CPU,
while Triton's hook notes what would be compiled and skips it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import msgspec

DRIVER = "libcuda.so.1"  # launchers are linked to it


class Variant(msgspec.Struct, frozen=True):
    """One kernel as one kind of launch needs it."""

    module: str
    kernel: str
    capability: str  # of the GPUs, "9.0"
    data: str  # JSON, as Triton's hooks describe it and `preload` takes it

    @property
    def signature(self) -> str:
        """Kernels of one signature have the same launcher."""
        return repr(msgspec.json.decode(self.data)["signature"])


class Target:
    """In place of Triton's driver, which needs a GPU: names the GPU to compile for."""

    def __init__(self, capability: str) -> None:
        self.arch = int(capability.replace(".", ""))

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps what it knows of a GPU under its number

    def get_current_stream(self, device: int) -> int:
        return 0


def find_variants(launch: Callable[[], object], capability: str) -> list[Variant]:
    """The variants of all kernels that a function launches. None of them is compiled or run."""
    import triton  # type: ignore[import-untyped]

    from stages.kernels.launch import try_pointwise_linear

    found: dict[tuple[str, str], Variant] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        found[f"{fn.module}.{fn.name}", key] = Variant(fn.module, fn.name, capability, data)
        return True  # do not compile

    with _aimed_at(capability), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        try_pointwise_linear("cpu")  # as every worker does
        launch()
    return list(found.values())


def compile_variant(variant: Variant, *, with_launcher: bool) -> None:
    """Compile a variant into Triton's folder, unless it is there. Raises whatever Triton and its compilers
    raise.

    with_launcher: also the C code that starts it, where there is a driver to link it to.
    """
    with _aimed_at(variant.capability):
        kernel = getattr(import_module(variant.module), variant.kernel).preload(variant.data)
    if with_launcher and has_driver():
        from triton.backends.nvidia import driver  # type: ignore[import-untyped]

        if hasattr(driver, "make_launcher"):  # from Triton 3.7 on all kernels have the same
            driver.CudaLauncher(kernel.src, kernel.metadata)


def compile_utilities() -> None:
    """Compile the C code with which Triton calls the driver, if there is a driver."""
    if has_driver():
        from triton.backends.nvidia.driver import CudaUtils  # type: ignore[import-untyped]

        CudaUtils()


def import_triton() -> None:
    import triton  # noqa: F401


@functools.cache
def has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _aimed_at(capability: str) -> Iterator[None]:
    from triton.runtime import driver  # type: ignore[import-untyped]

    before = driver._active
    driver.set_active(Target(capability))
    try:
        yield
    finally:
        driver._active = before
