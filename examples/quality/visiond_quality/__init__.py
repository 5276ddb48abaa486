"""How good an image is, without weights. This file describes the stage; stage.py does the work, and only workers import it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stages.descriptor import Backend, Descriptor


class Quality(msgspec.Struct, frozen=True):
    """Figures of an image's brightness. Those of noise and sharpness are in its 256 levels."""

    sharpness: float  # variance of the Laplacian; the higher, the sharper. Blurred photographs have less than some 100
    brightness: float  # mean, 0..1
    dark: float  # share of the pixels that are black, 0..1
    bright: float  # share of the pixels that are white, 0..1
    noise: float  # standard deviation of the noise, as Immerkær estimates it
    hash: str  # 16 hexadecimal digits; those of two similar images differ in few of their 64 bits


class QualityOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pixels count as black and white."""

    clipped: Annotated[
        int, Meta(ge=0, le=127, description="A pixel counts as black up to this level, and as white from 255 less this.")
    ] = 2


QUALITY = Descriptor(
    name="quality",
    key="quality",
    result=Quality,
    backends={"torch": Backend(place="visiond_quality.stage:QualityStage", options=QualityOptions, needs_weights=False)},
    cost=0.01,
)
