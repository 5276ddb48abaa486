"""The commands that look for images: `visiond search`, `duplicates`, `page` and `follow`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.core.errors import ConfigError, VisiondError
from daemon.core.hints import command, quantity
from daemon.ledger import publications
from daemon.ledger.record import notices_of
from daemon.ledger.soundness import MOST
from daemon.monitoring.overview import say_bytes
from daemon.terminal.display import (
    console,
    errors,
    print_cut,
    print_json,
    print_listing,
    print_notices,
    print_warning,
    printable,
)
from daemon.terminal.options import (
    NEAR,
    BinOption,
    ConfigOption,
    JsonOption,
    flag,
    option,
    parse_near,
    read_config,
)

if TYPE_CHECKING:
    import sqlite3

    from daemon.config.loading import Config
    from daemon.ledger.record import Record
    from daemon.search.covering import Places
    from daemon.search.duplicates import Duplicates
    from daemon.search.query import Query
    from daemon.search.searcher import Found, Hit, Searcher

ANY_PORT = "127.0.0.1:0"
FOLLOW_SECONDS = 0.5


def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="What to look for; see below.", show_default=False),
    ] = None,
    by: Annotated[str, option("--by WAY", "words, meaning, both, or disagreement; see below.")] = "both",
    bin: Annotated[str, option("--bin BIN", "Only images of this bin.")] = "",
    newest: Annotated[bool, flag("--newest", "The newest first, not the best. Only by words.")] = False,
    limit: Annotated[int, option("--limit -n N", "Show at most N images.", min=1, max=MOST)] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find images by the words on them, and by what they show.

    Words are looked for in text, captions, tags, objects and names. By
    meaning, all of the words are one sentence, which is compared with the
    images themselves; nearness is the cosine of the two. Models of SigLIP
    also give a probability that they match, and images below [search]
    probability_threshold are left out; with others all images are ranked.
    What both ways have found comes first, then what is high in one. The first
    search makes an index, which takes some minutes for a million images;
    later ones only add what is new.

    "red car" in quotes are words one after another, invo* a beginning,
    -draft excludes a word. text:, caption:, tags:, objects: and name: look
    in one place. Filters: bin:A, tag:dog, object:car, state:failed,
    inbox:/srv/in, after:2026-11-01, before:2026-12-01, group:best.

    --by disagreement lists what a person should look at first. Signals:
    labels (people differ from the answers), looks (second looks do), models
    (former or tried models do), scores (a score is low). disagreement:labels
    looks at one signal, :yolo at one stage, disagreement:labels:yolo at both.

    Examples:
      visiond search two red cars
      visiond search "two red cars" --bin B --json
      visiond search 'invoice -draft after:2026-11-01' --by words
      visiond search bin:C --by disagreement:looks
    """
    from daemon.exports.choice import refuse_unknown_bins
    from daemon.ledger.records import open_reader
    from daemon.search.evidence import list_orders, parse_order
    from daemon.search.opening import open_searcher
    from daemon.search.query import parse
    from daemon.search.searcher import UNCUT, By
    from daemon.terminal.progress import Progress

    if by not in (By.words, By.meaning, By.both) and not parse_order(by):
        orders = ", ".join(list_orders())
        raise typer.BadParameter(f"it is words, meaning, both, or one of {orders}.", param_hint="--by")
    query = parse(" ".join(words or [])).narrowed(bin=[bin] * bool(bin))
    settings = read_config(config, needs_stages=False)
    with open_reader(settings) as reader:
        if bin:
            refuse_unknown_bins([bin], reader.bin_counts())
        with Progress("images") as progress, open_searcher(settings, reader, progress.step) as searcher:
            # One more, to know whether there are more.
            found = _find(searcher, query, by, limit + 1, newest=newest)
        hits = {hit.image: hit for hit in found.hits[:limit]}
        records = reader.find_numbers(list(hits))
    print_warning(found.problem)
    if found.is_uncut and not as_json:
        errors.print(UNCUT)
    _print([(record, hits[record.id]) for record in records], as_json=as_json)
    if len(found.hits) > limit:
        print_cut("image", limit)


