"""Composes scenes: objects close together or far apart, papers, signs, posters, charts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import cv2
import numpy as np

from stages.contract.binning import measure_dispersion
from stages.scenes import pages
from stages.scenes.drawing import COLORS, Backdrop, Pixels, Points, list_backdrops, vary
from stages.scenes.shapes import LABELS, LEAN, Sprite, choose_finish, draw_object, fixed_point
from stages.scenes.sheets import Sheet, blank_sheet
from stages.scenes.truth import Box, TrueObject

LEGIBLE_PX = 22  # to the em: capitals of 16 px
DRAWABLE_PX = 8  # to the em: below that, fonts' hinting makes lines too long

Member = tuple[str, str]  # label and color of one object


@dataclass
class Draft:
    """A scene while it is made. width, height: its full size; it is drawn at `scale` times that."""

    rng: Random
    width: int
    height: int
    scale: float = 1.0
    pixels: Pixels = field(default_factory=lambda: np.empty((0, 0, 3), np.uint8))
    backdrop: Backdrop | None = None
    objects: list[TrueObject] = field(default_factory=list)
    lines: list[tuple[str, Points]] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as drawn."""
        return round(self.width * self.scale), round(self.height * self.scale)

    def choose_em(self) -> float:
        """The smallest size of text: LEGIBLE_PX or more even when the short side is brought down to PP-OCR's 736."""
        return self._legible_px * self.rng.uniform(1, 1.25) * self.scale

    @property
    def _legible_px(self) -> float:
        return LEGIBLE_PX * max(1.0, min(self.width, self.height) / 736)

    @property
    def drawable_scale(self) -> float:
        """The smallest size at which text can be drawn; smaller text is shrunk afterwards."""
        return DRAWABLE_PX / self._legible_px

    def shrink(self, scale: float) -> None:
        """Shrink the drawn image, and its truth, from its scale to this one."""
        ratio, self.scale = scale / self.scale, scale
        self.pixels = cv2.resize(self.pixels, self.size, interpolation=cv2.INTER_AREA)
        self.lines = [(text, box * ratio) for text, box in self.lines]
        self.objects = [_shrink_object(thing, ratio, self.size) for thing in self.objects]

    def paint_backdrop(self, colors: Iterable[str] = ()) -> None:
        """A backdrop on which all these colors are visible."""
        self.backdrop = self.rng.choice(list_backdrops(colors))
        self.pixels = self.backdrop.draw(*self.size, self.rng)

    def paint_objects(self, sprites: Sequence[Sprite]) -> None:
        """The first is the farthest."""
        finish, owners = choose_finish(self.rng), np.zeros(self.pixels.shape[:2], np.uint8)
        for number, sprite in enumerate(sprites, 1):
            color = vary(COLORS[sprite.color], self.rng)
            draw_object(self.pixels, owners, number, sprite.scaled(self.scale), color, finish)
        for number, sprite in enumerate(sprites, 1):
            x, y, width, height = cv2.boundingRect((owners == number).view(np.uint8))
            self.objects.append(TrueObject(sprite.label, sprite.color, (x, y, x + width, y + height)))

    def blank_sheet(self, width: float = 1.0, height: float = 1.0) -> Sheet:
        """A sheet of these fractions of the image."""
        return blank_sheet(
            round(self.size[0] * width), round(self.size[1] * height), self.choose_em(), self.rng
        )

    def cut_strip(self, start: float, stop: float, edge: float) -> Box:
        """The part of the full-size image from start to stop along its long side, `edge` off the other sides."""
        x, y = (
            ((start, stop), (edge, 1 - edge))
            if self.width >= self.height
            else ((edge, 1 - edge), (start, stop))
        )
        return (
            round(x[0] * self.width),
            round(y[0] * self.height),
            round(x[1] * self.width),
            round(y[1] * self.height),
        )

    def show(self, sheet: Sheet) -> None:
        """The sheet as a scan if it is as large as the image, otherwise photographed on a backdrop."""
        if (sheet.width, sheet.height) != self.size:
            self.paint_backdrop(("white",))
            sheet = sheet.place_tilted(self.pixels, self.size[0] / 2, self.size[1] / 2)
        self.pixels, self.lines = sheet.pixels, sheet.lines


