"""Reads the table of planted bugs: table.txt says how a row is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.mutants.planting import Mutant

PLACE = re.compile(r"(?P<file>[^ :]+)(?: \[(?P<within>[\w.]+)\])?: (?P<texts>.+)")


def read_table(text: str) -> list[Mutant]:
    """Raises ValueError for a row that is not written as table.txt says."""
    rows = []
    for block in re.sub("^#.*\n", "", text, flags=re.MULTILINE).strip().split("\n\n"):
        try:
            named, placed, tests = block.strip().split("\n")
            name, promise = named.split(": ", 1)
            place = PLACE.fullmatch(placed)
            if not place:
                raise ValueError("no place")
            before, after = ast.literal_eval(place["texts"])
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"not a row of the table:\n{block}") from error
        rows.append(
            Mutant(
                name, promise, place["file"], before, after, tuple(tests.split(", ")), place["within"] or ""
            )
        )
    return rows


MUTANTS = read_table(Path(__file__).with_name("table.txt").read_text())
