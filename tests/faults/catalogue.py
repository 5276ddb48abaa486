"""The faults that visiond promises to survive, one row each: what happens, what is promised,
and how it is tested.

`full`: the sizes of `make faults`. `short`: those of `make test`; None if a separate test covers it there.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.daemon.inbox.test_inputs import PIXELS, mix, name_of
from tests.daemon_process import SLACK_SECONDS, Daemon, Place, picture
from tests.faults import (
    alerts,
    clocks,
    cluster,
    damage,
    executors,
    failures,
    hang,
    kill,
    load,
    looks,
    persistent,
    power,
    reads,
    renames,
    scarce,
    sinks,
    stop,
    traps,
    unpacking,
    unread,
    uploads,
)
from tests.faults.clocks import HOUR, YEAR
from tests.inputs import CATALOGUE, ODD, mutate

RATE_KEPT = 0.95
# Of memory: workers keep what they free, and how much of it depends on what meets in them.
MOST_GROWTH = 9 / 8
REAL = {"backend": ""}
PYTEST_ROOT = Path(__file__).parent.parent


class Figure(NamedTuple):
    text: str
    passed: bool


Sizes = Mapping[str, int]
Try = Callable[[Path, random.Random, Sizes], Figure]


@dataclass(frozen=True)
class Row:
    number: str
    fault: str
    goal: str
    attempt: Try
    full: Sizes
    short: Sizes | None = None


def kill_daemons(folder: Path, chance: random.Random, sizes: Sizes, *, group: bool = False) -> Figure:
    outcome = kill.kill_daemons(kill.open_place(folder), sizes["kills"], sizes["files"], chance, group=group)
    return Figure(str(outcome), outcome.kept)


def kill_groups(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    return kill_daemons(folder, chance, sizes, group=True)


def kill_workers(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = kill.kill_workers(kill.open_place(folder, workers=2), sizes["kills"], sizes["waiting"], chance)
    return Figure(
        str(outcome), outcome.kept and outcome.figures["of their rate kept by the others"] >= RATE_KEPT
    )


def kill_under_load(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = kill.kill_under_load(folder, sizes["lives"], sizes["kills"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_while_unpacking(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = unpacking.kill_while_unpacking(folder, sizes["kills"], sizes["archives"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_while_uploading(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = uploads.kill_while_uploading(folder, sizes["kills"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_while_sinks_write(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = sinks.kill_while_sinks_write(folder, sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_while_renaming(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    kills, problems = renames.kill_while_renaming(folder, chance, sizes["kills"])
    text = f"{kills} kills, each at another call: {len(problems)} rows, sidecars, bins or sinks that show it"
    return Figure("\n".join([text, *problems[:10]]), kills > 0 and not problems)


def rename_at_random(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    files, more, problems = renames.rename_at_random(folder, chance, sizes["acts"], sizes["kills"])
    text = f"{files} files, {more} of them with a second number; {len(problems)} lost, double or wrong"
    return Figure("\n".join([text, *problems[:10]]), more <= files // 20 and not problems)


def kill_during_looks(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = looks.kill_looks(folder, sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_cluster(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = cluster.kill_cluster(folder, sizes["kills"], sizes["images"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_executors(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = executors.kill_executors(folder, sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_daemons_with_executors(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = kill.kill_daemons(executors.open_executors(folder), sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def kill_workers_of_executors(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = executors.kill_workers(folder, sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def stop_an_executor(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = executors.stop_an_executor(folder, sizes["files"])
    return Figure(str(outcome), outcome.kept)


def drain(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = kill.drain_daemons(kill.open_place(folder), sizes["kills"], sizes["files"], chance)
    return Figure(str(outcome), outcome.kept)


def stop_at_any_moment(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    tally = stop.stop_at_any_moment(folder, chance, sizes["stops"], sizes["entries"])
    return Figure("\n".join([str(tally), *tally.problems[:10]]), not tally.problems)


def set_good_images(sizes: Sizes) -> tuple[Callable[[int], bytes], dict[str, Any]]:
    """What draws the good images of a row by their number, and settings for them: small pictures, or photographs of 12
    megapixels and a slab that holds two. Their decoders are killed, which counts as an attempt."""
    if "photographs" not in sizes:
        return picture, {}
    pipeline = {"slab_bytes": 8 << 20, "max_attempts": 1000, "max_pixels": 50_000_000}
    clip = {"backend": "fake", **PIXELS}
    draw = load.draw_inputs({"phone": sizes["photographs"]})
    return draw, {"pipeline": pipeline, "stages": {"clip": clip}}


def shake(place: Place, chance: random.Random, sizes: Sizes) -> contextlib.AbstractContextManager[list[int]]:
    """Kills decoders if there are photographs."""
    return kill.kill_decoders(place, chance) if "photographs" in sizes else contextlib.nullcontext([])


def poison(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    """By a fake OCR, after its batch was decoded if there are photographs."""
    draw, settings = set_good_images(sizes)
    place = Place(folder, {"stages": {"ocr": {"options": {"fail": {"SEGV": "segfault"}}}}})
    place.configure(settings)
    bad = {b"%05d.ppm" % number for number in chance.sample(range(sizes["files"]), sizes["poison"])}
    for number in range(sizes["files"]):
        path = b"%05d.ppm" % number
        place.drop(path, draw(number) + (b"SEGV" if path in bad else b""))
    with Daemon(place) as daemon:
        daemon.wait_idle(sizes["files"], 1200)
        others = [event for event in daemon.events("worker lost") if event["cause"] != "killed by SIGSEGV"]
        assert daemon.stop() == 0
    verdict = place.judge()
    failed = {path for path, reason in verdict.reasons("FAILED").items() if reason == "poison"}
    exactly = failed == bad and verdict.counts == {"DONE": sizes["files"] - len(bad), "FAILED": len(bad)}
    return Figure(
        f"{len(failed)} FAILED(poison), {len(bad & failed)} of the {len(bad)}; {len(others)} workers lost by others",
        exactly and not (others or verdict.problems),
    )


def fail_calls(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    tally = failures.fail_calls(folder, chance, sizes["calls"])
    calls = ", ".join(f"{count} × {name}" for name, count in tally.failed.items())
    ends = ", ".join(f"{count} {ending}" for ending, count in tally.endings.items())
    return Figure(
        "\n".join([f"{calls}: {ends}; {len(tally.problems)} violations", *tally.problems]), not tally.problems
    )


def fail_power(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    modes = power.MODES if sizes["modes"] == len(power.MODES) else chance.sample(power.MODES, sizes["modes"])
    disks = power.fail_power(folder, chance, sizes["files"], sizes["starts"], modes)
    text = f"{disks.failures} disks, a daemon started on {disks.started} of them: {len(disks.problems)} sources lost, rows"
    text += " that cannot be emitted, or other faults"
    return Figure("\n".join([text, *disks.problems[:20]]), disks.started > 0 and not disks.problems)


def keep_failing(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    tally = persistent.keep_failing(folder, chance, sizes["faults"])
    ends = ", ".join(f"{count} {ending}" for ending, count in tally.endings.items())
    text = f"{tally.tried} kinds of failure: {ends}; {len(tally.problems)} violations"
    return Figure("\n".join([text, *tally.problems]), tally.tried == sizes["faults"] and not tally.problems)


def fail_reads(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcome = reads.fail_reads(folder, chance, sizes["seconds"])
    return Figure(
        str(outcome), not outcome.endings and not outcome.verdict.problems and outcome.failed.total() > 0
    )


def drop_while_stopped(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    seconds = load.drop_while_stopped(folder, sizes["files"])
    return Figure(f"{sizes['files']} of {sizes['files']} in {seconds:.1f} s", seconds < 30)


def lose_a_device(folder: Path, _chance: random.Random, _sizes: Sizes) -> Figure:
    text = load.lose_a_device(folder)
    return Figure(text, "health degraded" in text)


def take_a_worker(folder: Path, _chance: random.Random, _sizes: Sizes) -> Figure:
    return Figure(f"its image DONE {load.take_a_worker(folder):.1f} s later, the daemon lives on", True)


def beset(folder: Path, _chance: random.Random, sizes: Sizes, begin: bytes = load.REQUEST) -> Figure:
    kept, centiles = load.beset_by_slow_clients(folder, sizes["clients"], sizes["windows"], begin)
    median, slowest = centiles[49], centiles[98]
    full = kept >= 0.98 and slowest < 0.1
    # Other tests may delay anything once, but the work goes on, and most are answered.
    short = kept >= 0.2 and median < 1.0
    passed = full if sizes["windows"] > 5 else short
    return Figure(f"{kept:.1%} of the rate kept, /healthz p99 {1000 * slowest:.0f} ms", passed)


def beset_by_handshakes(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    return beset(folder, chance, sizes, load.HELLO)


def grow(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    files, slope = load.grow(folder, sizes["files"])
    flat = slope < 100 or sizes["files"] < 50_000  # SQLite's cache must be full first
    return Figure(f"{files:+d} open files, {slope:+.0f} bytes an image", abs(files) <= 5 and flat)


def grow_mixed(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    """The most of the first three tenths of a run against the median of the last three."""
    kinds = {kind: count for kind, count in sizes.items() if kind != "files"}
    samples = load.grow_mixed(folder, sizes["files"], kinds)
    early = {part: max(sample[part] for sample in samples[:3]) for part in samples[0]}
    late = {part: statistics.median(sample[part] for sample in samples[-3:]) for part in early}
    text = ", ".join(
        f"{part} {early[part] >> 20:,} MiB, {late[part] / early[part] - 1:+.1%}" for part in early
    )
    return Figure(text, all(late[part] < early[part] * MOST_GROWTH for part in early))


def mix_inputs(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    draw, settings = set_good_images(sizes)
    place = mix(folder, sizes["copies"], sizes["good"], chance, REAL, draw)
    place.configure(settings)
    with shake(place, chance, sizes) as killed:
        run = place.command("run", "--once", timeout=1800)
    verdict = place.judge()
    good = sum(path.startswith(b"good-") for _, path in verdict.results)
    failed = verdict.reasons("FAILED")
    expected = {
        name_of(item, copy).encode(): item.reason for item in CATALOGUE for copy in range(sizes["copies"])
    }
    astray = [name for name, reason in expected.items() if failed.get(name) != reason]
    lost = run.stderr.count('"worker lost"')
    text = f"{good} good DONE, {len(astray)} bad or odd ones in another state, {lost} workers lost"
    text += f", {len(killed)} decoders killed" if killed else ""
    kept = good == sizes["good"] + 1 and not (astray or lost or verdict.problems)
    return Figure("\n".join([text, *map(repr, astray[:10]), *verdict.problems[:10]]), kept)


def fuzz(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    """CLIP is real, or a fake that reads pixels too, so that they are decoded."""
    pipeline = {"max_attempts": 1, "max_pixels": 4_000_000, "decode_seconds": 5}
    place = Place(folder, {"pipeline": pipeline, "stages": {"clip": REAL if sizes["real"] else PIXELS}})
    draw, settings = set_good_images(sizes)
    place.configure(settings)
    originals, good = [item.make() for item in ODD], set()
    for number in range(sizes["files"]):
        path, data = b"%d.jpg" % number, draw(number) if "photographs" in sizes else chance.choice(originals)
        if chance.randrange(100) < sizes.get("mutated %", 100):
            data = mutate(data, chance)
        else:
            good.add(path)
        place.drop(path, data)
    with Daemon(place) as daemon, shake(place, chance, sizes) as killed:
        daemon.wait_idle(sizes["files"], 1800)
        lost = len(list(daemon.events("worker lost")))
        assert daemon.stop() == 0
    verdict = place.judge()
    reasons = collections.Counter(verdict.reasons("FAILED").values())
    failed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    astray = good - {path for _, path in verdict.results}
    text = f"{verdict.counts['DONE']} DONE, FAILED {failed}; {lost} workers lost"
    text += f", {len(killed)} decoders killed" if killed else ""
    kept = reasons["decoder"] and not (
        reasons.keys() & {"stage", "timeout", "poison"} or astray or lost or verdict.problems
    )
    return Figure("\n".join([text, *verdict.problems[:10]]), bool(kept))


def lose_the_ledger(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    seconds = load.lose_the_ledger(folder, sizes["files"])
    return Figure(f"{sizes['files']} images restored in {seconds:.1f} s", seconds < 60)


def flip_results(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    flips = sizes["flips"]
    found, kept = damage.repair_results(folder, chance, flips)
    return Figure(
        f"{found} of {flips} found, the true one kept {kept} of {flips} times", found == kept == flips
    )


def flip_anywhere(folder: Path, chance: random.Random, sizes: Sizes) -> Figure:
    outcomes, problems = damage.flip_anywhere(folder, chance, sizes["flips"])
    text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return Figure("\n".join([f"{text}; {len(problems)} false or lost", *problems]), not problems)


def start_among_traps(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    laid, sprung, done = traps.spring(folder, real=bool(sizes["real"]))
    return Figure(
        "\n".join([f"{laid} traps, {len(sprung)} ran, {done} of 6 images DONE", *sprung[:10]]),
        not sprung and done == 6,
    )


def leave_the_log_unread(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    kept, dropped, healthy, seconds, status, problems = unread.leave_unread(
        folder, sizes["bad"], sizes["good"], sizes["pairs"]
    )
    text = f"{kept:.1%} of the rate kept, {dropped} lines dropped and counted, stopped in {seconds:.1f} s with status {status}"
    passed = kept >= RATE_KEPT and dropped > 0 and healthy and status == 0 and seconds < 10 and not problems
    return Figure("\n".join([text, *problems[:10]]), passed)


def set_the_clock(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    """Set the clock back and forth while a daemon runs, and between two runs."""
    retry, rounds = float(sizes["retry_seconds"]), sizes["rounds"]
    off = clocks.set_in_one_life(folder / "life", retry, [-HOUR, YEAR, *[-HOUR, YEAR] * (rounds - 1)])
    late = [clocks.set_between_two_lives(folder / f"lives-{n}", retry, HOUR, 0) for n in range(rounds)]
    late += [clocks.set_between_two_lives(folder / f"forward-{n}", retry, 0, YEAR) for n in range(rounds - 1)]
    text = f"{len(off)} tries in one life off by {min(off):+.2f} to {max(off):+.2f} s, "
    text += f"{len(late)} after another start late by {max(late):+.2f} s at most"
    return Figure(text, max(map(abs, off)) < 2 + SLACK_SECONDS and max(late) < 2 + SLACK_SECONDS)


def starve_of_files(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    # With more, HTTP's limit on waiting clients applies first.
    limits = [64 + 32 * step for step in range(sizes["limits"])]
    found = {
        limit: scarce.work_with_few_files(folder / str(limit), limit, sizes["images"]) for limit in limits
    }
    done, pauses = sum(f.done for f in found.values()), sum(f.pauses for f in found.values())
    text = f"limits {', '.join(map(str, limits))}: {done} images DONE beside {scarce.CLIENTS} clients, {pauses} pauses"
    kept = all(f.named and f.healthy and f.done == sizes["images"] for f in found.values())
    return Figure(text, kept and not pauses)


def kill_with_a_worker_that_hangs(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    left = hang.kill_while_a_worker_hangs(folder, sizes["kills"])
    return Figure(f"{sizes['kills']} kills, {left} processes left after 5 s", not left)


def drive_alerts(folder: Path, _chance: random.Random, sizes: Sizes) -> Figure:
    return Figure(alerts.drive_alerts(folder, sizes), True)


def by_tests(*names: str) -> Try:
    """Rows that tests of `make test` cover completely."""
    # Otherwise only `make faults` would notice that a test has been renamed.
    files = [PYTEST_ROOT.parent / name.split("::")[0] for name in names if name.startswith("tests/")]
    tests = {test for file in files for test in re.findall(r"def (test_\w+)", file.read_text())}
    words = re.findall(r"\w{4,}", names[names.index("-k") + 1]) if "-k" in names else []
    missing = {name.split("::")[1] for name in names if "::" in name} - tests
    missing |= {word for word in words if not any(word in test for test in tests)}
    assert not missing, f"no test of {names[0]} has a name with {missing}"

    def attempt(folder: Path, _chance: random.Random, _sizes: Sizes) -> Figure:
        command = [sys.executable, "-m", "pytest", "--basetemp", str(folder / "tests"), *names]
        run = subprocess.run(command, cwd=PYTEST_ROOT.parent, capture_output=True, text=True, check=False)
        return Figure(
            run.stdout.strip().splitlines()[-1] if run.returncode == 0 else run.stdout[-3000:],
            run.returncode == 0,
        )

    return attempt


FAULTS, DAEMON, STAGES = "tests/faults/", "tests/daemon/", "tests/stages/"
KILLED = "0 lost, double, torn, wrong; 0 orphan processes after 5 s"
ROWS = [
    Row("1", "kill -9 the daemon", KILLED, kill_daemons, {"kills": 200, "files": 10_000}),
    Row("2", "kill -9 the process group", KILLED, kill_groups, {"kills": 100, "files": 5_000}, {"kills": 2, "files": 200}),
    Row("3", "kill -9 a random worker", f"{KILLED}; the others keep 95 %", kill_workers, {"kills": 300, "waiting": 3_000}),
    Row("3 load", "kill -9 a worker twice a second, under full load", f"{KILLED}; no daemon ends", kill_under_load,
        {"lives": 5, "kills": 40}, {"lives": 1, "kills": 1}),
    Row("4", "a file makes its worker segfault", "exactly those FAILED(poison)", poison, {"poison": 10, "files": 1000}),
    Row("4 large", "the same among photographs of 12 megapixels, three in ten files", "exactly those FAILED(poison)", poison,
        {"poison": 9, "files": 30, "photographs": 5}),
    Row("5", "a worker hangs, interpreter lock held", "found within the time-out + 2 s",
        by_tests(f"{FAULTS}test_workers.py::test_a_worker_that_hangs_with_the_interpreter_lock_held_is_replaced_in_time"), {}),
    Row("6", "event loop blocked", "the watchdog is not fed; systemd restarts within WatchdogSec + 5 s",
        by_tests(f"{FAULTS}test_lifecycle.py", "tests/deploy/test_service.py", "-k", "watchdog or systemd"), {}),
    Row("7", "SIGTERM under load", "each drains, exit 0, in < 10 s", drain,
        {"kills": 100, "files": 5_000}, {"kills": 2, "files": 200}),
    Row("8", "second daemon on the same state", "exit 75 in < 1 s",
        by_tests(f"{FAULTS}test_lifecycle.py", "-k", "second_daemon"), {}),
    Row("9", "the n-th call that changes files fails", "0 violations", fail_calls, {"calls": 1_000}, {"calls": 3}),
    Row("10", "power loss at each flush", "0 sources lost, 0 DONE rows that cannot be emitted", fail_power,
        {"files": 60, "starts": 20, "modes": 3}, {"files": 12, "starts": 2, "modes": 1}),
    Row("11", "results or state file system full", "pauses, says why, goes on in ≤ 10 s",
        by_tests(f"{FAULTS}test_disk.py", "-k", "full"), {}),
    Row("12", "read-only or failing results folder", "pauses, says so once",
        by_tests(f"{FAULTS}test_disk.py", "-k", "read_only or place"), {}),
    Row("13", "inotify overflow", "all in the ledger in 30 s", drop_while_stopped, {"files": 20_000}),
    Row("14", "inotify limits used up", "polls, all found, one warning",
        by_tests(f"{DAEMON}inbox/test_watcher.py", "-k", "without_watches_left"), {}),
    # A GPU's faults are made by fakes and, where there is a GPU, by itself.
    Row("15", "out of GPU memory", "batch halved, 0 FAILED",
        by_tests(f"{FAULTS}test_workers.py", f"{FAULTS}test_gpu.py", "tests/daemon/workers/test_room.py",
                 "-k", "lack_of_memory or no_memory_for or neighbor or even_one_image"), {}),
    Row("16", "sticky device error", "worker replaced, 0 lost; the last one gone: exit 69",
        by_tests(f"{FAULTS}test_workers.py", f"{FAULTS}test_gpu.py",
                 "-k", "quarantined_even or fails_on_every or device_side_assert or killed_on_a_real_gpu"), {}),
    Row("17", "a device's workers die (fake)", "its slot closed, health degraded, the others run", lose_a_device, {}, {}),
    Row("17", "a device that CUDA does not see", "its slot closed, the others run; the last one gone: exit 69",
        by_tests(f"{FAULTS}test_workers.py", "-k", "cuda_does_not_see"), {}),
    Row("18", "the OOM killer takes a worker", "image retried, daemon stays up", take_a_worker, {}, {}),
    Row("19", "ledger lost or damaged", "refused with the fix named; rebuilt from the sidecars, no model runs",
        by_tests(f"{FAULTS}test_recovery.py", "-k", "ledger"), {}),
    Row("19", "a large ledger lost", "100,000 rows in < 60 s", lose_the_ledger, {"files": 100_000}),
    Row("20", "sidecars deleted or edited", "each found and written again by one command",
        by_tests(f"{FAULTS}test_recovery.py", "-k", "thousand_deleted_or_edited"), {}),
    Row("21", "weights altered or missing", "refused, file named", by_tests(f"{STAGES}weights/test_packs.py",
             "-k", "altered"), {}),
    Row("22", "no network", "0 sockets opened", by_tests("tests/acceptance/test_end_to_end.py", "-k", "socket"), {}),
    Row("23", "1,000 slow clients", "rate −2 % at most, /healthz p99 < 100 ms", beset,
        {"clients": 1_000, "windows": 10}, {"clients": 1_000, "windows": 1}),
    Row("23 TLS", "1,000 clients with half a handshake", "the same", beset_by_handshakes,
        {"clients": 1_000, "windows": 10}, {"clients": 1_000, "windows": 1}),
    Row("24", "a newer ledger", "refused, untouched", by_tests(f"{DAEMON}ledger/test_schema.py", "-k", "newer_ledger"), {}),
    Row("25", "100,000 images in one process life", "±5 open files, memory flat", grow, {"files": 100_000}, {"files": 1_000}),
    Row("mixed memory", "50,000 web pictures, photographs, screenshots and scans in one process life",
        "daemon, workers and decoders: in the last three tenths < 1/8 more memory than in the first three", grow_mixed,
        {"files": 50_000, "web": 128, "screen": 17, "scan": 9, "phone": 6}),
    Row("26", "SIGTERM at any moment of start, scan, load and work, one and ten inboxes", "exit 0, never a crash",
        stop_at_any_moment, {"stops": 300, "entries": 20_000}, {"stops": 4, "entries": 500}),
    Row("27", "a folder of traps named like every module", "none runs", start_among_traps, {"real": 1}, {"real": 0}),
    Row("28", "a folder that may not be read, a path over PATH_MAX", "in log, status, metrics, check; `run --once` exits 74",
        by_tests(f"{FAULTS}test_unread.py"), {}),
    Row("29", "ledger emptied, lost, cut, exchanged; deleted or replaced under the daemon", "refused, or noticed in a rescan",
        by_tests(f"{FAULTS}test_ledger_damage.py", "-k", "lost or running or another or restored or allows_a_new"), {}),
    Row("53", "a folder of results is renamed or its mount goes away", "named in a rescan; nothing marked or moved elsewhere",
        by_tests(f"{FAULTS}test_away.py", "-k", "results"), {}),
    Row("54", "an inbox is renamed or its mount goes away", "its images stay PENDING, it is named; `run --once` exits 74",
        by_tests(f"{FAULTS}test_away.py", "-k", "inbox_that_is or deletes"), {}),
    Row("30", "a bit flips in a stored result", "found when read; repair keeps the true one", flip_results,
        {"flips": 24}, {"flips": 24}),
    Row("30", "a bit flips anywhere in the ledger", "refused, noticed or harmless; nothing false, nothing lost", flip_anywhere,
        {"flips": 24}, {"flips": 2}),
    Row("31", "a log that nobody reads", "rate ≥ 95 %, /healthz answers, SIGTERM ends it, dropped lines counted",
        leave_the_log_unread, {"bad": 1_500, "good": 6_000, "pairs": 3}, {"bad": 1_000, "good": 200, "pairs": 0}),
    Row("32", "the clock set back an hour, forward a year", "retries due in their own time ± 2 s", set_the_clock,
        {"retry_seconds": 2, "rounds": 2}, {"retry_seconds": 1, "rounds": 1}),
    Row("33", "few descriptors, and clients that reconnect", "work goes on, cause named", starve_of_files,
        {"limits": 3, "images": 2_000}),
    Row("34", "numbers from outside at their bounds", "refused by name",
        by_tests(f"{DAEMON}config/test_loading.py", f"{DAEMON}config/test_state.py", f"{FAULTS}test_ledger_damage.py",
                 "-k", "more_memory or number or bounded or bounds"), {}),
    Row("56", "a machine becomes too slow for a batch within its limit", "one worker lost, smaller batches, 0 FAILED",
        by_tests(f"{FAULTS}test_workers.py", f"{DAEMON}workers/test_batcher.py", "-k", "too_slow or too_long"), {}),
    Row("55", "a start meets a temporary error of the system (EIO, ENOSPC, EMFILE, an address in use)",
        "exit 74, which the unit repeats, not 78", by_tests(f"{FAULTS}test_starts.py"), {}),
    Row("57", "wrong tokens; a forged change with a wrong token beside a good cookie", "401, later and logged; nothing changes",
        by_tests(f"{DAEMON}server/test_guard.py", f"{DAEMON}server/test_page.py", "-k", "wrong_token or tries_tokens"), {}),
    Row("58", "images and state files with times beyond 64 bits or any calendar", "each DONE once; no command fails",
        by_tests(f"{DAEMON}inbox/test_inputs.py", f"{DAEMON}cli/test_cli.py", "-k", "any_time or any_calendar"), {}),
    Row("59", "a worker is lost while rate and remaining time are shown", "those of the workers at work",
        by_tests(f"{DAEMON}server/test_status.py", "-k", "no_worker or are_left"), {}),
    Row("35", "daemon killed while a worker hangs, interpreter lock held", "no orphan after 5 s",
        kill_with_a_worker_that_hangs, {"kills": 20}),
    Row("36", "a call keeps failing in a running daemon, for each cause", "it waits, says why, goes on; 0 violations",
        keep_failing, {"faults": len(persistent.FAULTS)}, {"faults": 2}),
    Row("37", "kill -9 a random executor", KILLED, kill_executors, {"kills": 100, "files": 10_000}, {"kills": 3, "files": 300}),
    Row("38", "an executor hangs", "the others go on, it is replaced; 0 lost, double, torn, wrong", stop_an_executor,
        {"files": 2_000}),
    Row("39", "kill -9 the daemon or its process group, three executors", KILLED, kill_daemons_with_executors,
        {"kills": 100, "files": 5_000}, {"kills": 2, "files": 200}),
    Row("40", "kill -9 a random worker, three executors", KILLED, kill_workers_of_executors, {"kills": 100, "files": 10_000}),
    Row("41", "each fault that an alert is about", "exactly its alert fires; none in two hours of work (120 times faster)",
        drive_alerts, {"linger_seconds": 12, "hours": 2}),
    Row("42", "kill -9 the driver, an actor or a node of a Ray cluster", "0 lost, 0 double, no hang", kill_cluster,
        {"kills": 100, "images": 50_000}),
    Row("43", "kill -9 the daemon or its process group while it unpacks archives", KILLED, kill_while_unpacking,
        {"kills": 100, "archives": 300}, {"kills": 3, "archives": 20}),
    Row("44", "kill -9 the daemon or its process group while second looks run", f"{KILLED}; both answers kept",
        kill_during_looks, {"kills": 100, "files": 1_000}, {"kills": 2, "files": 60}),
    Row("uploads", "kill -9 the daemon, its process group or the page while programs upload",
        "every 202 has exactly one result", kill_while_uploading, {"kills": 100}, {"kills": 3}),
    Row("sinks", "kill -9 the daemon or its process group while sinks write a file, labels for YOLO and a row of "
        "Lance for each image", f"{KILLED}; in each sink one file for each image, and one row", kill_while_sinks_write,
        {"kills": 100, "files": 5_000}, {"kills": 4, "files": 200}),
    Row("60", "kill -9 at any call that publishes images whose files were renamed",
        "each keeps its number; one sidecar, under the new name; sinks get nothing", kill_while_renaming,
        {"kills": 150}, {"kills": 1}),
    Row("60", "files and folders renamed at random while they are processed, kill -9 now and then",
        "0 lost, double or wrong; at most one in 20 gets a new number", rename_at_random, {"acts": 600, "kills": 5}),
    Row("61", "files renamed while they wait or are in work; names swapped, reused, given back; links, copies, inodes",
        "each file is one image; other bytes are another",
        by_tests(f"{DAEMON}ledger/test_renamed.py", f"{DAEMON}results/test_former.py"), {}),
    Row("45", "reads and writes of a working daemon fail at random, EIO, ENOSPC and ENOMEM",
        "it pauses, names the disk, goes on; 0 ends, 0 lost, double, torn, wrong", fail_reads,
        {"seconds": 300}, {"seconds": 4}),
    Row("bombs", "archives of folders, holes, long names, ratios; no room while unpacking", "refused whole, nothing left",
        by_tests(f"{DAEMON}unpacking/test_apart.py", f"{DAEMON}unpacking/test_folder.py", "-k",
            "bomb or times_its_size or limit or folders_count or disk_is_looked"), {}),
    Row("mix", "bad inputs among good images", "each in its state, no worker lost", mix_inputs, {"copies": 20, "good": 2_000}),
    Row("mix large", "bad inputs among photographs of 12 megapixels, three in ten files; a decoder killed every few images",
        "each in its state, no worker lost", mix_inputs, {"copies": 4, "good": 400, "photographs": 5}),
    Row("fuzz", "mutated images", "each DONE or its own fault, no worker lost", fuzz,
        {"files": 20_000, "real": 1}, {"files": 200, "real": 0}),
    Row("fuzz large", "photographs of 12 megapixels, three in ten mutated; a decoder killed every few images",
        "each DONE or its own fault, no worker lost", fuzz, {"files": 600, "mutated %": 30, "photographs": 5, "real": 0}),
]  # fmt: skip
