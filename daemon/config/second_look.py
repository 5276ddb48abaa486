"""The tables [[second_look]]: another model for images that fit a rule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from daemon.config.sections import Section
from daemon.config.values import Dtype, Place, Ratio
from stages.contract.binning import BIN_NAME, BINS
from stages.registry.registry import UnknownName, find_backend


def _check_look_name(name: str) -> str:
    """Names become keys of the sidecar and values of labels."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
        raise ValueError(f'"{name}" is not a name; use up to 32 of a-z, 0-9, - and _')
    return name


class SecondLook(Section):
    name: Annotated[str, AfterValidator(_check_look_name)]
    """Its name in sidecars, status and metrics."""
    when: str = Field(min_length=1)
    """Which images get it: those of a bin, for example "A"; or a function, "module:function", which gets the record as a custom
    binning rule does and returns true or false."""
    stage: str
    """The stage to run again with another model."""
    model: str = ""
    """The model to use, as in [stages.ocr]."""
    backend: str = ""
    """As in [stages.ocr]. "fake" needs no model."""
    dtype: Dtype = "auto"
    """As in [stages.ocr]."""
    batch_size: int = Field(0, ge=0, le=65_536)
    """Largest number of images in a forward pass. 0: 8 on a CPU, 32 on a GPU."""
    options: dict[str, Any] = {}
    """Options of the backend, as in [stages.ocr.options]."""
    share: Ratio = 1.0
    """Share of these images that get it. The digest of an image decides, so identical files are always treated alike. Less than
    1 to check a sample."""
    images_per_second: float = Field(0.0, ge=0)
    """At most this many images/s, so that second looks leave the GPU to other work. 0: no limit."""
    devices: list[Place] = []
    """Devices for its workers, as in [[pipeline.segment]]. Empty: the devices of the pipeline."""
    workers_per_device: int = Field(1, ge=1, le=256)
    """Worker processes on each of these devices."""

    @property
    def function(self) -> str:
        """ "module:function", or "" if `when` is a bin."""
        return self.when if ":" in self.when else ""


def misused_looks(looks: Sequence[SecondLook], stages: Sequence[str], *, has_rules: bool) -> Iterator[str]:
    """What contradicts the rest of the configuration. stages: of the pipeline. has_rules: whether a custom rule
    chooses the bins."""
    for name, count in Counter(look.name for look in looks).items():
        if count > 1:
            yield f'second_look.name: {count} tables are called "{name}"; give each its own name.'
    for look in looks:
        for problem in _misuses(look, stages, has_rules=has_rules):
            yield f"second_look {look.name}: {problem}"


def _misuses(look: SecondLook, stages: Sequence[str], *, has_rules: bool) -> Iterator[str]:
    if look.stage not in stages:
        yield f'there is no stage "{look.stage}" in the pipeline; choose one of {", ".join(stages)}.'
        return
    try:
        if look.backend:
            find_backend(look.stage, look.backend)
    except UnknownName as error:
        yield str(error)
    if not look.model and not look.backend:
        yield 'set its model, for example model = "/srv/models/my-model".'
    if look.function:
        return
    if not BIN_NAME.fullmatch(look.when):
        yield f'when = "{look.when}" is neither a bin nor "module:function".'
    elif not has_rules and look.when not in BINS:
        yield f'there is no bin "{look.when}"; choose {", ".join(BINS)}, or set binning.rules.'