def _shrink_object(thing: TrueObject, ratio: float, size: tuple[int, int]) -> TrueObject:
    x0, y0, x1, y1 = (edge * ratio for edge in thing.box)
    box = (math.floor(x0), math.floor(y0), min(size[0], math.ceil(x1)), min(size[1], math.ceil(y1)))
    return TrueObject(thing.label, thing.color, box)


# Arranging objects.

MOST_HIDDEN = 0.18  # share of an object that others may hide
# Range of radii, by number of objects.
RADII = ((0.13, 0.34), (0.1, 0.2), (0.085, 0.15), (0.085, 0.14), (0.075, 0.12), (0.075, 0.11), (0.068, 0.1))


def choose_members(rng: Random, count: int, groups: int, *, distinct: bool = False) -> list[Member]:
    """`count` objects of this many groups (label and color), whose colors are all visible on some backdrop."""
    while True:
        labels = rng.sample(LABELS, groups) if distinct else rng.choices(LABELS, k=groups)
        chosen = {(label, rng.choice(tuple(COLORS))) for label in labels}
        if len(chosen) == groups and list_backdrops(color for _, color in chosen):
            break
    members = sorted(chosen)
    members += rng.choices(members, k=count - groups)
    rng.shuffle(members)
    return members


@dataclass(frozen=True)
class Arranger:
    """Places objects within `bounds` of an image of width × height, so that none is hidden much."""

    rng: Random
    width: int
    height: int
    bounds: Box

    def arrange(
        self, members: Sequence[Member], areas: tuple[float, float], *, anchored: bool = False
    ) -> list[Sprite]:
        """Centers are in a window of areas[0]..areas[1] of the bounds; objects shrink until they fit.

        anchored: the first two stand at opposite corners of the window, which makes it the dispersion.
        """
        for attempt in itertools.count():
            window = self._choose_window(self.rng.uniform(*areas))
            sprites = self._fill_window(members, window, anchored, 0.96**attempt)
            dispersion = measure_dispersion([sprite.extent() for sprite in sprites], self.width * self.height)
            if sprites and not 0.24 < dispersion < 0.36:
                return sprites
        raise AssertionError("unreachable")

    def _choose_window(self, area: float) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1 in pixels, away from the edges."""
        long = self.rng.uniform(max(area / 0.78, math.sqrt(area) * 0.9), 0.78)
        sides = [long, area / long]
        self.rng.shuffle(sides)
        x, y = (self.rng.uniform(0.11, 0.89 - side) for side in sides)
        x0, y0, x1, y1 = self.bounds
        width, height = x1 - x0, y1 - y0
        return x0 + x * width, y0 + y * height, x0 + (x + sides[0]) * width, y0 + (y + sides[1]) * height

    def _fill_window(
        self,
        members: Sequence[Member],
        window: tuple[float, float, float, float],
        anchored: bool,
        shrink: float,
    ) -> list[Sprite]:
        """All objects, or none if one does not fit."""
        x0, y0, x1, y1 = window
        corners = [(x0, y0), (x1, y1)] if self.rng.random() < 0.5 else [(x0, y1), (x1, y0)]
        base = self._choose_radius(len(members)) * shrink
        crowd = Crowd(self.width, self.height)
        for number, member in enumerate(members):
            for _ in range(20):
                fixed = anchored and number < 2
                x, y = corners[number] if fixed else (self.rng.uniform(x0, x1), self.rng.uniform(y0, y1))
                sprite = self._choose_sprite(member, x, y, base * self.rng.uniform(0.85, 1.15))
                if self._is_inside(sprite) and crowd.admit(sprite):
                    break
            else:
                return []
        return crowd.sprites

    def _choose_radius(self, count: int) -> float:
        short = min(self.bounds[2] - self.bounds[0], self.bounds[3] - self.bounds[1])
        return self.rng.uniform(*RADII[min(count, len(RADII)) - 1]) * short

    def _choose_sprite(self, member: Member, x: float, y: float, radius: float) -> Sprite:
        lean = LEAN.get(member[0], 180.0)
        stretch = self.rng.uniform(0.93, 1.07) * self.rng.choice((-1, 1))
        return Sprite(*member, x, y, radius, self.rng.uniform(-lean, lean), stretch)

    def _is_inside(self, sprite: Sprite) -> bool:
        edge = 0.01 * min(self.width, self.height) + 0.07 * sprite.radius
        x0, y0, x1, y1 = sprite.extent()
        left, top, right, bottom = self.bounds
        return x0 > left + edge and y0 > top + edge and x1 < right - edge and y1 < bottom - edge


class Crowd:
    """The objects placed so far, on a small map of which object covers which pixel."""

    def __init__(self, width: int, height: int) -> None:
        self.scale = 160 / max(width, height)
        self.owners = np.zeros((round(height * self.scale), round(width * self.scale)), np.uint8)
        self.sprites: list[Sprite] = []
        self.sizes: list[int] = []

    def admit(self, sprite: Sprite) -> bool:
        """Add the object unless it hides too much of another or touches one of its own kind."""
        mask = np.zeros_like(self.owners)
        for _, parts in sprite.layers(self.scale):
            cv2.fillPoly(mask, fixed_point(parts), 1, cv2.LINE_8, 4)
        covered = np.bincount(self.owners[mask.view(bool)], minlength=len(self.sprites) + 1)[1:]
        owners = np.where(mask, np.uint8(len(self.sprites) + 1), self.owners)
        visible = np.bincount(owners.ravel(), minlength=len(self.sprites) + 2)[1:-1]
        for other, size, here, left in zip(self.sprites, self.sizes, covered, visible, strict=True):
            if left < (1 - MOST_HIDDEN) * size or (
                here and (other.label, other.color) == (sprite.label, sprite.color)
            ):
                return False
        self.owners = owners
        self.sprites.append(sprite)
        self.sizes.append(int(np.count_nonzero(mask)))
        return True


# Composing.


def compose_photo(
    draft: Draft, members: Sequence[Member], areas: tuple[float, float], *, anchored: bool = False
) -> None:
    arranger = Arranger(draft.rng, draft.width, draft.height, (0, 0, draft.width, draft.height))
    sprites = arranger.arrange(members, areas, anchored=anchored)
    draft.paint_backdrop(color for _, color in members)
    draft.paint_objects(sprites)


def compose_few(draft: Draft) -> None:
    """Bin C: up to four objects close together, in a row or in a corner."""
    count = draft.rng.choice((1, 1, 2, 2, 3, 3, 4))
    groups = draft.rng.randint(1, min(3, count))
    compose_photo(draft, choose_members(draft.rng, count, groups), (0.03, 0.22) if count > 1 else (0.3, 0.58))


def compose_scattered(draft: Draft) -> None:
    """Bin B: a few objects far apart."""
    count = draft.rng.randint(2, 4)
    members = choose_members(draft.rng, count, draft.rng.randint(1, count))
    compose_photo(draft, members, (0.39, 0.56), anchored=True)


def compose_crowded(draft: Draft) -> None:
    """Bin B: many objects, or objects of many classes."""
    if draft.rng.random() < 0.5:
        members = choose_members(draft.rng, draft.rng.randint(7, 9), draft.rng.randint(2, 5))
    else:
        members = choose_members(draft.rng, draft.rng.randint(5, 9), 5, distinct=True)
    compose_photo(draft, members, (0.17, 0.23) if draft.rng.random() < 0.25 else (0.4, 0.6))


def compose_sheet(draft: Draft, draw: Callable[[Sheet], None], share: float, width: float) -> None:
    """A scan or, in this share of scenes, a photograph of a sheet that has this part of the image's width."""
    sheet = draft.blank_sheet(width, 0.84) if draft.rng.random() < share else draft.blank_sheet()
    draw(sheet)
    draft.show(sheet)


