"""`visiond tune` and `visiond plan` as users type them: real daemons with fake stages of known speed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.core.errors import MissingLibrary
from daemon.core.hints import quantity
from daemon.layout.placement import choose_batches
from daemon.layout.profile import Profile, read_profile
from daemon.layout.recorded import read_gpus
from daemon.measure.explain import describe_duration
from daemon.measure.steady import measure_rate
from daemon.terminal.options import check_trackers
from tests.daemon_process import Daemon, Place, wait_for
from tests.forked import TOKEN

pytestmark = pytest.mark.timeout(600)  # up to ten daemons, one after another

WANDB = """
import contextlib, json, os, pathlib

class Error(Exception): ...

class Run(contextlib.nullcontext):
    def __init__(self, folder):
        self.sent = folder / "wandb"
    def __enter__(self):
        return self
    def define_metric(self, name, summary): ...
    def log(self, figures, step):
        with self.sent.open("a") as file:
            print(json.dumps([step, figures]), file=file)

def init(project, dir, config):
    if "KEY" not in os.environ:
        raise Error("No API key configured.")
    return Run(pathlib.Path(dir))
"""
QUICK = ["--seconds", "1", "--count", "20", "--images"]
IMAGE_SECONDS = 0.02


def make_place(folder: Path, *, batch: int = 8, **options: Any) -> Place:
    """One fake stage and twenty images."""
    options = {"latency_per_image_seconds": IMAGE_SECONDS} | options
    place = Place(
        folder,
        {
            "pipeline": {"stages": ["ocr"], "workers_per_device": 0},
            "stages": {"ocr": {"options": options, "batch_size": batch}},
        },
    )
    place.config.write_text(f"# mine\n{place.config.read_text()}")
    place.drop_many(range(20))
    return place


def on_cores(count: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))[:count]
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def tune(
    place: Place, *options: str | Path, prefix: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    return place.command("tune", *QUICK, place.inbox(), *options, prefix=prefix or [])


def profile_of(place: Place) -> Profile:
    profile = read_profile(place.folder / "state")
    assert profile
    return profile


@dataclass(frozen=True)
class Interrupted:
    """A search that got Ctrl-C during its second trial, and what it left."""

    place: Place
    stderr: str
    status: int
    processes: list[int]
    folders: list[Path]
    profile: Profile | None


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """At a place where all workers share one fake device, which loses time when another process has its turn."""
    folder = tmp_path_factory.mktemp("tuned")
    place = make_place(folder, device_file=str(folder / "device"), switch_seconds=4 * IMAGE_SECONDS)
    command = [sys.executable, "-P", "-m", "daemon", "tune", *QUICK, str(place.inbox())]
    environment = os.environ | {TOKEN: place.token, "VISIOND_CONFIG": str(place.config)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        begin = process.stderr.readline() + process.stderr.readline()
        wait_for(lambda: list(folder.glob("state/tuning-*/daemon/state/control.sock")), "the second trial")
        process.send_signal(signal.SIGINT)
        stderr = begin + process.stderr.read()
    left = list((folder / "state").glob("tuning-*"))
    return Interrupted(
        place, stderr, process.returncode, place.orphans(), left, read_profile(folder / "state")
    )


@dataclass(frozen=True)
class Tuned:
    """The same place after a search that went on to its end, and what that printed."""

    place: Place
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def tuned(interrupted: Interrupted) -> Tuned:
    fake = interrupted.place.folder / "fake"
    fake.mkdir()
    (fake / "wandb.py").write_text(WANDB)
    done = tune(interrupted.place, "--wandb", prefix=["env", "KEY=1", f"PYTHONPATH={fake}"])
    assert done.returncode == 0, done.stderr
    return Tuned(interrupted.place, done.stdout, done.stderr)


def test_after_ctrl_c_nothing_runs_and_auto_does_not_use_half_a_search(interrupted: Interrupted) -> None:
    assert interrupted.status == 130, interrupted.stderr
    reported = sum(line.startswith("trial ") for line in interrupted.stderr.splitlines())
    assert reported  # more than one if this machine was busy when the signal was due
    assert f"Stopped; {quantity(reported, 'trial')} kept: `visiond tune` continues." in interrupted.stderr
    assert (interrupted.processes, interrupted.folders, interrupted.profile) == ([], [], None)


def test_the_next_search_continues_without_measuring_again(interrupted: Interrupted, tuned: Tuned) -> None:
    before = interrupted.stderr.splitlines()[:2]
    assert before[1].startswith("trial 1: ")
    assert tuned.stderr.splitlines()[:2] == before


def test_weights_and_biases_gets_each_trial_also_those_of_before_ctrl_c(tuned: Tuned) -> None:
    lines = (tuned.place.folder / "state" / "wandb").read_text().splitlines()
    trials = msgspec.to_builtins(profile_of(tuned.place).trials)
    assert [json.loads(line) for line in lines] == [[step, trial] for step, trial in enumerate(trials, 1)]
    assert {"settings", "images_per_second", "gpu_bytes", "host_bytes", "limited_by"} <= trials[0].keys()


def test_nothing_is_measured_if_weights_and_biases_would_get_nothing(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    refused = tune(make_place(tmp_path), "--wandb", prefix=["env", f"PYTHONPATH={tmp_path}"])
    assert (refused.returncode, "--wandb: No API key configured." in refused.stderr) == (os.EX_USAGE, True)
    assert "trial" not in refused.stderr
    with pytest.raises(MissingLibrary, match="--no-such-library needs no-such-library: pip install no-such"):
        check_trackers(["no-such-library"])


def test_one_worker_is_chosen_where_a_second_one_costs_time(tuned: Tuned) -> None:
    """A second one that only gains nothing may be chosen on a busy machine: there it does gain a few percent."""
    place = tuned.place
    profile = profile_of(place)
    assert profile.best
    assert profile.best.settings.workers == 1
    assert {trial.settings.workers for trial in profile.trials} >= {1, 2} or os.cpu_count() == 1
    assert profile.best.images_per_second == pytest.approx(1 / IMAGE_SECONDS, rel=0.3)
    slower = [trial for trial in profile.trials if trial.settings.workers == 2]
    assert all(trial.images_per_second < 0.85 * profile.best.images_per_second for trial in slower)


def test_the_prediction_is_within_fifteen_percent_of_a_real_run(tuned: Tuned) -> None:
    """Of the fastest of three at most: another program may take the processor for a while."""
    place = tuned.place
    best = profile_of(place).best
    assert best
    rates = [run_with(place, range(100, 300))]
    while len(rates) < 3 and max(rates) < 0.85 * best.images_per_second:
        start = 100 + 200 * len(rates)
        rates.append(run_with(place, range(start, start + 200)))
    assert max(rates) == pytest.approx(best.images_per_second, rel=0.15)


def run_with(place: Place, numbers: range) -> float:
    """Images per second of a run over these images."""
    earlier = set(place.site.results.glob("*"))
    place.drop_many(numbers)
    run = place.run_once()
    assert run.returncode == 0, run.stderr
    times = sorted(file.stat().st_mtime for file in set(place.site.results.glob("*")) - earlier)
    return measure_rate(times)[0]


def test_the_result_is_a_table_a_sentence_and_the_time_of_the_job(tuned: Tuned) -> None:
    place, printed = tuned.place, tuned.stdout
    best = profile_of(place).best
    assert best
    table = printed.splitlines()
    assert table[0].split() == ["settings", "images/s", "spread", "GPU", "MiB", "host", "MiB", "limit"]
    [chosen] = [line for line in table if line.rstrip().endswith("chosen")]
    assert chosen.startswith(str(best.settings))
    assert f"Chosen: {best.settings}, {best.images_per_second:,.4g} images/s." in printed
    assert f"10,000,000 images will take about {describe_duration(best.seconds_for(10_000_000))}." in printed
    assert "trial 1: replicated, 1 worker, batches of 8: " in tuned.stderr


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (40, "40 seconds"),
        (119, "119 seconds"),
        (150, "2.5 minutes"),
        (13_700, "3.8 hours"),
        (86_400 * 400, "400 days"),
    ],
)
def test_a_duration_is_named_in_its_unit(seconds: float, words: str) -> None:
    assert describe_duration(seconds) == words


def test_the_settings_are_written_and_everything_else_stays(tuned: Tuned) -> None:
    place = tuned.place
    best = profile_of(place).best
    assert best
    old, new = place.folder / "daemon.toml.before-tune", place.config
    assert new.read_text().startswith("# mine\n")
    before, after = (tomllib.loads(file.read_text()) for file in (old, new))
    assert after["pipeline"].pop("placement") == "replicated"
    assert after["pipeline"].pop("workers_per_device") == 1
    assert after["stages"]["ocr"].pop("batch_size") == best.settings.batches["ocr"]
    del before["pipeline"]["workers_per_device"], before["stages"]["ocr"]["batch_size"]
    assert before == after


def test_nothing_of_the_trials_is_left(tuned: Tuned) -> None:
    place = tuned.place
    names = {path.name for path in place.folder.rglob("*")}
    assert not [name for name in names if name.startswith("tuning-") or name.endswith("unfinished")]
    assert place.orphans() == []


def test_the_plan_names_the_measured_rate(tuned: Tuned) -> None:
    place = tuned.place
    best = profile_of(place).best
    assert best
    told = place.command("plan").stdout
    assert f"Expected rate: {best.images_per_second:,.4g} images/s. `visiond tune` measured it on 2" in told
    assert "with 20 images of " in told
    assert "Workers with ocr: 1 on cpu.\nBatches: up to " in told
    assert json.loads(place.command("plan", "--json").stdout)["images_per_second"] == best.images_per_second


def test_auto_uses_what_was_measured(tuned: Tuned) -> None:
    """As daemon.toml was before the tuner changed it, but without its own batch size."""
    place = tuned.place
    before = (place.folder / "daemon.toml.before-tune").read_text()
    automatic = place.folder / "automatic.toml"
    automatic.write_text(before.replace('"batch_size" = 8', '"batch_size" = 0'))
    best = profile_of(place).best
    assert best
    planned = json.loads(place.command("plan", "--json", "--config", automatic).stdout)
    assert planned["batches"] == best.settings.batches
    assert planned["why"].startswith("`visiond tune` measured")


def test_batches_that_do_not_fit_are_left_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    place = make_place(
        tmp_path, batch=16, fail={"P6": "oom"}, oom_above=8, device_file=str(tmp_path / "device")
    )
    before = place.config.read_bytes()
    done = tune(place, "--dry-run", "--json", prefix=on_cores(1))
    assert done.returncode == 0, done.stderr
    assert "batches of 16: a batch did not fit into the GPU's memory" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["best"]["settings"]["batches"]["ocr"] <= 8
    assert answer["job"]["seconds"] > answer["job"]["images"] * IMAGE_SECONDS * 0.8
    assert '\n-"batch_size" = 16\n' in done.stderr
    assert place.config.read_bytes() == before
    assert read_profile(tmp_path / "state") is None
    assert not (tmp_path / "daemon.toml.before-tune").exists()


def test_a_running_daemon_is_a_reason_not_to_measure(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with Daemon(place):
        refused = tune(place)
    assert refused.returncode == os.EX_TEMPFAIL
    assert "would falsify the figures; --force" in refused.stderr.replace("\n", " ")
    assert not (tmp_path / "daemon.toml.before-tune").exists()


def test_what_cannot_be_tuned_is_refused_at_once(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    place.configure({"pipeline": {"segment": [{"stages": ["ocr"], "devices": ["cpu"]}]}})
    refused = tune(place)
    assert (refused.returncode, "nothing to tune" in refused.stderr) == (os.EX_CONFIG, True)
    empty = make_place(tmp_path / "empty")
    (tmp_path / "nothing").mkdir()
    none = empty.command("tune", "--images", tmp_path / "nothing")
    assert (none.returncode, "There are no images in" in none.stderr) == (os.EX_NOINPUT, True)
    missing = empty.command("tune", "--images", tmp_path / "missing")
    assert missing.returncode == os.EX_USAGE


def test_where_nothing_works_the_reason_is_printed(tmp_path: Path) -> None:
    place = make_place(tmp_path, batch=1, unusable="no such weights")
    failed = tune(place)
    assert failed.returncode == os.EX_SOFTWARE
    assert "No settings worked. The last ones: " in failed.stderr
    assert "no such weights" in failed.stderr


def test_the_plan_of_another_machine_claims_no_rate(tmp_path: Path) -> None:
    """It also ignores what is set for this machine."""
    place = make_place(tmp_path, batch=7)
    place.configure({"pipeline": {"devices": ["cpu"], "workers_per_device": 3, "placement": "pipelined"}})
    told = place.command("plan", "--gpus", "4xA100-40GB").stdout
    assert "Devices: 4 × A100-40GB with 37 GiB free." in told
    assert re.search(r"Workers with ocr: (\d+) on cuda:0, \1 on cuda:1, \1 on cuda:2, \1 on cuda:3\.", told)
    assert f"Batches: up to {choose_batches(read_gpus('A100-40GB'), 'throughput').usual} images." in told
    assert "Limit: " in told
    assert "Expected rate: not known; only memory was considered." in told
    assert "For comparison: 1 × H200" in place.command("plan", "--gpus", "H200").stdout
    planned = json.loads(place.command("plan", "--gpus", "4xA100-40GB", "--json").stdout)
    assert planned["images_per_second"] is None
    assert {"segments", "why", "batches", "limit"} <= planned.keys()
    assert place.command("plan", "--gpus", "4xB9000").returncode == os.EX_USAGE


def test_the_plan_says_what_a_preference_for_latency_means(tmp_path: Path) -> None:
    place = make_place(tmp_path, batch=0)
    sentence, tuned = "Preference: latency; models are prepared for single images", "images wait for others"
    assert sentence not in place.command("plan").stdout
    place.configure({"pipeline": {"prefer": "latency", "workers_per_device": 1}})
    assert "tune` looks for the highest rate" in tune(place).stderr.replace("\n", " ")
    told = place.command("plan", "--gpus", "H200").stdout
    assert sentence in told
    assert tuned not in told
    assert "measures it" not in told
    assert "Batches: up to 8 images." in told
    place.configure({"pipeline": {"workers_per_device": 5}, "stages": {"ocr": {"batch_size": 64}}})
    told = " ".join(place.command("plan").stdout.split())
    assert f"{tuned} because of daemon.toml: workers_per_device is 5, batch_size of ocr is 64." in told
