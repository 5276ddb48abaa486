"""The progress of a training and its learning rate."""

from __future__ import annotations

import math
from typing import Any

FIRST_PACE = 1e-4  # of a schedule with only a time limit, until it is measured


class LearningRates:
    """A linear warm-up, then half a cosine down to 0, over a progress from 0 to 1.

    Each step is one of `steps` planned steps. With a time limit, steps count for more as soon as the measured pace would
    exceed the limit, so that the cosine always reaches 0; the curve then depends on the machine's speed.
    """

    def __init__(self, steps: int, seconds: float, warmup: float) -> None:
        """steps, seconds: limits; 0 is no limit, but one must be set. warmup: its share of the progress."""
        if not steps and not seconds:
            raise ValueError("a training needs a limit: set epochs, steps or seconds.")
        self.planned = 1 / steps if steps else 0.0
        self.seconds, self.warmup = seconds, warmup
        self.step, self.progress, self.pace = 0, 0.0, self.planned or FIRST_PACE

    @property
    def done(self) -> bool:
        return self.progress >= 1 - 1e-9

    def advance(self) -> None:
        self.step += 1
        self.progress += max(self.planned, self.pace)

    def keep_time(self, elapsed: float) -> None:
        """elapsed: seconds since the training's first step, of all its runs together."""
        if not self.seconds or not self.step:
            return
        left = self.seconds - elapsed
        self.pace = (1 - self.progress) * elapsed / self.step / left if left > 0 else 1.0

    @property
    def factor(self) -> float:
        """The factor of the learning rate, 0..1."""
        if self.progress < self.warmup:
            return (self.progress + self.pace) / (self.warmup + self.pace)
        along = (self.progress - self.warmup) / (1 - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "progress": self.progress, "pace": self.pace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.progress, self.pace = state["step"], state["progress"], state["pace"]
