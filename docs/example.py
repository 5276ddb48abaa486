"""Draws docs/example.png from the folder of `visiond demo`: two images with what was found in them,
and their sidecars.

make picture
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont, ImageOps

IMAGES = ("7-000003-poster.jpg", "7-000000-photo.jpg")
WIDTH, MARGIN, GAP = 1540, 16, 20
IMAGE_WIDTH = 640
LINE, INDENT = 25, 14  # height of a line of JSON, and its margin in the card; pixels
SHOWN = 3  # entries of a list
PAPER, CARD, INK, GRAY = "#ffffff", "#f6f8fa", "#1f2328", "#656d76"
KEY, TEXT, NUMBER = "#0550ae", "#0a6640", "#953800"
TEXT_BOX, OBJECT_BOX = "#00b4d8", "#ffb703"

Run = tuple[str, str]  # a piece of text and its color


def font(size: int, family: str = "DejaVu Sans", weight: str = "normal") -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont(f"{family}:{weight}"), size)


def draw_example(folder: Path) -> Image.Image:
    rows = [draw_row(folder, name) for name in IMAGES]
    height = 2 * MARGIN + sum(row.height for row in rows) + GAP * (len(rows) - 1)
    page, y = Image.new("RGB", (WIDTH, height), PAPER), MARGIN
    for row in rows:
        page.paste(row, (MARGIN, y))
        y += row.height + GAP
    return page


def draw_row(folder: Path, name: str) -> Image.Image:
    """An image with what was found in it, and beside it its sidecar."""
    sidecar = json.loads((folder / "results" / f"{name}.json").read_bytes())
    picture = annotate(ImageOps.exif_transpose(Image.open(folder / "inbox" / name)).convert("RGB"), sidecar)
    lines = list(excerpt(sidecar))
    card_height = 58 + LINE * len(lines)
    row = Image.new("RGB", (WIDTH - 2 * MARGIN, max(picture.height + 46, card_height + 2)), PAPER)
    draw = ImageDraw.Draw(row)
    row.paste(picture, (0, 0))
    draw.text((2, picture.height + 10), f"inbox/{name}", GRAY, font(19))
    bin_name = f"bin {sidecar['bin']['name']}"
    draw.text((IMAGE_WIDTH, picture.height + 10), bin_name, INK, font(19, weight="bold"), anchor="ra")
    left = IMAGE_WIDTH + GAP
    draw.rounded_rectangle((left, 0, row.width - 1, card_height), 10, CARD, "#d0d7de")
    draw.text((left + INDENT, 11), f"results/{name}.json", INK, font(18, weight="bold"))
    draw.text((row.width - INDENT, 13), "excerpt", GRAY, font(16), anchor="ra")
    mono = font(15, "DejaVu Sans Mono")
    for number, line in enumerate(lines):
        x = left + INDENT
        for text, color in line:
            draw.text((x, 46 + LINE * number), text, color, mono)
            x += int(draw.textlength(text, mono))
    return row


def annotate(picture: Image.Image, sidecar: dict[str, Any]) -> Image.Image:
    """The image with the boxes of lines and objects, and its caption below them."""
    scale = IMAGE_WIDTH / picture.width
    picture = picture.resize((IMAGE_WIDTH, round(scale * picture.height)), Image.Resampling.LANCZOS)
    draw, small = ImageDraw.Draw(picture), font(16, weight="bold")
    for line in sidecar["ocr"]["lines"]:
        corners = [(scale * x, scale * y) for x, y in line["box"]]
        draw.polygon(corners, outline=TEXT_BOX, width=2)
    taken: list[tuple[float, float, float, float]] = []
    for found in sorted(sidecar["objects"]["detections"], key=lambda found: found["box"][1]):
        x0, y0, x1, y1 = (scale * edge for edge in found["box"])
        draw.rectangle((x0, y0, x1, y1), outline=OBJECT_BOX, width=3)
        label = f"{found['label']} {found['score']:.2f}"
        width = draw.textlength(label, small) + 10
        places = [(x0, y0 - 22), (x1 + 3, y0), (x0, y1), (x1 - width, y0 - 22)]
        x, y = next(place for place in places if is_free(*place, width, taken))
        taken.append((x, y, x + width, y + 22))
        draw.rectangle(taken[-1], OBJECT_BOX)
        draw.text((x + 5, y + 1), label, "black", small)
    caption = font(16)
    framed = Image.new("RGB", (IMAGE_WIDTH, picture.height + 44), INK)
    framed.paste(picture)
    ImageDraw.Draw(framed).text((12, picture.height + 9), f"“{sidecar['caption']['text']}”", "white", caption)
    return framed


def is_free(x: float, y: float, width: float, taken: list[tuple[float, float, float, float]]) -> bool:
    """Whether a label fits there without covering another one."""
    return y >= 0 and not any(
        x < right and x + width > left and y < low and y + 22 > top for left, top, right, low in taken
    )


def excerpt(sidecar: dict[str, Any]) -> Iterator[list[Run]]:
    """Lines of JSON: the fields that a reader looks for first, with a … for what is left out."""
    source, ocr, objects, clip = sidecar["source"], sidecar["ocr"], sidecar["objects"], sidecar["clip"]
    yield [("{", INK)]
    yield field(
        2, "source", {"path": source["path"], "width": source["width"], "height": source["height"]}, more=True
    )
    if ocr["lines"]:
        yield [("  ", INK), ('"ocr"', KEY), (': {"lines": [', INK)]
        yield from entries([{key: line[key] for key in ("text", "score", "box")} for line in ocr["lines"]])
        yield [(f'  ], "count": {ocr["count"]}, "area_ratio": {ocr["area_ratio"]:.3f}', INK), ("},", INK)]
    yield [("  ", INK), ('"objects"', KEY), (': {"detections": [', INK)]
    yield from entries(objects["detections"])
    yield [(f'  ], "count": {objects["count"]}, "unique": {objects["unique"]}, …', INK), ("},", INK)]
    yield field(2, "clip", {"tags": clip["tags"][:1]})
    yield field(2, "caption", {"text": sidecar["caption"]["text"]})
    bin_name = sidecar["bin"]["name"]
    yield [("  ", INK), ('"bin"', KEY), (f': {{"name": "{bin_name}", "criteria": {{…', INK)]
    passed = [
        (name, figures) for name, figures in sidecar["bin"]["criteria"][bin_name].items() if figures["passed"]
    ]
    for name, figures in passed:
        yield [("    ", INK), (f'"{name}"', KEY), (": ", INK), *value(figures), (",", INK)]
    yield [("    …", GRAY)]
    yield [("  }},", INK)]
    yield [
        ("  ", INK),
        ('"timings"', KEY),
        (": {…}, ", INK),
        ('"models"', KEY),
        (": {…}, ", INK),
        ("…", GRAY),
    ]
    yield [("}", INK)]


def entries(rows: list[dict[str, Any]]) -> Iterator[list[Run]]:
    for row in rows[:SHOWN]:
        yield [("    ", INK), *value(row), (",", INK)]
    if len(rows) > SHOWN:
        yield [(f"    … {len(rows) - SHOWN} more", GRAY)]


def field(indent: int, key: str, content: dict[str, Any], *, more: bool = False) -> list[Run]:
    runs = value(content)
    return [(" " * indent, INK), (f'"{key}"', KEY), (": ", INK), *runs[:-1], (", …" * more + "},", INK)]


def value(content: Any) -> list[Run]:
    """JSON on one line; long texts and lists of corners are cut."""
    if isinstance(content, dict):
        inner = [[(f'"{key}": ', INK), *value(part)] for key, part in content.items()]
        return [("{", INK), *join(inner), ("}", INK)]
    if isinstance(content, list):
        if content and isinstance(content[0], list):
            return [("[", INK), *value(content[0]), (", …]", INK)]
        if len(content) == 4 and isinstance(content[0], float):
            return [("[", INK), *join([value(part) for part in content[:2]]), (", …]", INK)]
        return [("[", INK), *join([value(part) for part in content]), ("]", INK)]
    if isinstance(content, str):
        text = content if len(content) <= 52 else f"{content[:51]}…"
        return [(json.dumps(text, ensure_ascii=False), TEXT)]
    number = f"{content:.{3 if content < 1 else 6}g}" if isinstance(content, float) else json.dumps(content)
    return [(number, NUMBER)]


def join(parts: list[list[Run]]) -> list[Run]:
    return [run for number, part in enumerate(parts) for run in ([(", ", INK)] if number else []) + part]


if __name__ == "__main__":
    draw_example(Path(sys.argv[1])).save(sys.argv[2], optimize=True)
