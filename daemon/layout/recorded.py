"""GPUs that this machine may not have: their memory, as their makers publish it, and rates that were measured
on them. What was not measured is not in here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from daemon.core.errors import WrongArgument
from daemon.system.gpus import Gpu

GB = 10**9  # cards have a little more than this for each published GB, and keep some for themselves

# By name: compute capability, and the sizes in GB; the first is the usual one.
CARDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "V100": ("7.0", (16, 32)),
    "T4": ("7.5", (16,)),
    "A100": ("8.0", (40, 80)),
    "A30": ("8.0", (24,)),
    "A10": ("8.6", (24,)),
    "A40": ("8.6", (48,)),
    "A6000": ("8.6", (48,)),
    "RTX3090": ("8.6", (24,)),
    "L4": ("8.9", (24,)),
    "L40S": ("8.9", (48,)),
    "RTX4090": ("8.9", (24,)),
    "H100": ("9.0", (80, 94)),
    "H200": ("9.0", (141,)),
}


@dataclass(frozen=True, slots=True)
class RecordedRate:
    """Images per second of the standard job, from files to durable results."""

    card: str
    gpus: int
    workers: int  # on each
    batch: int
    images_per_second: int
    source: str


RATES = (
    RecordedRate("H200", 1, 5, 128, 740, "docs/performance.md, 2026-11-22"),
    RecordedRate("H200", 2, 5, 128, 1338, "docs/performance.md, 2026-11-23, the slower of two runs"),
)


def read_gpus(text: str) -> list[Gpu]:
    """The GPUs that "4xA100-40GB" or "2xH100, L4" describes, with all their memory free. Raises WrongArgument."""
    found: list[tuple[str, int, str]] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:([1-9]\d?)\s*[x×])?\s*([a-z0-9 ]+?)(?:[- ](\d+)\s*GB)?", part.strip(), re.I)
        name = match[2].upper().replace(" ", "").removeprefix("NVIDIA") if match else ""
        if not match or name not in CARDS:
            known = ", ".join(CARDS)
            raise WrongArgument(
                f'--gpus: "{part.strip()}" is not a known GPU. Write for example 4xA100-40GB; known are {known}.'
            )
        capability, sizes = CARDS[name]
        size = int(match[3] or sizes[0])
        if size not in sizes:
            raise WrongArgument(
                f"--gpus: there is no {name} with {size} GB; write {name}-{' or '.join(map(str, sizes))}GB."
            )
        found += [(f"{name}-{size}GB", size * GB, capability)] * int(match[1] or 1)
    return [
        Gpu(index, f"described-{index}", name, size, size, 0, capability, None, ())
        for index, (name, size, capability) in enumerate(found)
    ]


def find_rates(gpus: list[Gpu]) -> list[RecordedRate]:
    """Rates of as many cards of this kind, or else of one of them."""
    cards = {card for gpu in gpus for card in CARDS if re.search(rf"\b{card}\b", gpu.name)}
    for number in (len(gpus), 1):
        if found := [rate for rate in RATES if cards == {rate.card} and rate.gpus == number]:
            return found
    return []
