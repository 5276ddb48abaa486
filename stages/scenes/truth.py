"""The truth about a scene: its objects, its text, its bin, and its true captions.

Captions have a fixed grammar, so that a small model can learn it and a program can check it:

    two red circles, a blue star and a pink cup on a green background
    three red fish, two blue stars, a green tree and more in a night sky      (four groups or more)
    an empty meadow
    a receipt
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stages.contract.binning import (
    ObjectFigures,
    TextFigures,
    Thresholds,
    judge_figures,
    measure_area,
    measure_dispersion,
)
from stages.scenes.drawing import BACKDROPS, COLORS, Backdrop
from stages.scenes.shapes import LABELS

Box = tuple[int, int, int, int]
Group = tuple[int, str, str]  # count, color, label

TEXT_KINDS = ("page of text", "receipt", "slide", "sign", "poster", "bar chart", "line chart", "pie chart")
TAGS: tuple[str, ...] = (*LABELS, *TEXT_KINDS, *(backdrop.noun for backdrop in BACKDROPS))


TRUTH = ".truth.jsonl"  # in the folder of the images, which may be an inbox: inboxes ignore hidden files


class TrueObject(msgspec.Struct, frozen=True):
    """One object. box: x0, y0, x1, y1 in pixels of the upright image, tight around its visible part."""

    label: str
    color: str
    box: Box


class TrueLine(msgspec.Struct, frozen=True):
    """One line of text and the four corners of its ink, clockwise from top left."""

    text: str
    box: tuple[tuple[float, float], ...]


class Truth(msgspec.Struct, frozen=True):
    """One line of .truth.jsonl."""

    file: str
    kind: str  # "photo", "empty" or one of TEXT_KINDS
    width: int  # of the upright image
    height: int
    orientation: int  # EXIF, 1..8
    objects: list[TrueObject]
    lines: list[TrueLine]
    captions: list[str]  # all true captions of the grammar; BLIP learns the first one
    tags: list[str]  # of TAGS, the main one first
    bin: str


def read_truth(file: Path) -> list[Truth]:
    """The lines of a .truth.jsonl. Raises msgspec.ValidationError if one is something else."""
    with file.open("rb") as lines:
        return [msgspec.json.decode(line, type=Truth) for line in lines]


def choose_bin(width: int, height: int, objects: Sequence[TrueObject], lines: Sequence[TrueLine]) -> str:
    """The bin of the truth by the built-in rule with its default thresholds."""
    text = TextFigures(len(lines), sum(measure_area(line.box) for line in lines) / (width * height))
    spread = measure_dispersion([thing.box for thing in objects], width * height)
    things = ObjectFigures(len(objects), len({thing.label for thing in objects}), spread)
    return judge_figures({"ocr": text, "yolo": things}, Thresholds()).name


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLURALS = {label: {"fish": "fish", "cross": "crosses"}.get(label, f"{label}s") for label in LABELS}
MOST_GROUPS = 3  # in a caption; "and more" means the others


def _add_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _name_group(group: Group) -> str:
    count, color, label = group
    return (
        _add_article(f"{color} {label}") if count == 1 else f"{NUMBERS[count - 1]} {color} {PLURALS[label]}"
    )


def _name_place(backdrop: Backdrop) -> str:
    return f" {backdrop.preposition} {_add_article(backdrop.noun)}"


def name_objects(groups: Sequence[Group], *, more: bool, backdrop: Backdrop) -> str:
    *most, last = [_name_group(group) for group in groups] + ["more"] * more
    return (f"{', '.join(most)} and {last}" if most else last) + _name_place(backdrop)


def describe_text(kind: str, objects: Sequence[TrueObject]) -> tuple[list[str], list[str]]:
    """Captions and tags of a text scene."""
    return [_add_article(kind)], [kind, *_rank_by_area((thing.label, thing.box) for thing in objects)]


def describe_photo(objects: Sequence[TrueObject], backdrop: Backdrop) -> tuple[list[str], list[str]]:
    """Captions and tags of objects on a backdrop, or of the backdrop alone.

    The first caption names the largest groups first: by count, then by area. Of four groups or more,
    any three are named. The first tag is the label with the largest area.
    """
    labels = _rank_by_area((thing.label, thing.box) for thing in objects)
    if not objects:
        return [f"an empty {backdrop.noun}"], [backdrop.noun]
    counts = Counter((thing.color, thing.label) for thing in objects)
    by_area = _rank_by_area(((thing.color, thing.label), thing.box) for thing in objects)
    groups = [(counts[group], *group) for group in sorted(by_area, key=lambda group: -counts[group])]
    orders = itertools.permutations(groups, min(len(groups), MOST_GROUPS))
    captions = [name_objects(order, more=len(groups) > MOST_GROUPS, backdrop=backdrop) for order in orders]
    return captions, [*labels, backdrop.noun]


Name = TypeVar("Name", bound=Hashable)


def _rank_by_area(boxes: Iterable[tuple[Name, Box]]) -> list[Name]:
    """The names, sorted by the total area of their boxes, the largest first."""
    areas: Counter[Name] = Counter()
    for name, (x0, y0, x1, y1) in boxes:
        areas[name] += (x1 - x0) * (y1 - y0)
    return [name for name, _ in areas.most_common()]


GROUPS = {_name_group(group): group for group in itertools.product(range(1, 10), COLORS, LABELS)}
PLACES = {_name_place(backdrop): backdrop for backdrop in BACKDROPS}
WITHOUT_OBJECTS = {_add_article(kind) for kind in TEXT_KINDS} | {
    f"an empty {backdrop.noun}" for backdrop in BACKDROPS
}


# Every word of the grammar, for its tokenizer; the only other token is the comma.
VOCABULARY: tuple[str, ...] = tuple(
    sorted(
        {word for sentence in (*GROUPS, *PLACES, *WITHOUT_OBJECTS, "and more") for word in sentence.split()}
    )
)
