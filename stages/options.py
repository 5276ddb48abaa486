"""[stages.*.options], checked against what a backend takes. Imports no torch."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from stages.base import StageSpec

Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(spec: StageSpec, kind: type[Options]) -> Options:
    """A stage's options as a struct that forbids unknown fields. Raises ValueError, naming the one that is wrong."""
    try:
        return msgspec.convert(spec.options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ValueError(f"[stages.{spec.name}.options] {error}; {spec.backend} takes {known}.") from error
