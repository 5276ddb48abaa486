"""Measures the quality of an image, without weights. This file describes the stage.
Only workers import stage.py."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stages.contract.descriptor import Backend, Descriptor


class Quality(msgspec.Struct, frozen=True):
    """Measured on an image's brightness. Noise and sharpness are in units of its 256 levels."""

    # Variance of the Laplacian; higher is sharper. Blurred photographs have less than about 100.
    sharpness: float
    brightness: float  # mean, 0..1
    dark: float  # share of the pixels that are black, 0..1
    bright: float  # share of the pixels that are white, 0..1
    noise: float  # standard deviation of the noise, by Immerkær's estimate
    hash: str  # 16 hexadecimal digits; the hashes of similar images differ in few of the 64 bits


class QualityOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pixels count as black and white."""

    clipped: Annotated[
        int,
        Meta(
            ge=0,
            le=127,
            description="A pixel counts as black up to this level, and as white from 255 minus this level.",
        ),
    ] = 2


QUALITY = Descriptor(
    name="quality",
    key="quality",
    result=Quality,
    backends={
        "torch": Backend(
            place="visiond_quality.stage:QualityStage", options=QualityOptions, needs_weights=False
        )
    },
    cost=0.01,
)
