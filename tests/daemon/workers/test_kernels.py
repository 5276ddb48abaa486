"""Kernels are compiled once for a host: the process that does it, its lock, and what is left when it fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import msgspec
import psutil
import pytest

from daemon.cli.tuning import pretend_gpus
from daemon.config.loading import parse
from daemon.config.state import KERNELS
from daemon.layout.placement import Segment
from daemon.service.lifecycle import Service
from daemon.workers import compiler, kernels
from daemon.workers.compiler import CompileProgress, CompileRequest, Want, compile_all
from daemon.workers.kernels import compile_for_workers, compiling, list_missing, list_wants
from stages.contract.base import StageSpec
from stages.kernels import cache
from stages.kernels.cache import mark_of, try_lock, wait_for_compiler
from stages.kernels.variants import Variant
from tests.daemon_process import until, wait_for

SPECS = {name: StageSpec(name, "real", fingerprint="1") for name in ("ocr", "blip")}
WANTS = [Want(spec, "9.0") for spec in SPECS.values()]
FAKE = Want(StageSpec("clip", "fake"), "9.0")  # with the one kernel that every worker tries


def pretend(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """In place of the process that compiles: a short program."""
    monkeypatch.setattr(kernels, "COMMAND", [sys.executable, "-c", program])


def variant(kernel: str, capability: str = "9.0", signature: str = "") -> Variant:
    return Variant(
        "stages.kernels.pointwise", kernel, capability, '{"signature":"%s"}' % (signature or kernel)
    )


# What is missing


def test_a_stage_is_wanted_for_each_kind_of_gpu_that_it_runs_on() -> None:
    kinds = enumerate(("9.0", "8.0", "7.5"))
    gpus = [replace(pretend_gpus(capability)[0], index=index) for index, capability in kinds]
    specs = {**SPECS, "clip": FAKE.spec}
    segments = [
        Segment(("ocr", "clip"), ("cuda:0", "cuda:0", "cuda:2")),
        Segment(("blip",), ("cuda:1", "cpu")),
    ]
    found = [(want.spec.name, want.capability) for want in list_wants(segments, specs, gpus)]
    assert found == [("blip", "8.0"), ("ocr", "9.0")]


def test_what_has_its_mark_is_not_missing(tmp_path: Path) -> None:
    mark_of(tmp_path, WANTS[0].spec, "9.0").touch()
    assert list_missing(tmp_path, WANTS) == WANTS[1:]


def test_a_mark_holds_for_any_batch_size(tmp_path: Path) -> None:
    """It follows the memory that is free at a start."""
    larger = msgspec.structs.replace(SPECS["ocr"], batch_size=128)
    assert mark_of(tmp_path, larger, "9.0") == mark_of(tmp_path, SPECS["ocr"], "9.0")


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "2"}, {"dtype": "float16"}, {"backend": "other"}, {"options": {"silent": True}}],
    ids=lambda change: next(iter(change)),
)
def test_a_mark_is_for_one_model_and_one_kind_of_gpu(change: dict[str, Any], tmp_path: Path) -> None:
    mark = mark_of(tmp_path, StageSpec("ocr", **{"backend": "real", "fingerprint": "1"} | change), "9.0")
    assert mark != mark_of(tmp_path, SPECS["ocr"], "9.0") != mark_of(tmp_path, SPECS["ocr"], "8.0")


def test_a_mark_is_for_one_version_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mark_of(tmp_path, SPECS["ocr"], "9.0")
    cache.digest_code.cache_clear()
    monkeypatch.setattr(cache, "find_version", lambda library: "another")
    assert mark_of(tmp_path, SPECS["ocr"], "9.0") != before
    cache.digest_code.cache_clear()


# Compiling in a pool, here of threads


class Compiled(list[tuple[str, bool]]):
    """Kernels as they are compiled, and whether with a launcher; `failing` raise an error."""

    failing: frozenset[str] = frozenset()

    def compile(self, variant: Variant, *, with_launcher: bool) -> None:
        if variant.kernel in self.failing:
            raise OSError(28, "No space left on device")
        self.append((variant.kernel, with_launcher))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    compiled, found = (
        Compiled(),
        {"ocr": [variant("a"), variant("b", signature="a")], "blip": [variant("a"), variant("c")]},
    )
    monkeypatch.setattr(compiler, "compile_variant", compiled.compile)
    monkeypatch.setattr(compiler, "find_variants_of", lambda want: found[want.spec.name])
    monkeypatch.setattr(compiler, "compile_utilities", lambda: None)
    monkeypatch.setattr(compiler, "import_triton", lambda: None)
    monkeypatch.setattr(compiler, "has_driver", lambda: True)
    return compiled


def compile_here(folder: Path) -> list[CompileProgress]:
    with ThreadPoolExecutor(2) as pool:
        return list(compile_all(CompileRequest(str(folder), WANTS, 2), pool))


def test_each_kernel_is_compiled_once_and_one_launcher_for_each_signature(
    compiled: Compiled, tmp_path: Path
) -> None:
    steps = compile_here(tmp_path)
    assert sorted(compiled) in (
        [("a", True), ("b", False), ("c", True)],
        [("a", False), ("b", True), ("c", True)],
    )
    assert steps[-1] == CompileProgress(3, 3)
    assert list_missing(tmp_path, WANTS) == []


def test_a_stage_with_a_kernel_that_fails_stays_missing(compiled: Compiled, tmp_path: Path) -> None:
    compiled.failing = frozenset("b")
    steps = compile_here(tmp_path)
    assert [step.problem for step in steps if step.problem] == ["OSError: [Errno 28] No space left on device"]
    assert (steps[-1].done, steps[-1].known) == (2, 3)
    assert list_missing(tmp_path, WANTS) == WANTS[:1]


def test_without_a_driver_the_first_start_looks_again(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "has_driver", lambda: False)
    assert compile_here(tmp_path)[-1] == CompileProgress(3, 3)
    assert list_missing(tmp_path, WANTS) == WANTS


def crash(want: Want) -> list[Variant]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def test_a_compiler_that_crashes_is_a_problem_and_not_an_error(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "find_variants_of", crash)
    monkeypatch.setattr(compiler, "compile_utilities", os.getpid)
    monkeypatch.setattr(compiler, "import_triton", os.getpid)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        steps = list(compile_all(CompileRequest(str(tmp_path), WANTS, 1), pool))
    assert any(step.problem for step in steps)
    assert list_missing(tmp_path, WANTS) == WANTS


# The process and its lock


def waiting(folder: Path) -> Future[None]:
    """A worker that wants to use a kernel."""
    future: Future[None] = Future()

    def wait() -> None:
        wait_for_compiler(str(folder))
        future.set_result(None)

    threading.Thread(target=wait, daemon=True).start()
    return future


SLEEPING = 'import time; print(\'{"done": 1, "known": 2}\', flush=True); time.sleep(600)'


def children(pid: int | None = None) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


@pytest.mark.anyio
async def test_a_process_that_does_not_go_on_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(kernels, "STUCK_SECONDS", 0.2)
    with anyio.fail_after(30):
        async with compiling(tmp_path / "kernels", WANTS) as steps:
            assert steps
            problems = [step.problem async for step in steps]
    assert problems == ["the process that compiles the kernels has not gone on for 0.2 s"]
    fd = try_lock(tmp_path / "kernels")
    assert fd is not None, "its lock is free"
    os.close(fd)


@pytest.mark.anyio
async def test_workers_wait_until_the_process_that_compiles_has_ended_even_if_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, SLEEPING)
    before = children()
    async with compiling(tmp_path / "state" / "kernels", WANTS) as steps:
        assert steps
        assert await anext(steps) == CompileProgress(1, 2)
        worker = waiting(tmp_path / "state" / "kernels")
        await anyio.sleep(5 * cache.POLL_SECONDS)
        assert not worker.done()
        (process,) = set(children()) - set(before)
        process.kill()
        await until(worker.done)
        assert [step.problem async for step in steps] == [
            "the process that compiles the kernels was killed by SIGKILL"
        ]


@pytest.mark.anyio
async def test_a_process_that_is_stuck_does_not_hold_up_workers_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, SLEEPING)
    monkeypatch.setattr(cache, "LONGEST_WAIT_SECONDS", 0.1)
    async with compiling(tmp_path, WANTS):
        await until(waiting(tmp_path).done)
    assert try_lock(tmp_path) is not None  # it was ended with the context


@pytest.mark.anyio
async def test_two_never_compile_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SLEEPING)
    second: list[Any] = []

    async def wait_for_the_first() -> None:
        async with compiling(tmp_path, WANTS, patient=True) as steps:
            second.append(steps)

    async with anyio.create_task_group() as tasks:
        async with compiling(tmp_path, WANTS) as first:
            assert first
            async with compiling(tmp_path, WANTS) as other:
                assert other is None
            tasks.start_soon(wait_for_the_first)
            await anyio.sleep(2 * kernels.POLL_SECONDS)
            assert second == []
    assert second != [None]


@pytest.mark.anyio
async def test_the_folder_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "")
    async with compiling(tmp_path / "state" / "kernels", WANTS):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "state" / "kernels").stat().st_mode & 0o007 == 0


def test_without_a_folder_nobody_waits(tmp_path: Path) -> None:
    wait_for_compiler(str(tmp_path / "kernels"))


# As the daemon does it


async def compile_and_log(folder: Path, wants: Sequence[Want], capsys: pytest.CaptureFixture[str]) -> str:
    async with anyio.create_task_group() as tasks:
        await tasks.start(compile_for_workers, folder, wants)
    return capsys.readouterr().out


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('print(\'{"done": 7, "known": 7}\')', ["kernels compiled", "kernels=7"]),
        (
            'print(\'{"done": 5, "known": 7, "problem": "no gcc"}\')',
            ["not all kernels", "no gcc", "compiled=5"],
        ),
        ("raise SystemExit(3)", ["not all kernels", "ended with status 3"]),
    ],
)
async def test_the_log_has_what_was_compiled_or_why_not(
    program: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, program)
    text = await compile_and_log(tmp_path, WANTS, capsys)
    assert all(part in text for part in expected), text


@pytest.mark.anyio
async def test_a_folder_that_cannot_be_made_does_not_stop_the_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "not all kernels" in await compile_and_log(tmp_path / "file" / "kernels", WANTS, capsys)


@pytest.mark.anyio
async def test_if_nothing_is_missing_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "COMMAND", ["/nonexistent"])
    mark_of(tmp_path, WANTS[0].spec, "9.0").touch()
    assert await compile_and_log(tmp_path, WANTS[:1], capsys) == ""


class Executor:
    """Notes whether kernels were being compiled when its workers were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiling: bool | None = None

    async def staff(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self.compiling = try_lock(self.folder) is None
        task_status.started()


@pytest.mark.anyio
async def test_the_daemon_compiles_before_it_starts_workers_and_while_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, SLEEPING)
    service, executor = Service(parse({}, tmp_path)), Executor(tmp_path / "state" / KERNELS)
    placement = SimpleNamespace(segments=[Segment(("ocr",), ("cuda:0",))])
    layout: Any = SimpleNamespace(placement=placement, specs=SPECS, gpus=pretend_gpus("9.0"))
    pipeline: Any = SimpleNamespace(looks=[], executors=[executor], states=lambda: [])
    service._layouts = [layout]
    async with anyio.create_task_group() as tasks:
        await service._load_models(tasks, pipeline)
        tasks.cancel_scope.cancel()
    assert executor.compiling
    assert try_lock(executor.folder) is not None  # ended with the daemon


# The real process


@pytest.mark.anyio
async def test_a_real_process_compiles_and_leaves_no_process_behind_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    async with compiling(tmp_path, [FAKE]) as steps:
        assert steps
        assert [step async for step in steps][-1] == CompileProgress(1, 1)
    found = [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".cubin")]
    assert found == ["pointwise_linear_kernel.cubin"]
    async with compiling(tmp_path, [FAKE]):
        (process,) = [child for child in children() if "daemon.workers.compiler" in child.cmdline()]
        pool = wait_for(lambda: children(process.pid), "its pool")
        process.kill()
        await until(lambda: not any(child.is_running() and child.status() != "zombie" for child in pool))
