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

from daemon.config.loading import Config
from daemon.config.state import LEDGER, closed_to_others
from daemon.core.errors import NotWritable
from daemon.core.files import check_free, written_whole
from daemon.models.changes import MEASURES
from daemon.models.comparing import ModelComparison, Pair
from daemon.server.page.pictures import NoPicture, Pictures, draw_reason
from daemon.server.page.views import draw, summarize, visible
from stages.registry.registry import kind_of

MOST_IMAGES = 50
SIDE = 480  # pixels of a picture
BEGINS = (b'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport"',)


def check_page(file: Path, config: Config, *, force: bool) -> None:
    """Before all that computing. Raises NotWritable, WrongArgument if the page could not be written."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise NotWritable(f"cannot create {file}: the folder of this file does not exist.")
    if not os.access(folder, os.W_OK):
        raise NotWritable(f"cannot create {file}: you may not write into the folder of this file.")
    check_free(file, config.state.path / LEDGER, force=force, begins=BEGINS)


def write_page(
    file: Path, config: Config, found: ModelComparison, lines: Sequence[str], *, force: bool
) -> None:
    """lines: what was found, in sentences. force: replace such a page. Raises NotWritable."""
    templates = Environment(
        loader=PackageLoader("daemon.server.page"), autoescape=True, undefined=StrictUndefined
    )
    shown = [pair for pair in found.pairs if pair.change.amount][:MOST_IMAGES]
    with closed_to_others(), contextlib.closing(Pictures.of(config)) as pictures:
        text = templates.get_template("comparison.html").render(
            title=f"{found.stage}: the stored answers and {visible(found.model.provenance.title)}",
            lines=[visible(line) for line in lines],
            images=_describe(found.stage, shown, pictures),
        )
        with written_whole(file, config.state.path / LEDGER, force=force, begins=BEGINS) as partial:
            partial.write_text(text, "utf-8", errors="replace")


def _describe(stage: str, pairs: Sequence[Pair], pictures: Pictures) -> Iterator[dict[str, Any]]:
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
            "answers": [
                ("stored", describe_answer(stage, pair.before)),
                ("new", describe_answer(stage, pair.after)),
            ],
        }


def describe_answer(stage: str, payload: bytes) -> dict[str, Any]:
    """In words, and what is drawn over the picture. Of a plug-in, whose keys may mean anything, the JSON."""
    if kind_of(stage) not in MEASURES:
        return {"text": payload.decode(errors="replace"), "shapes": []}
    result = msgspec.json.decode(payload)
    return {"text": summarize(result), "shapes": [*draw(result)]}


def _find_picture(pair: Pair, pictures: Pictures) -> str:
    """As an address that has the picture in it."""
    try:
        kind, content = "image/webp", pictures.get(pair.record, SIDE)
    except NoPicture as error:
        kind, content = "image/svg+xml", draw_reason(str(error))
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
