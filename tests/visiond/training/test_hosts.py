"""The processes of a training find each other: on one host, and on several by torchrun's addresses."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from daemon.core.labels import Kind
from stages.contract.processes import environment, python
from tests.daemon_process import wait_for
from tests.stages.checkpoints import TOWERS
from tests.visiond.training.labelled import PATIENCE, draw_labelled, make_job, start_forked, train_now
from visiond.training.data import read_file
from visiond.training.launch import _free_port, prepare_for_torchrun
from visiond.training.log import read_log
from visiond.training.settings import CHECKPOINTS, LOG

pytestmark = pytest.mark.timeout(4 * PATIENCE)
STEPS = 100  # so many that the kill comes before the last
# A process of two that would use GPUs, in one of which NCCL fails in the way that the test names.
JOINING = """
import os, sys, torch, torch.distributed as dist
from visiond.training import hardware
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda _: None
rank, how = int(os.environ["RANK"]), sys.argv[1]
start = dist.init_process_group
def fail(backend, **options):
    if backend == "nccl":
        raise RuntimeError("unhandled cuda error\\nLast error: …")
    start(backend, **options)
if rank == 0:
    hardware._try_nccl = lambda *_: ""
elif how == "missing":
    dist.is_nccl_available = lambda: False
else:
    dist.init_process_group = fail
hardware.join_processes(lambda text: print(text) if rank == 0 else None)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
print(dist.get_backend(), value.item())
"""


@pytest.mark.parametrize(
    ("how", "why"), [("missing", "this PyTorch has no NCCL"), ("broken", "unhandled cuda error")]
)
def test_where_nccl_does_not_work_in_one_process_all_use_gloo_and_a_line_says_why(
    how: str, why: str, tmp_path: Path
) -> None:
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    outputs = [tmp_path / "output-0", tmp_path / "output-1"]
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                start_forked(python("-c", JOINING, how), output, environment(address | {"RANK": str(rank)}))
            )
            for rank, output in enumerate(outputs)
        ]
        assert [process.wait(PATIENCE) for process in both] == [0, 0]
    line = f"NCCL does not work here ({why}): the processes exchange gradients by Gloo, which is slower.\n"
    assert [output.read_text() for output in outputs] == [f"{line}gloo 3.0\n", "gloo 3.0\n"]


@contextmanager
def started(job: Path, host: int, port: int, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What docs/training.md says to type on each host."""
    torchrun = [*python("-m", "torch.distributed.run"), "--nnodes", "2", "--nproc-per-node", "1"]
    address = ["--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    with output.open("ab") as file:
        process = subprocess.Popen(
            [*torchrun, *address, "-m", "visiond.training.run", str(job)],
            env=environment({"ACCELERATE_USE_CPU": "true"}),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_two_hosts_train_one_model_and_go_on_after_one_was_killed(tmp_path: Path) -> None:
    data = read_file(draw_labelled(tmp_path) / "tags.csv", tmp_path, Kind.TAGS, 0.1)
    base = tmp_path / "base"
    TOWERS["clip"](base)
    job = make_job(base, tmp_path / "work", "tags", steps=STEPS, learning_rate=1e-3)
    alone = train_now(
        msgspec.structs.replace(job, work=f"{tmp_path}/alone", out=f"{tmp_path}/alone-out"), data
    )
    file = prepare_for_torchrun(job, data)
    outputs = [tmp_path / "output-0", tmp_path / "output-1"]

    with ExitStack() as stack:
        port = _free_port()
        hosts = [
            stack.enter_context(started(file, host, port, output)) for host, output in enumerate(outputs)
        ]
        checkpoints = tmp_path / "work" / CHECKPOINTS
        wait_for(lambda: any(checkpoints.glob("step-*")), "a checkpoint", PATIENCE)
        hosts[1].kill()
        assert hosts[0].wait(PATIENCE) == 1
    assert "\nAnother process of this training has ended, or cannot be reached" in outputs[0].read_text()
    assert "Traceback" not in outputs[0].read_text().partition("Another process")[0]
    assert not Path(job.out).exists()
    last = read_log(tmp_path / "work" / LOG)[-1]["step"]
    assert last < STEPS

    with ExitStack() as stack:
        port = _free_port()
        hosts = [
            stack.enter_context(started(file, host, port, output)) for host, output in enumerate(outputs)
        ]
        assert [host.wait(PATIENCE) for host in hosts] == [0, 0], outputs[0].read_text()
    entries = [entry for entry in read_log(tmp_path / "work" / LOG) if "loss" in entry]
    assert [entry["step"] for entry in entries] == [*range(1, STEPS + 1)]
    assert {entry["processes"] for entry in entries} == {2}
    # Thirteen images to learn from and three held out: neither is a multiple of two, or of a batch.
    assert (len(data.learnt), len(data.held_out)) == (13, 3)
    assert [entry["scores"] for entry in read_log(tmp_path / "work" / LOG) if "scores" in entry][-1][
        "recall"
    ] == 1.0
    together, began = load_file(Path(job.out) / "model.safetensors"), load_file(base / "model.safetensors")
    moved = sum(float(np.abs(alone[name] - began[name]).sum()) for name in alone)
    apart = sum(float(np.abs(alone[name] - together[name]).sum()) for name in alone)
    assert apart < 0.1 * moved