def compose_receipt(draft: Draft) -> None:
    em, (width, height) = draft.choose_em(), draft.size
    share = max(min(0.84, 15.5 * em / width), draft.rng.uniform(0.4, 0.7))
    sheet = blank_sheet(round(share * width), round(draft.rng.uniform(0.78, 0.84) * height), em, draft.rng)
    pages.draw_receipt(sheet)
    draft.show(sheet)


def compose_chart(draft: Draft, kind: str) -> None:
    compose_sheet(draft, partial(pages.draw_chart, kind=kind), 0.25, 0.86)


def compose_sign(draft: Draft, rows: Sequence[str], share: float) -> None:
    """A board on a post; the longest row takes `share` of the width, or less."""
    draft.paint_backdrop(("grey",))
    width, height = draft.size
    board = pages.draw_board(rows, draft.choose_em(), draft.rng, (share * width, 0.66 * height))
    middle = (width * draft.rng.uniform(0.48, 0.52), height * draft.rng.uniform(0.42, 0.48))
    pages.draw_post(draft.pixels, *middle, thick=board.em * 0.6)
    sheet = board.place_tilted(draft.pixels, *middle)
    draft.pixels, draft.lines = sheet.pixels, sheet.lines


def compose_notice(draft: Draft) -> None:
    compose_sign(draft, pages.compose_notice(draft.rng), 0.72)


