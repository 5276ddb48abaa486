"""Measures what traces cost: fake stages over small, new files, without traces, with a sample, and with an earlier tree that
knows no traces, in turns on the same machine.

    python -m benchmarks.traces f8c3105 --rounds 5

Prints the rate, and the CPU time of the daemon and its workers for a thousand images: on a machine that others use too,
the latter says more. A server in this process takes the traces; its CPU time does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from benchmarks.overhead import make_files
from benchmarks.pairs import ROOT, open_tree, run_tree

PROGRAM = """
import sys, pathlib
from benchmarks import overhead
overhead.FAKES += pathlib.Path(sys.argv[3]).read_text()
print(overhead.run_daemon(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
"""


class Run(NamedTuple):
    rate: float  # images per second
    cpu_seconds: float  # for a thousand images


class Receiver(BaseHTTPRequestHandler):
    """Takes every request, and counts them."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Receiver.requests += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def measure(tree: Path, folder: Path, files: int, number: int, settings: str) -> Run:
    work = Path(tempfile.mkdtemp(prefix="visiond-traces-", dir=folder))
    try:
        make_files(work / "inbox", files, number)
        (work / "further.toml").write_text(settings)
        os.sync()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        [rate] = run_tree(tree, PROGRAM, work / "inbox", work, work / "further.toml")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        return Run(rate, 1000 * seconds / files)
    finally:
        shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", nargs="?", help="a commit, or a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--samples", type=float, nargs="*", default=[0.01])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open_tree(options.before) if options.before else nullcontext() as before:
        modes = {"before": (before, "")} if before else {}
        modes["off"] = (ROOT, "")
        for sample in options.samples:
            table = f'[traces]\nsample = {sample}\nendpoint = "http://127.0.0.1:{server.server_port}"\n'
            modes[f"{sample:g}"] = (ROOT, table)
        runs: dict[str, list[Run]] = {name: [] for name in modes}
        for number in range(options.rounds):
            for place in range(len(modes)):  # each begins a round in its turn
                name = [*modes][(place + number) % len(modes)]
                tree, settings = modes[name]
                run = measure(tree, options.folder, options.files, number, settings)
                runs[name].append(run)
                print(
                    f"round {number + 1}, {name}: {run.rate:,.0f} images/s, {run.cpu_seconds:.3f} s of CPU",
                    flush=True,
                )
    print(f"{options.files:,} files, {options.rounds} rounds, {len(os.sched_getaffinity(0))} cores")
    print(f"{Receiver.requests} requests with traces")
    reference = next(iter(runs))
    for name, found in runs.items():
        print(f"{name}: {compare([*zip(found, runs[reference], strict=True)])}")
    server.shutdown()


def compare(pairs: Sequence[tuple[Run, Run]]) -> str:
    """The medians, and how they compare with the first mode in the same round."""
    cpu = [run.cpu_seconds for run, _ in pairs]
    ratios = [run.cpu_seconds / first.cpu_seconds for run, first in pairs]
    rates = [run.rate / first.rate for run, first in pairs]
    return (
        f"{statistics.median(cpu):.3f} s of CPU for 1,000 images, by the first {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); rate by the first {statistics.median(rates):.3f} "
        f"({min(rates):.3f} to {max(rates):.3f})"
    )


if __name__ == "__main__":
    main()
