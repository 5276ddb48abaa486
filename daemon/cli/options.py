"""What several commands take, and how they read the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.hints import DEFAULT_CONFIG, VARIABLE, keep_config

if TYPE_CHECKING:
    from daemon.config.loading import Config

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The configuration; by default ./daemon.toml if there is one.", envvar=VARIABLE),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file, if it is there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_config(path: Path | None) -> Path | None:
    """The file that is read; None when the defaults are all there is."""
    return path or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)


def read_config(path: Path | None) -> Config:
    from daemon.config.loading import load

    keep_config(path)
    return load(find_config(path))
