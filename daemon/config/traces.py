"""The table [traces] of daemon.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from daemon.config.sections import Section
from daemon.config.values import Ratio, check_url


class TracesSection(Section):
    sample: Ratio = Field(
        0.0,
        description="Share of the images of which a trace is sent, for example 0.01. 0: none. Needs "
        "`pip install 'visiond[traces]'`.",
    )
    endpoint: Annotated[str, AfterValidator(check_url)] = Field(
        "",
        description='Address of the receiver of OTLP over HTTP, for example "http://127.0.0.1:4318". Empty: as the environment '
        "variables OTEL_EXPORTER_OTLP_… say, or that address.",
    )
