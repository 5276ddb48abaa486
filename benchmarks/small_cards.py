"""The standard job on a GPU of which another process holds a part, as on a card with less memory.

    python -m benchmarks.small_cards --free-mib 24000 16000 --images 1000 --repeat 8
    python -m benchmarks.small_cards --free-mib 16000 --by-hand 3x64x32x64x32 4x32x32x32x32

Runs the standard job of `visiond bench` on the first GPU, first with all of its memory and then with each of the given amounts
free. visiond chooses workers and batches by itself. Prints the rate of the middle half and its ratio to the first run.
--by-hand also tries other settings with each amount: the number of workers, and the batches of OCR, YOLO, CLIP and BLIP.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tuning import write_settings
from daemon.bench.job import Place, run_job
from daemon.bench.rates import measure_rate
from daemon.config.loading import Config, load
from daemon.core.errors import VisiondError
from daemon.placement.profile import Settings
from stages.contract.processes import environment, python
from stages.registry.registry import BUILT_IN

# Takes all but some MiB of the first GPU, says so, and keeps it until its input ends.
HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
held = torch.empty(free - (int(sys.argv[1]) << 20), dtype=torch.uint8, device="cuda:0")
print(torch.cuda.mem_get_info(0)[0] >> 20, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def leave(free_mib: int) -> Iterator[int]:
    """MiB that are free while this lasts."""
    command = python("-c", HOLD, str(free_mib))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        try:
            yield int(holder.stdout.readline())
        finally:
            holder.stdin.close()


def measure(place: Place, inbox: Path) -> float:
    run = run_job(place, inbox, cold=False)
    peak = max(sum(sample.gpu_used_bytes) for sample in run.samples)
    rate = measure_rate(run.published_at)[0]
    print(
        f"  {rate:,.1f} images/s in the middle half, {run.images_per_second:,.1f} as a whole; "
        f"{peak / 2**30:.1f} GiB in use on all GPUs, with the part that is held",
        flush=True,
    )
    return rate


class SetPlace(Place):
    """With settings of one's own."""

    settings: Settings | None = None

    def prepare(self, inbox: Path, *, cold: bool = False) -> Config:
        config = super().prepare(inbox, cold=cold)
        if self.settings:
            write_settings(self, self.settings)
            config = load(self.config_file)
        return config


def read_settings(text: str) -> Settings:
    """text: such as 3x64x32x64x32."""
    workers, *batches = map(int, text.split("x"))
    names = [stage.name for stage in BUILT_IN]
    return Settings("replicated", workers, dict(zip(names, batches, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="as for visiond bench")
    parser.add_argument("--free-mib", type=int, nargs="+", default=[24_000, 16_000])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=8, help="names of each image")
    parser.add_argument(
        "--by-hand", type=read_settings, nargs="*", default=[], metavar="WORKERSxOCRxYOLOxCLIPxBLIP"
    )
    options = parser.parse_args()
    place = SetPlace(options.folder, "", ['devices = ["cuda:0"]'])
    place.make_pack()
    images = place.make_images(options.images)
    inbox = place.make_inbox(images, options.repeat)
    run_job(place, inbox, cold=False)  # compiles the kernels
    print("all of the memory:", flush=True)
    whole = measure(place, inbox)
    for free_mib in options.free_mib:
        with leave(free_mib) as free:
            print(f"{free:,} MiB free:", flush=True)
            for settings in (None, *options.by_hand):
                place.settings = settings
                print(f" {settings or 'chosen by visiond'}:", flush=True)
                try:
                    print(f"  {measure(place, inbox) / whole:.2f} of the whole card's rate", flush=True)
                except VisiondError as error:  # perhaps there is too little memory
                    print(f"  {error}", flush=True)
            place.settings = None


if __name__ == "__main__":
    main()
