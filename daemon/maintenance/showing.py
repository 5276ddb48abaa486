"""How verify and repair show that they go on."""

from __future__ import annotations

from typing import Protocol


class Showing(Protocol):
    """`daemon.terminal.progress.Progress`, for example."""

    def begin(self, unit: str, total: int | None = None) -> None:
        """From now on, each finding is one of `total` things; None: their number is not known."""

    def wait(self, sentence: str) -> bool:
        """Something goes on whose end cannot be foreseen; called often. Returns true."""


class Nobody:
    """Nothing is shown."""

    def begin(self, unit: str, total: int | None = None) -> None:
        """Nothing to do."""

    def wait(self, sentence: str) -> bool:
        return True
