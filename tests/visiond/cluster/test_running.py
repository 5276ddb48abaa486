"""`visiond ray run` with a real Ray on this machine. Skipped where Ray is not installed: `make ray-test` installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.daemon_process import PATIENCE, Place, picture, wait_for

pytest.importorskip("ray", reason="Ray is not installed: make tools")
pytestmark = pytest.mark.timeout(900)  # on a busy machine Ray needs a minute for each start

WITH_CLUSTER = """\
import subprocess, sys, ray.cluster_utils

head = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.head_node.kill_raylet()
sys.stdin.readline()
cluster.shutdown()
"""


class Cluster:
    """A cluster of one machine, for runs with --address."""

    def __init__(self) -> None:
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", WITH_CLUSTER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        self.address = self._process.stdout.readline().strip()

    def kill(self) -> None:
        """Its process on this machine; no run works any more."""
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._process.communicate(timeout=6 * PATIENCE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """For the runs that need no Ray of their own. The last test kills it."""
    with closing(Cluster()) as started:
        yield started


def run(place: Place, cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("ray", "run", str(place.inbox()), str(place.folder / "rows"), "--address", cluster.address)
    return place.command(*words, *options, prefix=("env",), timeout=6 * PATIENCE)


def start(place: Place, words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "daemon", *words]
    environment = {**os.environ, "VISIOND_CONFIG": str(place.config)}
    return subprocess.Popen(command, env=environment, cwd=place.folder, stderr=subprocess.PIPE)


def paths_of(place: Place) -> list[str]:
    parts = sorted((place.folder / "rows").glob("part-*.parquet"))
    return sorted(
        path for part in parts for path in pyarrow.parquet.read_table(part).column("path").to_pylist()
    )


WITH_GPUS = """\
import sys, ray
from pathlib import Path
from daemon.config.loading import load
from visiond.cluster import running
from visiond.cluster.job import ClusterJob
from visiond.cluster.pool import count_sharers

ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
job = ClusterJob(sys.argv[1], sys.argv[2], load(Path(sys.argv[3])), part_images=5)
running.run(job, load=lambda found, sentence: print(sentence))
print(ray.get(ray.remote(num_cpus=0)(count_sharers).remote(2, 1.0)), "actors on a machine")
"""


def test_each_gpu_of_a_cluster_gets_an_actor(tmp_path: Path) -> None:
    """Ray only counts these GPUs; the machine need not have any."""
    place = Place(tmp_path)
    place.drop_many(range(20))
    words = [place.inbox(), place.folder / "rows", place.config]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITH_GPUS, *words], env=environment, capture_output=True, text=True
    )
    assert "starting 2 actors" in done.stdout, done.stderr
    assert "2 actors on a machine" in done.stdout
    assert paths_of(place) == [f"{number:05d}.ppm" for number in range(20)]


def test_each_input_gets_one_row_also_when_the_driver_is_killed(tmp_path: Path, cluster: Cluster) -> None:
    options = {"latency_per_image_seconds": 0.01}
    place = Place(tmp_path, {"stages": {"blip": {"options": options}}})
    place.drop_many(range(300))
    place.drop("broken.jpg", b"not an image")
    words = ["ray", "run", str(place.inbox()), str(place.folder / "rows"), "--part-images", "20"]
    with start(place, words) as driver:
        wait_for(lambda: [*(place.folder / "rows").glob("part-*.parquet")], "a part", 6 * PATIENCE)
        driver.kill()
    done = run(place, cluster, "--resume", "--part-images", "50")
    assert done.returncode == 1, done.stderr
    assert paths_of(place) == sorted(["broken.jpg", *(f"{number:05d}.ppm" for number in range(300))])
    assert "finished by an earlier run" in done.stdout
    again = place.command(*words, "--resume")
    assert (again.returncode, "301 inputs finished by an earlier run" in again.stdout) == (0, True)
    refused = place.command(*words)
    assert (refused.returncode, "--resume" in refused.stderr) == (64, True)


def test_each_row_of_a_list_gets_one_row_with_what_it_says_also_when_the_driver_is_killed(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Each image stands there four times, as in lists with several captions for each."""
    place = Place(tmp_path, {"stages": {"blip": {"options": {"latency_per_image_seconds": 0.01}}}})
    place.drop_many(range(60))
    listed = pyarrow.table(
        {"URL": [f"inbox/{n % 60:05d}.ppm" for n in range(240)], "TEXT": [f"caption {n}" for n in range(240)]}
    )
    pyarrow.parquet.write_table(listed, tmp_path / "list.parquet", row_group_size=70)
    words = ["ray", "run", "list.parquet", str(place.folder / "rows"), "--column", "URL", "--keep-all"]
    with start(place, [*words, "--part-images", "20"]) as driver:
        wait_for(lambda: [*(place.folder / "rows").glob("part-*.parquet")], "a part", 6 * PATIENCE)
        driver.kill()
    again = [*words, "--part-images", "50", "--resume", "--address", cluster.address]
    done = place.command(*again, prefix=("env",), timeout=6 * PATIENCE)
    assert done.returncode == 0, done.stderr
    parts = sorted((place.folder / "rows").glob("part-*.parquet"))
    found = pyarrow.concat_tables(map(pyarrow.parquet.read_table, parts)).sort_by("row")
    assert found.column("row").to_pylist() == [*range(240)]
    assert found.column("list_TEXT").equals(listed.column("TEXT"))
    assert found.column("path").to_pylist() == [
        str(tmp_path / url) for url in listed.column("URL").to_pylist()
    ]
    assert set(found.column("list").to_pylist()) == {"list.parquet"}


def test_models_that_cannot_be_built_end_the_run_with_the_reason(tmp_path: Path, cluster: Cluster) -> None:
    place = Place(tmp_path, {"stages": {"ocr": {"options": {"unusable": "no such weights"}}}})
    place.drop("a.ppm", picture(1))
    done = run(place, cluster)
    assert (done.returncode, "no such weights" in done.stderr) == (78, True), done.stderr


def test_when_ray_dies_the_command_says_so_and_its_status_is_not_that_of_failed_images(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Ray then ends the driver, which prints nothing."""
    place = Place(tmp_path, {"stages": {"blip": {"options": {"latency_per_image_seconds": 0.05}}}})
    place.drop_many(range(200))
    words = ["ray", "run", str(place.inbox()), str(place.folder / "rows"), "--part-images", "5"]
    with start(place, [*words, "--address", cluster.address]) as driver:
        wait_for(lambda: [*(place.folder / "rows").glob("part-*.parquet")], "a part", 6 * PATIENCE)
        cluster.kill()
        _, said = driver.communicate(timeout=6 * PATIENCE)
    assert (driver.returncode, b"--resume" in said) == (os.EX_UNAVAILABLE, True), said
