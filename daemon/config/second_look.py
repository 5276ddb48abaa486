"""The tables [[second_look]]: another model for images that fit a rule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from daemon.config.sections import StageSection
from daemon.config.values import Device, Ratio
from stages.binning import BIN_NAME
from stages.registry import UnknownName, find_backend, find_stage

if TYPE_CHECKING:
    from daemon.config.loading import Config


def _check_look_name(name: str) -> str:
    """Names become keys of the sidecar and values of labels."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
        raise ValueError(f'"{name}" is not a name; use up to 32 of a-z, 0-9, - and _')
    return name


class SecondLook(StageSection):
    name: Annotated[str, AfterValidator(_check_look_name)] = Field(
        description="Its name in sidecars, status and metrics."
    )
    when: str = Field(
        min_length=1,
        description='Which images get it: those of a bin, for example "A"; or a function, "module:function", which gets the '
        "record as a custom binning rule does and returns true or false.",
    )
    stage: str = Field(description="The stage that another model does again.")
    share: Ratio = Field(
        1.0,
        description="Share of these images that get it. The digest of an image decides, so the same bytes are always chosen or "
        "never.",
    )
    images_per_second: float = Field(0.0, ge=0, description="At most this many images/s. 0: no limit.")
    devices: list[Device] = Field(
        [], description="Devices for its workers. Empty: the devices of the pipeline."
    )
    workers_per_device: int = Field(1, ge=1, le=256, description="Worker processes on each of these devices.")

    @property
    def function(self) -> str:
        """ "module:function", or "" if `when` is a bin."""
        return self.when if ":" in self.when else ""


def misused_looks(config: Config) -> Iterator[str]:
    """What contradicts the rest of the configuration."""
    for name, count in Counter(look.name for look in config.second_look).items():
        if count > 1:
            yield f'second_look.name: {count} tables are called "{name}"; give each its own name.'
    for look in config.second_look:
        where = f"second_look {look.name}"
        if look.stage not in config.stage_names:
            yield (
                f'{where}: there is no stage "{look.stage}" in the pipeline; choose one of {", ".join(config.stage_names)}.'
            )
            continue
        try:
            if look.backend:
                find_backend(find_stage(look.stage).name, look.backend)
        except UnknownName as error:
            yield f"{where}: {error}"
        if not look.model and not look.backend:
            yield f"{where}: name the model that looks again: model = …"
        if not look.function and not BIN_NAME.fullmatch(look.when):
            yield f'{where}: when = "{look.when}" is neither a bin nor "module:function".'
        if not look.function and not config.binning.rules and look.when not in "ABC":
            yield f'{where}: there is no bin "{look.when}"; choose A, B or C, or set [binning] rules.'
    if config.second_look and any(inbox.on_success == "delete" for inbox in config.inbox):
        yield (
            'second_look: an inbox has on_success = "delete", so its images are gone before a second look; '
            'use "keep" or "move".'
        )
