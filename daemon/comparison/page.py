"""A page with both answers to the images that change most, side by side: one file, which refers to nothing outside it."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from daemon.comparison.comparing import Comparison, Pair
from daemon.config.loading import Config
from daemon.config.state import closed_to_others
from daemon.ledger.files import written_whole
from daemon.server.page.pictures import NoPicture, Pictures, draw_reason
from daemon.server.page.views import draw, summarize, visible

MOST_IMAGES = 50
SIDE = 480  # pixels of a picture
BEGINS = (b'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport"',)


def write_page(
    file: Path, config: Config, ledger: Path, found: Comparison, lines: Sequence[str], *, force: bool
) -> int:
    """Returns how many images it shows. lines: what was found, in sentences. ledger: its file. force: replace such a page.
    Raises NotWritable."""
    templates = Environment(
        loader=PackageLoader("daemon.server.page"), autoescape=True, undefined=StrictUndefined
    )
    shown = found.pairs[:MOST_IMAGES]
    with closed_to_others(), contextlib.closing(Pictures.of(config)) as pictures:
        text = templates.get_template("comparison.html").render(
            title=f"{found.stage}: the stored answers and {visible(found.model.provenance.title)}",
            lines=[visible(line) for line in lines],
            images=_describe(shown, pictures),
        )
        with written_whole(file, ledger, force=force, begins=BEGINS) as partial:
            partial.write_text(text, "utf-8", errors="replace")
    return len(shown)


def _describe(pairs: Sequence[Pair], pictures: Pictures) -> Iterator[dict[str, Any]]:
    for pair in pairs:
        record = pair.record
        yield {
            "id": record.id,
            "location": visible(os.fsdecode(record.location)),
            "width": record.width,
            "height": record.height,
            "change": pair.change.amount,
            "bins": pair.bins,
            "picture": _find_picture(pair, pictures),
            "answers": [("stored", _read(pair.before)), ("new", _read(pair.after))],
        }


def _read(payload: bytes) -> dict[str, Any]:
    result = msgspec.json.decode(payload)
    return {"text": summarize(result), "shapes": [*draw(result)]}


def _find_picture(pair: Pair, pictures: Pictures) -> str:
    """As an address that has the picture in it."""
    try:
        kind, content = "image/webp", pictures.get(pair.record, SIDE)
    except NoPicture as error:
        kind, content = "image/svg+xml", draw_reason(str(error))
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