def _find(searcher: Searcher, query: Query, by: str, limit: int, *, newest: bool) -> Found:
    from daemon.search.evidence import parse_order
    from daemon.search.searcher import NEWEST, By

    if parse_order(by):
        return searcher.disagreeing(query, by, 0, limit)
    if newest or not query.sentence:
        return searcher.newest(query, NEWEST, limit)
    found = searcher.best(query, By(by), limit=limit)
    return replace(found, problem=f"By words only: {found.problem}" if found.problem else "")


def _print(found: list[tuple[Record, Hit]], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                hit.document() | record.document() | {"location": record.location.decode(errors="replace")}
                for record, hit in found
            ]
        )
        return
    print_listing(
        ("id", "nearness", "file", "bin or reason", "found by"),
        (
            (
                r.id,
                "-" if hit.score is None else f"{hit.score:.3f}",
                os.fsdecode(r.location),
                r.summary,
                (hit.evidence and hit.evidence.sentence) or hit.by or "-",
            )
            for r, hit in found
        ),
    )
    print_notices(notices_of(record for record, _ in found))
    if not found:
        errors.print("No image fits.")


def duplicates(
    near: Annotated[
        str,
        option(
            "--near NEARNESS",
            "Least nearness of an image to the best one of its group; hash or hash:0.9 compares hashes.",
        ),
    ] = str(NEAR["clip"]),
    bin: BinOption = None,
    limit: Annotated[int, option("--limit -n N", "Show at most N groups.", min=1, max=MOST)] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find images that are nearly the same, and the best of each group.

    Images are compared by the embeddings that CLIP gave them; nearness is the
    cosine of two. With --near hash they are compared by the perceptual hashes
    of the stage hash; nearness is 1 - d/32 if d of the 64 bits differ, and hash
    alone means hash:0.8. The best image has most pixels; of equally large ones
    the sharpest; then the largest file; then the oldest. Every image of a group
    is near its best one, and no two best ones are near each other. Nothing is
    deleted. A million images take about ten minutes on two cores, a hundred
    thousand some seconds; from 200,000 on a GPU is used if it has enough free
    memory.

    Groups whose other files have most bytes come first. Without --bin they are
    kept for the page, and for `visiond search group:best`. When piped: one line
    per image with group, nearness, number, width, height, bytes and file,
    separated by tabs; the best image of a group first.

    Examples:
      visiond duplicates
      visiond duplicates --near 0.98 --bin C --limit 1000 --json
      visiond duplicates --near hash:0.9
    """
    from daemon.exports.choice import refuse_unknown_bins
    from daemon.ledger.records import open_reader
    from daemon.search.duplicates import find_duplicates, keep_groups
    from daemon.search.opening import open_index
    from daemon.terminal.progress import Progress

    stage, least = parse_near(near)
    settings = read_config(config, needs_stages=False)
    with open_reader(settings) as reader:
        refuse_unknown_bins(bin or [], reader.bin_counts())
        with Progress("images") as progress, open_index(settings, reader, progress.step) as index:
            progress.begin("images")
            found = find_duplicates(reader, index, least, by=stage, bins=bin or (), note=progress.step)
            if not bin:
                keep_groups(index, found)
        groups = found.groups()
        with reader.lend() as ledger:
            shown = [list(_describe(found, group, ledger)) for group in groups[:limit]]
        models = list(reader.models.values())
    if as_json:
        print_json(
            {
                "near": least,
                "by": stage,
                "model": found.model,
                "images": len(found.images),
                "near_duplicates": len(found.others),
            }
            | {"bytes": found.freed_bytes, "groups": shown, "without_embedding": found.without}
        )
        return
    print_listing(
        ("group", "nearness", "id", "width", "height", "bytes", "file"),
        (
            (number, f"{i['nearness']:.3f}", i["id"], i["width"], i["height"], i["bytes"], i["location"])
            for number, group in enumerate(shown, 1)
            for i in group
        ),
    )
    _print_summary(found, stage, len(groups), limit)
    print_notices((model.stage, model.notice * (model.fingerprint == found.model)) for model in models)


def _describe(found: Duplicates, group: Places, ledger: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """The images of a group as in JSON, the best first."""
    images = found.images[group].tolist()
    files = publications.find_places(ledger, images)
    for image, cosine in zip(images, found.cosines[group].tolist(), strict=True):
        if file := files.get(image):
            yield {
                "id": image,
                "nearness": round(cosine, 6),
                "location": file.location.decode(errors="replace"),
                "width": file.width,
                "height": file.height,
                "bytes": file.bytes,
            }


def _print_summary(found: Duplicates, stage: str, groups: int, limit: int) -> None:
    others, images = len(found.others), quantity(len(found.images), "image")
    near = "is near a better one; its file has" if others == 1 else "are near better ones; their files have"
    if others:
        errors.print(
            f"{quantity(groups, 'group')}: of {images} {others:,} {near} {say_bytes(found.freed_bytes)}."
        )
    else:
        errors.print(f"No image is near a better one; {images} compared. A lower --near finds more.")
    if groups > limit:
        print_cut("group", limit)
    if found.without:
        first = ", ".join(map(str, found.without[:3]))
        print_warning(
            f"{quantity(len(found.without), 'image')} could not be compared: no result of the same model of stage "
            f"{stage}: {first}{', …' if len(found.without) > 3 else ''}. "
            f"`{command('redo', '--stale')}` computes those of the present model; --json lists all."
        )


def page(
    listen: Annotated[str, option("--listen HOST:PORT", "Another address than [page] listen.")] = "",
    config: ConfigOption = None,
) -> None:
    """Serve the page with images, search and results, until Ctrl-C.

    A running daemon serves it already: then this prints the address. It is
    for a ledger whose daemon is not running.

    Examples:
      visiond page
      visiond page --listen 127.0.0.1:8000
    """
    from daemon.config.values import check_address

    settings = read_config(config, needs_stages=False)
    try:
        check_address(listen)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--listen") from None
    chosen = settings.page.model_copy(update={"listen": listen or settings.page.listen or ANY_PORT})
    is_daemons = listen in ("", settings.page.listen)
    serve_page(settings.model_copy(update={"page": chosen}), is_daemons=is_daemons)


def serve_page(config: Config, *, anywhere: bool = False, is_daemons: bool = False) -> None:
    """Serve the page until Ctrl-C. anywhere: if its address is in use, serve it on a free port instead. is_daemons: its
    address is that of the daemon, so if that serves it, say so. Raises ConfigError if the address is in use otherwise."""
    import anyio

    from daemon.config.state import closed_to_others
    from daemon.server import control
    from daemon.server.app import listen
    from daemon.server.page.process import serve

    http = config.page_http
    try:
        opened = listen(http, "page")
    except ConfigError as error:
        if anywhere:
            free = config.page.model_copy(update={"listen": ANY_PORT})
            serve_page(config.model_copy(update={"page": free}))
            return
        with contextlib.suppress(VisiondError):
            obstacles = control.ask_status(config).obstacles
            if is_daemons and not any(each.startswith("page:") for each in obstacles):
                console.print(
                    f"The daemon is running and serves the page: {printable(http.url_at(http.port))}"
                )
                return
        raise ConfigError([f"{error} For this command: --listen {ANY_PORT}"]) from error
    with opened as listener, closed_to_others(), contextlib.suppress(KeyboardInterrupt):
        console.print(f"{printable(http.url_at(listener.getsockname()[1]))}      Ctrl-C ends it")
        anyio.run(serve, config, listener, backend_options={"use_uvloop": True})


def follow(
    after: Annotated[
        int | None,
        option("--after NUMBER", "Begin behind this number. Default: now.", min=0, show_default=False),
    ] = None,
    full: Annotated[bool, flag("--full", "Print all that the sidecar has.")] = False,
    config: ConfigOption = None,
) -> None:
    """Print a line of JSON for each image that is done or has failed.

    Goes on until Ctrl-C. Each line has a `number`; --after with the last
    one that you have seen goes on behind it, whether visiond or you were
    away. 0 begins with the first image.

    Examples:
      visiond follow
      visiond follow --after 0 --full > everything.jsonl
    """

    from daemon.ledger.records import open_reader
    from daemon.search.following import encode_events, read_last

    with (
        open_reader(read_config(config, needs_stages=False)) as reader,
        contextlib.suppress(KeyboardInterrupt),
    ):
        place = read_last(reader) if after is None else after
        while True:
            lines, following = encode_events(reader, place, full=full)
            sys.stdout.buffer.writelines(line + b"\n" for _, line in lines)
            sys.stdout.buffer.flush()
            if following == place:
                time.sleep(FOLLOW_SECONDS)
            place = following