def compose_word(draft: Draft) -> None:
    """Bin C: a sign of one line."""
    compose_sign(draft, [draft.rng.choice(pages.SIGN_WORDS)], 0.45)


def compose_poster(draft: Draft, rows: int | None = None) -> None:
    """Text on a panel in one half of a picture, a few objects in the other."""
    rng, em = draft.rng, draft.choose_em()
    members = choose_members(rng, rng.randint(1, 3), 1)
    share, first = rng.uniform(0.52, 0.6), rng.random() < 0.5
    panel = draft.cut_strip(0.04, share, 0.07) if first else draft.cut_strip(1 - share, 0.96, 0.07)
    free = draft.cut_strip(share + 0.02, 1, 0) if first else draft.cut_strip(0, 0.98 - share, 0)
    sprites = Arranger(rng, draft.width, draft.height, free).arrange(members, (0.2, 0.5))
    draft.paint_backdrop(color for _, color in members)
    draft.paint_objects(sprites)
    x0, y0, x1, y1 = (round(edge * draft.scale) for edge in panel)
    count = rows or rng.randint(5, min(12, int((y1 - y0 - 1.2 * em) / (1.42 * em))))
    draft.lines = pages.write_panel(draft.pixels, em, rng, (x0, y0, x1, y1), count).lines


@dataclass(frozen=True)
class Recipe:
    """A way to compose a scene. weight: about how many of a hundred samples."""

    kind: str
    weight: float
    compose: Callable[[Draft], None]


RECIPES: tuple[Recipe, ...] = (
    Recipe("page of text", 5.5, partial(compose_sheet, draw=pages.draw_page, share=0.5, width=0.84)),
    Recipe("receipt", 5, compose_receipt),
    Recipe("slide", 5.5, partial(compose_sheet, draw=pages.draw_slide, share=0.25, width=0.86)),
    Recipe("sign", 4, compose_notice),
    Recipe("poster", 6, compose_poster),
    Recipe("bar chart", 3.5, partial(compose_chart, kind="bar chart")),
    Recipe("line chart", 3.5, partial(compose_chart, kind="line chart")),
    Recipe("pie chart", 3.5, partial(compose_chart, kind="pie chart")),
    Recipe("photo", 16, compose_crowded),
    Recipe("photo", 15, compose_scattered),
    Recipe("photo", 23.5, compose_few),
    Recipe("empty", 6, Draft.paint_backdrop),
    Recipe("sign", 3, compose_word),
)
