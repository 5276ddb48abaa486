"""Workers that share a GPU by MPS. NVIDIA's control program is a script here,
and a test sets the result of its trial."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from daemon.config.loading import parse
from daemon.config.pipeline import PipelineSection
from daemon.core.errors import WorkerLost
from daemon.core.messages import Item, Setup
from daemon.core.slab import Slab
from daemon.layout import layout
from daemon.layout.layout import Layout
from daemon.monitoring.metrics import Metrics
from daemon.service.lifecycle import Service, run_service
from daemon.system.gpus import Gpu
from daemon.workers import mps
from daemon.workers.mps import PIPES, MpsServer, is_installed
from daemon.workers.opening import open_batchers
from daemon.workers.pool import Pool
from daemon.workers.slot import Slot
from daemon.workers.worker import Worker
from stages.contract.base import Limits
from tests.daemon.workers.test_room import Card, count_published, running, states_of, workers_of
from tests.daemon.workers.test_room import card as card
from tests.daemon.workers.test_room import open_place as open_full_place
from tests.daemon_process import Place, until, wait_for
from tests.faults.test_workers import drop_marked, failed_as, open_place

pytestmark = pytest.mark.anyio

REAL_PYTHON = sys.executable
GPUS = [Gpu(0, "GPU-1", "", 1 << 36, 1 << 36, 0, "9.0", None, ())]
CONTROL = """#!/bin/sh
echo $$ "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_PIPE_DIRECTORY/pid"
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""
PYTHON = """#!/bin/sh
[ "$4" = try ] || exec {python} "$@"
[ {status} = 0 ] || echo CUDA error {status} >&2
exit {status}
"""
PARENT = """
import os, signal, sys, anyio
from daemon.workers.mps import PIPES, MpsServer

sys.executable = sys.argv[1]

async def main():
    print((await MpsServer("GPU-1").share())[PIPES], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control program is installed, and works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_program(tmp_path / mps.CONTROL, CONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    python = write_program(tmp_path / "python", PYTHON.format(python=shlex.quote(REAL_PYTHON), status=0))
    monkeypatch.setattr(sys, "executable", str(python))
    return python


def control_of(shared: dict[str, str]) -> int:
    pid, gpu = Path(shared[PIPES], "pid").read_text().split()
    assert gpu == "GPU-1"
    return int(pid)


def is_alive(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}").exists()
        and b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().split(b")")[1][:3]
    )


async def test_all_that_share_a_gpu_have_one_server_until_it_is_stopped(trial: Path) -> None:
    server = MpsServer("GPU-1")
    shared = await server.share()
    assert await server.share() is shared
    control = control_of(shared)
    assert is_alive(control)
    await start_and_stop()  # another daemon's, which leaves this one its folder
    assert await anyio.Path(shared[PIPES]).exists()
    await server.stop()
    assert not is_alive(control)
    assert not await anyio.Path(shared[PIPES]).exists()
    assert await server.share() == {}


async def test_if_mps_does_not_work_workers_take_turns_and_it_is_tried_once(
    trial: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_program(trial, PYTHON.format(python=shlex.quote(REAL_PYTHON), status=3))
    server = MpsServer("GPU-1")
    assert [await server.share() for _ in range(2)] == [{}, {}]
    told = "".join(capfd.readouterr())
    assert told.count("MPS does not work here") == told.count("CUDA error 3") == 1
    assert not list(trial.parent.glob("visiond-mps-*"))


def test_an_administrators_own_server_is_left_to_cuda(trial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setenv(PIPES, "/run/mps")
    assert not is_installed()


def test_an_administrators_server_at_the_usual_place_too(
    trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "ADMINISTRATORS", trial)
    assert not is_installed()


def test_without_the_control_program_there_is_no_server(trial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.with_name(mps.CONTROL).unlink()
    monkeypatch.setenv("PATH", str(trial.parent))
    assert not is_installed()


async def test_a_control_program_that_leaves_is_not_waited_for(
    trial: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_program(trial.with_name(mps.CONTROL), "#!/bin/sh\nexit 7\n")
    with anyio.fail_after(mps.TRIAL_SECONDS / 2):
        assert await MpsServer("GPU-1").share() == {}
    assert "exited with status 7" in "".join(capfd.readouterr())


async def test_without_room_for_its_sockets_workers_take_turns(
    trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(trial / "nowhere"))
    assert await MpsServer("GPU-1").share() == {}


@pytest.mark.parametrize(
    ("pipeline", "servers"),
    [
        ({"devices": ["cuda:0"], "workers_per_device": 2}, ["cuda:0"]),
        ({"devices": ["cuda:0"], "workers_per_device": 2, "mps": False}, []),
        ({"devices": ["cuda:0"], "workers_per_device": 1}, []),
        ({"devices": ["cpu:0"], "workers_per_device": 2}, []),
    ],
)
def test_only_several_workers_of_a_gpu_share_it_and_only_where_that_is_wanted(
    pipeline: dict[str, Any], servers: list[str], trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: GPUS)
    made = Layout.of(parse(Place(tmp_path, {"pipeline": pipeline}).settings, tmp_path))
    with contextlib.closing(Slab(1 << 20)) as slab:
        [batcher] = open_batchers(made, slab, Metrics())
    assert [slot.device for slot in batcher.pool.slots if slot.server] == servers * 2


def test_after_a_daemon_is_killed_its_server_ends_and_the_next_start_removes_the_servers_folder(
    trial: Path,
) -> None:
    environment = os.environ | {"TMPDIR": str(trial.parent)}
    told = subprocess.run(
        [trial, "-c", PARENT, trial], env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == -signal.SIGKILL
    folder = Path(told.stdout.split()[-1])
    control = control_of({PIPES: str(folder)})
    wait_for(lambda: not is_alive(control), "its end")
    assert folder.exists()
    anyio.run(start_and_stop)
    assert not folder.exists()


async def test_the_folder_of_a_server_at_work_stays(trial: Path) -> None:
    first, second = MpsServer("GPU-1"), MpsServer("GPU-2")
    folder = anyio.Path((await first.share())[PIPES])
    await second.share()
    stayed = await folder.exists()
    await first.stop()
    await second.stop()
    assert stayed


async def start_and_stop() -> None:
    server = MpsServer("GPU-1")
    assert await server.share()
    await server.stop()


@pytest.mark.parametrize("end", ["segfault", "lost", ""])
async def test_the_first_lost_worker_ends_the_sharing_and_only_its_own_image_fails(
    end: str, trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: GPUS)
    place: Place = open_place(
        tmp_path, {"POISON": end} if end else {}, devices=["cuda:0"], workers_per_device=2
    )
    poison = drop_marked(place, "POISON", 1) if end else set()
    place.drop_many(range(40))
    with anyio.fail_after(60):
        await run_service(parse(place.settings, tmp_path), once=True)
    told = "".join(capfd.readouterr())
    assert told.count("workers share the GPU") == 1
    assert told.count("take turns on the GPU from now on") == len(poison)
    assert not list(trial.parent.glob("visiond-mps-*"))
    assert failed_as(place.assert_kept(DONE=40, **({"FAILED": 1} if poison else {})), "poison") == poison


async def test_status_and_metrics_show_which_workers_share_their_gpu(
    trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "list_gpus", lambda: GPUS)
    pipeline = {"devices": ["cuda:0", "cuda:0", "cpu"]}
    place = Place(tmp_path, {"pipeline": pipeline, "http": {"listen": "127.0.0.1:0"}})
    service = Service(parse(place.settings, tmp_path))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        await until(lambda: service.loaded)
        table = (await to_thread.run_sync(place.command, "status")).stdout
        # Another table follows in the quiet hours, when upkeep tasks have run.
        workers = [line.split()[1:3] for line in table.splitlines() if line.startswith("ocr+yolo+clip+blip/")]
        assert workers == [["cuda:0,", "shared"], ["cuda:0,", "shared"], ["cpu", "ready"]]
        status = json.loads((await to_thread.run_sync(place.command, "status", "--json")).stdout)
        assert [worker["shared"] for worker in status["workers"]] == [True, True, False]
        with await to_thread.run_sync(urllib.request.urlopen, f"{service.url}/metrics") as page:
            assert b'visiond_workers_sharing{segment="ocr+yolo+clip+blip"} 2.0' in page.read()
        tasks.cancel_scope.cancel()


def mps_of(worker: Worker) -> bool:
    return PIPES.encode() in Path(f"/proc/{worker.process.pid}/environ").read_bytes()


async def test_workers_that_shared_a_gpu_with_a_lost_one_restart_without_sharing_and_no_image_is_blamed(
    trial: Path,
) -> None:
    setup = Setup("w", "cpu", [], slab_bytes=0, threads=1, decoders=1, limits=Limits(), cascade=None)
    server = MpsServer("GPU-1")
    slots = [Slot(setup, "cuda:0", {}, server) for _ in range(3)]
    metrics = Metrics()
    with contextlib.closing(Slab(1 << 20)) as slab:
        pool = Pool("w", slots, slab.fd, PipelineSection(), metrics)
        async with anyio.create_task_group() as tasks:
            await tasks.start(pool.run)
            workers = [slot.worker for slot in slots if slot.worker]
            assert (
                [mps_of(worker) for worker in workers]
                == [state.shared for state in pool.health()]
                == [True] * 3
            )
            control = control_of(server.shared)
            for worker in workers:
                os.kill(worker.process.pid, signal.SIGSTOP)  # so that they keep what they are given

            async def lose(worker: Worker) -> None:
                with pytest.raises(WorkerLost) as loss:
                    await pool.run_batch(worker, [Item(0, 1, {})])
                assert not loss.value.began

            async with anyio.create_task_group() as batches:
                for worker in workers:
                    batches.start_soon(lose, worker)
                await anyio.lowlevel.checkpoint()
                os.kill(workers[0].process.pid, signal.SIGKILL)
            await until(lambda: all(slot.healthy and slot.worker not in workers for slot in slots))
            assert [mps_of(slot.worker) for slot in slots if slot.worker] == [False] * 3
            assert not any(state.shared for state in pool.health())
            assert not is_alive(control)
            assert [(slot.quick_deaths, slot.lone_deaths) for slot in slots] == [(0, 0)] * 3
            for reason, count in (("died", 1), ("sharing", 2)):
                assert metrics.value("visiond_worker_restarts_total", device="cuda:0", reason=reason) == count
            tasks.cancel_scope.cancel()


async def test_a_worker_that_gives_its_memory_back_does_not_end_the_sharing(
    trial: Path, tmp_path: Path, card: Card, capfd: pytest.CaptureFixture[str]
) -> None:
    place = open_full_place(tmp_path, card, workers=3, mps=True)
    async with running(place) as service:
        card.fill(13)
        place.drop_many(range(40))
        await until(lambda: count_published(place) == 40)
        assert "waiting" in states_of(service)
        card.clear()
        await until(lambda: states_of(service) == ["ready"] * 3)
        assert all(worker.shared for worker in workers_of(service))
        assert "take turns" not in "".join(capfd.readouterr())
    place.assert_kept(DONE=40)
