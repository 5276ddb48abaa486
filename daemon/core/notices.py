"""Notices about weights, for example that they are a demonstration or random. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from daemon.core.hints import command

KINDS = ("demonstration", "random", "other")  # label of the metric, by a word of the notice


def list_notices(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each notice, with its stages and, for a demonstration, the command that replaces it. pairs: of stage and
    notice, "" for none."""
    stages: dict[str, list[str]] = {}
    for stage, notice in dict.fromkeys(pairs):
        if notice:
            stages.setdefault(notice, []).append(stage)
    return [f"{join_words(names)}: {notice}{_fix(notice)}" for notice, names in stages.items()]


def _fix(notice: str) -> str:
    return f"; for real images: `{command('setup')}`" if kind_of(notice) == "demonstration" else ""


def join_words(words: list[str]) -> str:
    """ "yolo, clip and blip"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def kind_of(notice: str) -> str:
    return next((kind for kind in KINDS if kind in notice), "other")
