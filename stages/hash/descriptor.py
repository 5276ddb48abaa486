"""Describes the stage hash for the rest of the program. Imports no torch."""

from __future__ import annotations

import msgspec

from stages.contract.descriptor import Backend, Descriptor

BITS = 64


class Hash(msgspec.Struct, frozen=True, omit_defaults=True):
    """The perceptual hash of an image."""

    # 16 hexadecimal digits, as the package imagehash writes them; those of similar images differ in few of the 64 bits
    phash: str
    sharpness: float | None = None  # as of Clip


class HashOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: hashes with other settings could not be compared."""


def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Hash:
    # Two variants differ in about half of their bits.
    return Hash(f"{(2 * variant + 1) * 0x9E3779B97F4A7C15 % (1 << BITS):016x}")


HASH = Descriptor(
    name="hash",
    key="hash",
    result=Hash,
    backends={
        "phash": Backend(
            place="stages.hash.stage:HashStage", options=HashOptions, needs_weights=False, dtype="float64"
        )
    },
    cost=0.1,
    fake=fake,
)
